//! `thunder cluster status --watch` in a terminal: a screen that shows the cluster as it is now.
//!
//! Written to the terminal directly: `ratatui` would add 14 packages, and enable features of shared
//! ones that rebuild most others, for one screen without input.

use std::collections::BTreeMap;
use std::io::Write;
use std::path::Path;
use std::time::{Duration, Instant};

use serde_json::Value;
use thunder_model::error::human_bytes;
use thunder_node::agent::control::{self, Reply, Request};
use thunder_node::agent::{MemberStatus, ModelStatus, Status};
use tokio::signal::unix::{SignalKind, signal};
use unicode_width::{UnicodeWidthChar, UnicodeWidthStr};

use super::{fetch, status};
use crate::stats;

/// Interval of the screen.
const EVERY: Duration = Duration::from_secs(1);
/// Columns of a bar.
const BAR: usize = 20;
/// The screen of a terminal that does not tell its size.
const USUAL_SIZE: (usize, usize) = (100, 30);

/// Shows the screen until Ctrl-C.
///
/// # Errors
/// When no agent runs here at first. Later it is waited for.
pub async fn run(data: &Path) -> anyhow::Result<()> {
    let (mut interrupt, mut terminate) = (signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?);
    let mut last = fetch(data).await?;
    let (mut rates, screen) = (Rates::default(), Screen::open()?);
    loop {
        let missing = match fetch(data).await {
            Ok(status) => {
                last = status;
                None
            }
            Err(error) => Some(crate::report::line(&error)),
        };
        let served = if missing.is_none() { served(data).await } else { Value::Null };
        let now = Instant::now();
        let rates = rates.of(&served, now);
        screen.draw(|width, height| frame(&last, &served, &rates, missing.as_deref(), width, height))?;
        tokio::select! {
            _ = interrupt.recv() => return Ok(()),
            _ = terminate.recv() => return Ok(()),
            () = tokio::time::sleep(EVERY) => {}
        }
    }
}

/// What the models' heads count; null if the agent does not say.
async fn served(data: &Path) -> Value {
    match control::ask(data, &Request::Served).await {
        Ok(Reply::Served(text)) => serde_json::from_str(&text).unwrap_or_default(),
        _ => Value::Null,
    }
}

/// The terminal's other screen, without a cursor. Dropping it shows the first one as it was.
struct Screen;

impl Screen {
    fn open() -> std::io::Result<Self> {
        print(b"\x1b[?1049h\x1b[?25l")?;
        Ok(Self)
    }

    fn draw(&self, frame: impl FnOnce(usize, usize) -> Vec<Line>) -> std::io::Result<()> {
        let size = rustix::termios::tcgetwinsize(std::io::stdout()).ok();
        let size = size.filter(|size| size.ws_col > 0 && size.ws_row > 0);
        let (width, height) =
            size.map_or(USUAL_SIZE, |size| (usize::from(size.ws_col), usize::from(size.ws_row)));
        let mut text = String::from("\x1b[H");
        for (index, line) in frame(width, height).into_iter().enumerate() {
            let begin = if index > 0 { "\r\n" } else { "" };
            let style = match line.tone {
                Tone::Plain => "",
                Tone::Title => "\x1b[1m",
                Tone::Wrong => "\x1b[31m",
            };
            text += &format!("{begin}{style}{}\x1b[0m\x1b[K", line.text);
        }
        text += "\x1b[J";
        print(text.as_bytes())
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        let _ = print(b"\x1b[?25h\x1b[?1049l");
    }
}

fn print(bytes: &[u8]) -> std::io::Result<()> {
    let mut out = std::io::stdout().lock();
    out.write_all(bytes)?;
    out.flush()
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Tone {
    Plain,
    Title,
    Wrong,
}

/// A line of the screen.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Line {
    tone: Tone,
    text: String,
}

fn line(tone: Tone, text: impl Into<String>) -> Line {
    Line { tone, text: text.into() }
}

/// Tokens a second that a model reads and writes.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
struct Rate {
    prefill: f64,
    decode: f64,
}

/// What each model had counted when it was asked last.
#[derive(Debug, Default)]
struct Rates(BTreeMap<String, (Instant, f64, f64)>);

impl Rates {
    /// Rates since the last reading. A head that counts anew has none for a moment.
    fn of(&mut self, served: &Value, now: Instant) -> BTreeMap<String, Rate> {
        let mut rates = BTreeMap::new();
        let before = std::mem::take(&mut self.0);
        for model in served["models"].as_array().into_iter().flatten() {
            let Some(name) = model["name"].as_str() else { continue };
            let count = |field: &str| model["load"][field].as_f64();
            let (Some(prompt), Some(generated)) = (count("prompt_tokens"), count("generated_tokens")) else {
                continue;
            };
            if let Some((at, had_prompt, had_generated)) = before.get(name) {
                let seconds = now.saturating_duration_since(*at).as_secs_f64().max(1e-3);
                let rate = |now: f64, had: f64| if now >= had { (now - had) / seconds } else { 0.0 };
                let rate =
                    Rate { prefill: rate(prompt, *had_prompt), decode: rate(generated, *had_generated) };
                rates.insert(name.to_owned(), rate);
            }
            self.0.insert(name.to_owned(), (now, prompt, generated));
        }
        rates
    }
}

/// The screen's lines: at most `height`, each at most `width` columns.
fn frame(
    status: &Status,
    served: &Value,
    rates: &BTreeMap<String, Rate>,
    missing: Option<&str>,
    width: usize,
    height: usize,
) -> Vec<Line> {
    let up = status.members.iter().filter(|member| member.up).count();
    // `sum` of nothing is -0.
    let decode = rates.values().fold(0.0, |sum, rate| sum + rate.decode);
    let title = format!("{up} of {} nodes answer · {decode:.0} tokens/s · Ctrl-C ends", status.members.len());
    let mut lines = vec![line(Tone::Title, title)];
    if let Some(missing) = missing {
        lines.push(line(Tone::Wrong, format!("The agent does not answer, this is old: {missing}")));
    }
    let nodes = status.members.iter().map(|member| node(member, member.id == status.me, served));
    section(&mut lines, "Nodes", nodes.collect());
    section(&mut lines, "Models", status.models.iter().map(|one| model(one, served, rates)).collect());
    let links = status.links.iter().map(|link| {
        let row = stats::link_row(status, link);
        let note = if link.far_below { "far below its port" } else { "" };
        let [from, to, _, kind, trip, measured, ..] = row;
        let cells = [format!("{from} → {to}"), kind, trip, measured, note.to_owned()];
        (if link.far_below { Tone::Wrong } else { Tone::Plain }, cells.to_vec())
    });
    section(&mut lines, "Links", links.collect());
    let mut notes = status.problems();
    notes.extend(
        status::failures(status).into_iter().map(|(model, node, why)| format!("{model} on {node}: {why}")),
    );
    notes.extend(status.newcomers.iter().map(|newcomer| format!("{} waits to be approved", newcomer.name)));
    notes.extend(status.code.iter().map(|code| {
        format!("in no cluster; to add this machine to one, type on one of its nodes: thunder cluster approve {code}")
    }));
    if !notes.is_empty() {
        lines.push(line(Tone::Title, "Notes"));
        lines.extend(notes.into_iter().map(|note| line(Tone::Wrong, format!("  {note}"))));
    }
    if lines.len() > height {
        lines.truncate(height.saturating_sub(1));
        lines.push(line(Tone::Title, "… the window is too small for the rest"));
    }
    lines.iter_mut().for_each(|line| line.text = cut(&line.text, width));
    lines
}

/// A heading and rows whose columns begin at the same place.
fn section(lines: &mut Vec<Line>, title: &str, rows: Vec<(Tone, Vec<String>)>) {
    if rows.is_empty() {
        return;
    }
    lines.push(line(Tone::Title, title));
    let columns = rows.iter().map(|(_, row)| row.len()).max().unwrap_or(0);
    let width_of = |column: usize| {
        rows.iter().filter_map(|(_, row)| row.get(column)).map(|cell| cell.width()).max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..columns).map(width_of).collect();
    for (tone, row) in &rows {
        let mut text = String::from(" ");
        for (cell, width) in row.iter().zip(&widths).filter(|(_, width)| **width > 0) {
            text += &format!(" {cell}{} ", " ".repeat(width - cell.width()));
        }
        lines.push(line(*tone, text.trim_end()));
    }
}

/// The longest beginning of a text that fits, without characters that would move the cursor.
fn cut(text: &str, width: usize) -> String {
    let mut left = width;
    let visible = text.chars().filter(|letter| !letter.is_control());
    let fits = visible.take_while(|letter| {
        let columns = letter.width().unwrap_or(0);
        let fits = columns <= left;
        left = left.saturating_sub(columns);
        fits
    });
    fits.collect()
}

/// Shares of a whole as a bar.
fn bar(parts: &[(f64, char)], whole: f64) -> String {
    let (mut text, mut sum) = (String::new(), 0.0);
    for (part, letter) in parts {
        sum += part.max(0.0);
        let end = (sum / whole.max(1.0) * BAR as f64).round().clamp(0.0, BAR as f64) as usize;
        let count = end.saturating_sub(text.chars().count());
        text.extend(std::iter::repeat_n(*letter, count));
    }
    let rest = BAR - text.chars().count();
    text.extend(std::iter::repeat_n('·', rest));
    format!("[{text}]")
}

fn node(member: &MemberStatus, is_me: bool, served: &Value) -> (Tone, Vec<String>) {
    let name = if is_me { format!("{} (here)", member.name) } else { member.name.clone() };
    let tone = if member.up { Tone::Plain } else { Tone::Wrong };
    let mut row = vec![name, status::state(member).to_owned()];
    let Some(report) = member.report.as_ref().filter(|_| member.up) else { return (tone, row) };
    // What this node's ranks hold, of all models.
    let models = served["models"].as_array().into_iter().flatten();
    let shards = models.flat_map(|model| model["load"]["shards"].as_array().into_iter().flatten());
    let own = shards.filter(|shard| shard["node"] == member.name.as_str());
    let bytes = |shard: &Value| {
        ["weight_bytes", "kv_bytes"].iter().filter_map(|name| shard[*name].as_u64()).sum::<u64>()
    };
    let held: u64 = own.map(bytes).sum();
    let used = report.memory_total.saturating_sub(report.memory_free);
    let parts = [(held.min(used) as f64, '█'), (used.saturating_sub(held) as f64, '▒')];
    row.extend([
        format!("{} cores", report.cores),
        bar(&parts, report.memory_total as f64),
        format!("{} of {} free", human_bytes(report.memory_free), human_bytes(report.memory_total)),
        if held > 0 { format!("models {}", human_bytes(held)) } else { String::new() },
        report.temperature_c.map_or_else(String::new, |degrees| format!("{degrees} °C")),
    ]);
    (tone, row)
}

fn model(model: &ModelStatus, served: &Value, rates: &BTreeMap<String, Rate>) -> (Tone, Vec<String>) {
    let nodes: Vec<&str> = model.ranks.iter().map(|rank| rank.node.as_str()).collect();
    let tone = if model.ready || model.asleep { Tone::Plain } else { Tone::Wrong };
    let mut row = vec![model.name.clone(), model.in_words(), nodes.join(", ")];
    let found =
        served["models"].as_array().into_iter().flatten().find(|one| one["name"] == model.name.as_str());
    let Some(load) = found.map(|found| &found["load"]).filter(|load| load.is_object()) else {
        return (tone, row);
    };
    let rate = rates.get(&model.name).copied().unwrap_or_default();
    let count = |name: &str| load[name].as_u64().unwrap_or(0);
    let (used, all) = (count("kv_tokens_used"), count("kv_tokens"));
    row.extend([
        format!("decode {:.1} tokens/s", rate.decode),
        format!("prefill {:.0}", rate.prefill),
        format!("{} running, {} waiting", count("running"), count("waiting")),
        format!("KV {} {} of {all}", bar(&[(used as f64, '█')], all as f64), used),
    ]);
    (tone, row)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
    use serde_json::json;

    use super::*;

    fn id(letter: &str) -> String {
        letter.repeat(64)
    }

    fn cluster() -> (Status, Value) {
        let member = |letter: &str, name: &str, up: bool| {
            json!({
                "id": id(letter), "short": letter, "name": name, "up": up, "cut_off_from": [], "drained": name == "bee",
                "addresses": [],
                "report": {
                    "version": "0.1.0", "system": "linux x86_64", "cores": 8, "memory_total": 16u64 << 30,
                    "memory_free": 8u64 << 30, "api": null, "ranks": [], "temperature_c": 55,
                },
            })
        };
        let status = json!({
            "me": id("a"), "code": null, "removed": false, "document": "", "disk_error": null,
            "members": [member("a", "ant", true), member("b", "bee", true), member("c", "cat", false)],
            "newcomers": [{"short": "d", "name": "dog\u{1b}[2J", "addresses": []}],
            "models": [{
                "name": "m", "ready": true, "generation": 1,
                "ranks": [{"node": "ant", "state": "Ready"}, {"node": "bee", "state": null}],
            }],
            "links": [{
                "from": "a", "to": "b", "latency_us": 42, "bytes_s": 1_625_000_000u64, "interface": "eth0",
                "kind": "ethernet", "claimed_bits_s": 200_000_000_000u64, "far_below": true,
            }],
        });
        let served = json!({"models": [{"name": "m", "load": {
            "running": 2, "waiting": 1, "kv_tokens": 1000, "kv_tokens_used": 250, "prompt_tokens": 100,
            "generated_tokens": 50, "shards": [{"node": "ant", "weight_bytes": 4u64 << 30, "kv_bytes": 0}],
        }}]});
        (serde_json::from_value(status).unwrap(), served)
    }

    fn text(lines: &[Line]) -> String {
        lines.iter().map(|line| format!("{}\n", line.text)).collect()
    }

    #[test]
    fn the_screen_shows_nodes_models_links_rates_and_what_is_wrong() {
        let (status, served) = cluster();
        let mut rates = Rates::default();
        let began = Instant::now();
        assert_eq!(rates.of(&served, began).len(), 0);
        let mut later = served.clone();
        later["models"][0]["load"]["generated_tokens"] = json!(150);
        let rates = rates.of(&later, began + Duration::from_secs(2));
        let lines = frame(&status, &later, &rates, None, 200, 50);
        let shown = text(&lines);
        for part in [
            "2 of 3 nodes answer · 50 tokens/s",
            "ant (here)",
            "[█████▒▒▒▒▒··········]",
            "models 4.0 GiB",
            "55 °C",
            "up, drained",
            "decode 50.0 tokens/s",
            "2 running, 1 waiting",
            "[█████···············] 250 of 1000",
            "ant → bee",
            "13 Gbit/s",
            "far below its port",
            "cat does not answer",
            "dog[2J waits to be approved",
        ] {
            assert!(shown.contains(part), "{part}:\n{shown}");
        }
        assert!(!shown.contains('\u{1b}'));
        let first = text(&frame(&status, &served, &BTreeMap::new(), None, 200, 50));
        assert!(first.contains("answer · 0 tokens/s"), "{first}");
        let wrong: Vec<&str> =
            lines.iter().filter(|line| line.tone == Tone::Wrong).map(|line| line.text.trim()).collect();
        assert!(wrong.iter().any(|text| text.starts_with("cat")), "{wrong:?}");
    }

    #[test]
    fn the_screen_fits_any_window() {
        let (status, served) = cluster();
        for (width, height) in [(200, 50), (80, 24), (40, 10), (10, 3), (1, 1)] {
            let lines = frame(&status, &served, &BTreeMap::new(), Some("gone"), width, height);
            assert!(lines.len() <= height, "{width} x {height}: {}", lines.len());
            assert!(
                lines.iter().all(|line| line.text.width() <= width),
                "{width} x {height}: {}",
                text(&lines)
            );
        }
        assert_eq!(
            (cut("ab漢字", 4), cut("ab漢字", 3), cut("a\r\nb", 9)),
            ("ab漢".into(), "ab".into(), "ab".into())
        );
    }

    #[test]
    fn counters_that_begin_anew_give_no_rate() {
        let (_, served) = cluster();
        let mut rates = Rates::default();
        let began = Instant::now();
        rates.of(&served, began);
        let mut anew = served.clone();
        anew["models"][0]["load"]["generated_tokens"] = json!(1);
        anew["models"][0]["load"]["prompt_tokens"] = json!(1);
        let found = rates.of(&anew, began + Duration::from_secs(1));
        assert_eq!(found.get("m"), Some(&Rate::default()));
        assert!(rates.of(&Value::Null, began + Duration::from_secs(2)).is_empty());
        assert!(rates.of(&served, began + Duration::from_secs(3)).is_empty(), "a model that was away");
    }
}
