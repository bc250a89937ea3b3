//! The Markdown tables of a result.

use super::report::{Model, Report, Speed, median, ratio};
use anyhow::{Context, ensure};
use std::fmt::Write;

const BEGIN: &str = "<!-- tables of ";
const END: &str = "<!-- end of tables -->";

/// The file that a document's tables come from, if it has any.
#[cfg(test)]
pub fn quoted(document: &str) -> Option<&str> {
    let rest = &document[document.find(BEGIN)? + BEGIN.len()..];
    rest.split_once(" -->").map(|(name, _)| name).filter(|name| !name.is_empty() && *name != "no run yet")
}

/// The document with the tables of `report` between its markers; `name` is the result's file.
pub fn replace(document: &str, name: &str, report: &Report) -> anyhow::Result<String> {
    let begin = document.find(BEGIN).with_context(|| format!("the document has no line `{BEGIN}… -->`"))?;
    let end = document.find(END).with_context(|| format!("the document has no line `{END}`"))?;
    ensure!(begin < end, "`{END}` comes before `{BEGIN}`");
    Ok(format!("{}{BEGIN}{name} -->\n\n{}\n{}", &document[..begin], markdown(report), &document[end..]))
}

/// All tables, each with the command that measured it.
pub fn markdown(report: &Report) -> String {
    let mut out = String::new();
    let mut add = |section: String| {
        if !out.is_empty() {
            out.push('\n');
        }
        out += &section;
    };
    add(head(report));
    add(memory(report));
    add(speeds("Decode: tokens/s of one sequence", "share of memory", &report.decode));
    add(batches(report));
    add(speeds("Prefill: tokens/s of a prompt of 512 tokens", "share of peak", &report.prefill));
    add(ranks(report));
    add(all_reduce(report));
    add(start(report));
    add(builtin(report));
    out
}

fn head(report: &Report) -> String {
    let machine = &report.machine;
    format!(
        "Machine `{}`: {}, {} cores, {:.0} GiB, {}, kernels {}. Commit {}, {}. `{}` took {:.0} minutes.\n",
        machine.name,
        machine.cpu,
        machine.cores,
        machine.memory_bytes as f64 / (1u64 << 30) as f64,
        machine.system,
        machine.kernel,
        report.commit,
        report.date,
        report.command,
        report.seconds as f64 / 60.0
    )
}

/// A heading, the commands of a section and its table.
fn section(title: &str, commands: &[&str], columns: &[&str], rows: Vec<Vec<String>>) -> String {
    let mut out = format!("## {title}\n\n");
    for command in commands {
        let _ = writeln!(out, "    {command}");
    }
    if !commands.is_empty() {
        out.push('\n');
    }
    let _ = writeln!(out, "| {} |\n|{}", columns.join(" | "), "---|".repeat(columns.len()));
    for row in rows {
        let _ = writeln!(out, "| {} |", row.join(" | "));
    }
    out
}

fn name(model: &Model) -> String {
    format!("{}, {} bits", model.shape, model.bits)
}

/// Three significant digits, as the noise of these machines allows no more.
fn number(value: f64) -> String {
    match value.abs() {
        _ if !value.is_finite() => "–".to_owned(),
        size if size >= 100.0 => format!("{value:.0}"),
        size if size >= 10.0 => format!("{value:.1}"),
        _ => format!("{value:.2}"),
    }
}

fn percent(value: f64) -> String {
    format!("{:.0} %", 100.0 * value)
}

/// The median, and the slowest and fastest round.
fn rounds(values: &[f64]) -> String {
    let (low, high) = values
        .iter()
        .fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), value| (low.min(*value), high.max(*value)));
    match values.len() {
        0 => "–".to_owned(),
        1 => number(values[0]),
        _ => format!("{} ({} to {})", number(median(values)), number(low), number(high)),
    }
}

fn times(ratio: Option<f64>) -> String {
    ratio.map_or_else(|| "–".to_owned(), |ratio| format!("**{ratio:.2}**"))
}

fn memory(report: &Report) -> String {
    let rows = report.memory.iter();
    let rows = rows.map(|row| vec![row.threads.to_string(), number(row.bytes_per_s / 1e9)]).collect();
    section("Memory bandwidth", &["thunder bench membw"], &["threads", "GB/s"], rows)
}

fn speeds(title: &str, share: &str, speeds: &[Speed]) -> String {
    let mut commands: Vec<&str> = speeds.first().map(|row| row.command.as_str()).into_iter().collect();
    commands.extend(speeds.iter().find_map(|row| row.peer.as_ref()).map(|peer| peer.command.as_str()));
    let rows = speeds.iter().map(|row| {
        let peer: &[f64] = row.peer.as_ref().map_or(&[], |peer| &peer.tokens_per_s);
        vec![
            name(&row.model),
            row.threads.to_string(),
            rounds(&row.tokens_per_s),
            percent(median(&row.share)),
            rounds(peer),
            times(ratio(&row.tokens_per_s, peer)),
        ]
    });
    let peer = speeds.iter().find_map(|row| row.peer.as_ref()).map_or("peer", |peer| &peer.name);
    section(title, &commands, &["model", "threads", "thunder", share, peer, "ratio"], rows.collect())
}

fn batches(report: &Report) -> String {
    let commands: Vec<&str> = report.batches.first().map(|row| row.command.as_str()).into_iter().collect();
    let rows = report.batches.iter().map(|row| {
        vec![
            name(&row.model),
            row.threads.to_string(),
            row.sequences.to_string(),
            number(row.tokens_per_s),
            percent(row.kept),
        ]
    });
    section(
        "Batches: tokens/s of several sequences",
        &commands,
        &["model", "threads", "sequences", "tokens/s of all", "speed each keeps"],
        rows.collect(),
    )
}

fn ranks(report: &Report) -> String {
    let commands: Vec<&str> = report.ranks.last().map(|row| row.command.as_str()).into_iter().collect();
    let first = report.ranks.first();
    let rows = report.ranks.iter().map(|row| {
        let over = if row.transport.is_empty() { String::new() } else { format!(", {}", row.transport) };
        let ranks = if row.ranks == 1 { "rank" } else { "ranks" };
        let threads = if row.threads_per_rank == 1 { "thread" } else { "threads" };
        let base = |of: fn(&super::report::Ranks) -> &Vec<f64>| {
            times(first.and_then(|first| ratio(of(row), of(first))))
        };
        vec![
            format!("{} {ranks} of {} {threads}{over}", row.ranks, row.threads_per_rank),
            rounds(&row.decode_tokens_per_s),
            base(|row| &row.decode_tokens_per_s),
            if row.ranks == 1 { "–".to_owned() } else { percent(median(&row.reduce_share)) },
            rounds(&row.prefill_tokens_per_s),
            base(|row| &row.prefill_tokens_per_s),
        ]
    });
    let title = match first {
        Some(first) => format!("Ranks and threads: {}", name(&first.model)),
        None => "Ranks and threads".to_owned(),
    };
    section(
        &title,
        &commands,
        &[
            "",
            "decode, tokens/s",
            "to the first row",
            "in all-reduces",
            "prefill, tokens/s",
            "to the first row",
        ],
        rows.collect(),
    )
}

fn all_reduce(report: &Report) -> String {
    let rows = report.all_reduce.iter().map(|row| {
        vec![
            row.transport.clone(),
            row.bytes.to_string(),
            rounds(&row.median_us),
            rounds(&row.mpi_median_us),
            times(ratio(&row.mpi_median_us, &row.median_us)),
        ]
    });
    let ranks = report.all_reduce.first().map_or(2, |row| row.ranks);
    section(
        &format!("All-reduce of f32 among {ranks} ranks: median µs"),
        &["bench/collectives_vs_mpi.sh f32      # the same by hand, with MLX's ring too"],
        &["transport", "bytes", "thunder", "Open MPI", "ratio (above 1: thunder is faster)"],
        rows.collect(),
    )
}

fn start(report: &Report) -> String {
    let commands: Vec<&str> = report.start.first().map(|row| row.command.as_str()).into_iter().collect();
    let rows = report.start.iter();
    let rows =
        rows.map(|row| vec![name(&row.model), row.threads.to_string(), rounds(&row.seconds)]).collect();
    section(
        "Start: seconds from the process to the first token",
        &commands,
        &["model", "threads", "seconds"],
        rows,
    )
}

fn builtin(report: &Report) -> String {
    let rows = report.builtin.iter().map(|row| {
        vec![row.ranks.to_string(), number(row.tokens_per_s), number(row.time_to_first_token_s * 1e3)]
    });
    section(
        "The built-in model (12 million parameters)",
        &["thunder demo"],
        &["ranks of one thread", "tokens/s", "first token, ms"],
        rows.collect(),
    )
}

#[cfg(test)]
pub mod tests {
    use super::super::report::*;
    use super::*;

    /// A small result with every kind of row.
    pub fn sample() -> Report {
        let model = Model { shape: "llama-1b".into(), bits: 4 };
        let command = "thunder bench decode llama-1b-4".to_owned();
        let peer = Peer {
            name: "llama.cpp".into(),
            tokens_per_s: vec![10.0, 12.0],
            command: "llama-bench -n 64".into(),
        };
        Report {
            format: FORMAT,
            machine: Machine {
                name: "desk".into(),
                cpu: "Xeon".into(),
                cores: 2,
                memory_bytes: 24 << 30,
                system: "Linux 6".into(),
                kernel: "avx512".into(),
            },
            commit: "abc".into(),
            date: "2026-11-22".into(),
            command: "cargo xtask bench --peers".into(),
            seconds: 480,
            memory: vec![Memory { threads: 1, bytes_per_s: 10.5e9 }],
            decode: vec![Speed {
                model: model.clone(),
                threads: 1,
                tokens_per_s: vec![15.0, 15.6],
                share: vec![0.96, 0.98],
                peer: Some(peer),
                command: command.clone(),
            }],
            batches: vec![Batch {
                model: model.clone(),
                threads: 1,
                sequences: 4,
                tokens_per_s: 54.7,
                kept: 0.89,
                command: command.clone(),
            }],
            prefill: vec![],
            ranks: vec![Ranks {
                model: model.clone(),
                ranks: 1,
                threads_per_rank: 1,
                transport: String::new(),
                decode_tokens_per_s: vec![15.0],
                prefill_tokens_per_s: vec![110.0],
                reduce_share: vec![0.0],
                command: command.clone(),
            }],
            all_reduce: vec![AllReduce {
                ranks: 2,
                transport: "shm".into(),
                bytes: 8192,
                median_us: vec![1.8, 1.9],
                mpi_median_us: vec![5.4, 5.7],
            }],
            start: vec![Start { model, threads: 1, seconds: vec![0.31], command }],
            builtin: vec![Builtin { ranks: 2, tokens_per_s: 3600.0, time_to_first_token_s: 0.0016 }],
        }
    }

    #[test]
    fn a_result_survives_json_and_becomes_tables() {
        let report = sample();
        let text = serde_json::to_string(&report).unwrap();
        assert_eq!(serde_json::from_str::<Report>(&text).unwrap(), report);
        let tables = markdown(&report);
        for expected in [
            "| llama-1b, 4 bits | 1 | 15.3 (15.0 to 15.6) | 97 % | 11.0 (10.0 to 12.0) | **1.40** |",
            "| llama-1b, 4 bits | 1 | 4 | 54.7 | 89 % |",
            "| 1 rank of 1 thread | 15.0 | **1.00** | – | 110 | **1.00** |",
            "| shm | 8192 | 1.85 (1.80 to 1.90) | 5.55 (5.40 to 5.70) | **3.00** |",
            "| llama-1b, 4 bits | 1 | 0.31 |",
            "| 2 | 3600 | 1.60 |",
            "    llama-bench -n 64\n",
            "Commit abc, 2026-11-22.",
        ] {
            assert!(tables.contains(expected), "{expected} is not in\n{tables}");
        }
    }

    #[test]
    fn tables_are_put_between_a_documents_markers() {
        let document = format!("# Title\n\n{BEGIN}old.json -->\n\nold\n\n{END}\n\nafter\n");
        let replaced = replace(&document, "new.json", &sample()).unwrap();
        assert_eq!(quoted(&replaced), Some("new.json"));
        assert!(replaced.starts_with("# Title\n\n") && replaced.ends_with(&format!("\n{END}\n\nafter\n")));
        assert!(!replaced.contains("old"));
        assert_eq!(replace(&replaced, "new.json", &sample()).unwrap(), replaced);
        assert!(replace("no markers", "new.json", &sample()).is_err());
    }
}
