//! Runs the measurements, one process after the other.

use super::Args;
use super::machine::{commit, machine};
use super::measurements::Measurements;
use super::peers::{LlamaCpp, Mpi};
use super::report::*;
use crate::process::{command, output, run as run_command};
use crate::{cache, repository};
use anyhow::Context;
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

/// The program, the models, and the progress of the measurements.
struct Bench {
    thunder: PathBuf,
    models: PathBuf,
    plan: Measurements,
    llama: Option<LlamaCpp>,
    mpi: Option<Mpi>,
    started: Instant,
}

pub fn all(args: &Args) -> anyhow::Result<Report> {
    let started = Instant::now();
    let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    say(started, "building thunder");
    let build = ["cargo", "build", "--locked", "--release", "--package", "thunder"];
    run_command(command(build).current_dir(repository()))?;
    let target = std::env::var_os("CARGO_TARGET_DIR").map_or(repository().join("target"), PathBuf::from);
    let mut bench = Bench {
        thunder: target.join("release/thunder"),
        models: cache()?.join("bench"),
        plan: Measurements::new(args, cores),
        llama: None,
        mpi: None,
        started,
    };
    if args.peers {
        say(started, "building llama.cpp, if it is not there");
        bench.llama = Some(LlamaCpp::build()?);
        bench.mpi = Mpi::build(&target)?;
        if bench.mpi.is_none() {
            say(started, "no mpicc (apt-get install openmpi-bin libopenmpi-dev): all-reduces have no peer");
        }
    }
    for model in &bench.plan.models {
        bench.synth(model)?;
        if let Some(llama) = &mut bench.llama {
            say(started, &format!("llama.cpp's {}, {} bits", model.shape, model.bits));
            llama.model(model)?;
        }
    }
    let (memory, kernel) = bench.memory()?;
    let report = Report {
        format: FORMAT,
        machine: machine(args.machine.as_deref(), cores, kernel)?,
        commit: commit()?,
        date: output(&mut command(["date", "-u", "+%F"]))?.trim().to_owned(),
        command: if args.peers { "cargo xtask bench --peers" } else { "cargo xtask bench" }.to_owned(),
        memory,
        decode: bench.decode()?,
        batches: bench.batches()?,
        prefill: bench.prefill()?,
        ranks: bench.ranks(cores)?,
        all_reduce: if cores > 1 { bench.all_reduce()? } else { Vec::new() },
        start: bench.start()?,
        builtin: bench.builtin()?,
        seconds: started.elapsed().as_secs(),
    };
    Ok(report)
}

fn say(started: Instant, what: &str) {
    eprintln!("[{:4} s] {what}", started.elapsed().as_secs());
}

fn number(value: &Value, field: &str) -> anyhow::Result<f64> {
    value[field].as_f64().with_context(|| format!("no number `{field}` in {value}"))
}

impl Bench {
    fn say(&self, what: &str) {
        say(self.started, what);
    }

    fn folder(&self, model: &Model) -> PathBuf {
        self.models.join(format!("{}-{}", model.shape, model.bits))
    }

    /// Writes a model folder with a real model's shape and random weights, once on each machine.
    fn synth(&self, model: &Model) -> anyhow::Result<()> {
        let folder = self.folder(model);
        if folder.exists() {
            return Ok(());
        }
        self.say(&format!("writing {}, {} bits", model.shape, model.bits));
        fs::create_dir_all(&self.models)?;
        let part = folder.with_extension("part");
        if part.exists() {
            fs::remove_dir_all(&part)?;
        }
        let bits = model.bits.to_string();
        let synth = ["model", "synth", "--arch", &model.shape, "--bits", &bits];
        output(Command::new(&self.thunder).args(synth).arg(&part))?;
        fs::rename(&part, &folder).with_context(|| folder.display().to_string())
    }

    /// The JSON output of `thunder`.
    fn thunder(&self, arguments: &[&str]) -> anyhow::Result<Value> {
        let text = output(Command::new(&self.thunder).args(arguments).arg("--json"))?;
        serde_json::from_str(&text).with_context(|| format!("thunder {arguments:?} printed no JSON: {text}"))
    }

    fn memory(&self) -> anyhow::Result<(Vec<Memory>, String)> {
        self.say("memory bandwidth");
        let measured = self.thunder(&["bench", "membw"])?;
        let rows = measured["rows"].as_array().context("thunder bench membw: no rows")?;
        let rows = rows.iter().map(|row| {
            Ok(Memory { threads: number(row, "threads")? as usize, bytes_per_s: number(row, "bytes_per_s")? })
        });
        Ok((rows.collect::<anyhow::Result<_>>()?, measured["kernel"].as_str().unwrap_or("?").to_owned()))
    }

    /// One round of `thunder bench decode` of one sequence.
    fn decode_once(&self, model: &Model, options: &[&str]) -> anyhow::Result<Value> {
        let folder = self.folder(model).display().to_string();
        let tokens = self.plan.decode_tokens.to_string();
        let bench = ["bench", "decode", &folder, "--tokens", &tokens, "--repeat", "1"];
        let mut measured = self.thunder(&[&bench[..], options].concat())?;
        Ok(measured["rows"][0].take())
    }

    fn prefill_once(&self, model: &Model, options: &[&str]) -> anyhow::Result<Value> {
        let folder = self.folder(model).display().to_string();
        let prompt = self.plan.prompt_tokens.to_string();
        let bench = ["bench", "prefill", &folder, "--prompt", &prompt, "--repeat", "1"];
        self.thunder(&[&bench[..], options].concat())
    }

    fn decode(&self) -> anyhow::Result<Vec<Speed>> {
        let mut rows = Vec::new();
        for model in &self.plan.models {
            for &threads in &self.plan.threads {
                self.say(&format!("decode {}, {} bits, threads: {threads}", model.shape, model.bits));
                let count = threads.to_string();
                let once = || self.decode_once(model, &["--ranks", "1", "--threads", &count]);
                let peer = self
                    .llama
                    .as_ref()
                    .map(|llama| move || llama.tokens_per_s(model, threads, (0, self.plan.decode_tokens)));
                let command = format!(
                    "thunder bench decode {}-{} --ranks 1 --threads {threads} --tokens {} --repeat 1",
                    model.shape, model.bits, self.plan.decode_tokens
                );
                let peer_command =
                    format!("llama-bench -p 0 -n {} -t {threads} -r 1", self.plan.decode_tokens);
                rows.push(self.turns(
                    model,
                    threads,
                    (once, "memory_share"),
                    peer,
                    (command, peer_command),
                )?);
            }
        }
        Ok(rows)
    }

    fn prefill(&self) -> anyhow::Result<Vec<Speed>> {
        let mut rows = Vec::new();
        for model in self.plan.prefill_models() {
            for &threads in &self.plan.threads {
                self.say(&format!("prefill {}, {} bits, threads: {threads}", model.shape, model.bits));
                let count = threads.to_string();
                let once = || self.prefill_once(model, &["--ranks", "1", "--threads", &count]);
                let peer = self
                    .llama
                    .as_ref()
                    .map(|llama| move || llama.tokens_per_s(model, threads, (self.plan.prompt_tokens, 0)));
                let command = format!(
                    "thunder bench prefill {}-{} --ranks 1 --threads {threads} --prompt {} --repeat 1",
                    model.shape, model.bits, self.plan.prompt_tokens
                );
                let peer_command =
                    format!("llama-bench -p {} -n 0 -t {threads} -r 1", self.plan.prompt_tokens);
                rows.push(self.turns(model, threads, (once, "peak_share"), peer, (command, peer_command))?);
            }
        }
        Ok(rows)
    }

    /// Rounds of thunder and its peer, in turn.
    fn turns(
        &self,
        model: &Model,
        threads: usize,
        (ours, share): (impl Fn() -> anyhow::Result<Value>, &str),
        theirs: Option<impl Fn() -> anyhow::Result<f64>>,
        (command, peer_command): (String, String),
    ) -> anyhow::Result<Speed> {
        let mut peer = theirs.as_ref().map(|_| Peer {
            name: "llama.cpp".into(),
            tokens_per_s: Vec::new(),
            command: peer_command,
        });
        let mut speed = Speed {
            model: model.clone(),
            threads,
            tokens_per_s: Vec::new(),
            share: Vec::new(),
            peer: None,
            command,
        };
        for _ in 0..self.plan.rounds {
            let measured = ours()?;
            speed.tokens_per_s.push(number(&measured, "tokens_per_s")?);
            speed.share.push(number(&measured, share)?);
            if let (Some(theirs), Some(peer)) = (&theirs, &mut peer) {
                peer.tokens_per_s.push(theirs()?);
            }
        }
        speed.peer = peer;
        Ok(speed)
    }

    fn batches(&self) -> anyhow::Result<Vec<Batch>> {
        let model = self.plan.ranks_model();
        self.say(&format!("batches of {}, {} bits", model.shape, model.bits));
        let folder = self.folder(model).display().to_string();
        let (tokens, rounds) = ((self.plan.decode_tokens * 2 / 3).max(2), self.plan.rounds);
        let options = format!(
            "--ranks 1 --threads 1 --tokens {tokens} --batch {} --repeat {rounds}",
            self.plan.batches
        );
        let words: Vec<&str> = ["bench", "decode", &folder].into_iter().chain(options.split(' ')).collect();
        let measured = self.thunder(&words)?;
        let rows = measured["rows"].as_array().context("thunder bench decode: no rows")?;
        let rows = rows.iter().map(|row| {
            Ok(Batch {
                model: model.clone(),
                threads: 1,
                sequences: number(row, "batch")? as usize,
                tokens_per_s: number(row, "tokens_per_s")?,
                kept: number(row, "kept_per_sequence")?,
                command: format!("thunder bench decode {}-{} {options}", model.shape, model.bits),
            })
        });
        rows.collect()
    }

    /// One rank with one thread and with two, and two ranks with one thread each over each
    /// transport. Each round measures all of them.
    fn ranks(&self, cores: usize) -> anyhow::Result<Vec<Ranks>> {
        let model = self.plan.ranks_model();
        let mut settings = vec![(1, 1, "")];
        if cores > 1 {
            settings.extend([(1, 2, ""), (2, 1, "shm"), (2, 1, "tcp")]);
        }
        let row = |&(ranks, threads_per_rank, transport): &(usize, usize, &str)| Ranks {
            model: model.clone(),
            ranks,
            threads_per_rank,
            transport: transport.to_owned(),
            decode_tokens_per_s: Vec::new(),
            prefill_tokens_per_s: Vec::new(),
            reduce_share: Vec::new(),
            command: format!(
                "thunder bench decode|prefill {}-{} --ranks {ranks} --threads {threads_per_rank} --repeat 1{}",
                model.shape,
                model.bits,
                if transport.is_empty() { String::new() } else { format!(" --transport {transport}") }
            ),
        };
        let mut rows: Vec<Ranks> = settings.iter().map(row).collect();
        for round in 1..=self.plan.rounds {
            self.say(&format!("ranks and threads, round {round} of {}", self.plan.rounds));
            for row in &mut rows {
                let (ranks, threads) = (row.ranks.to_string(), row.threads_per_rank.to_string());
                let mut options = vec!["--ranks", &ranks, "--threads", &threads];
                if !row.transport.is_empty() {
                    options.extend(["--transport", &row.transport]);
                }
                let decoded = self.decode_once(model, &options)?;
                let read = self.prefill_once(model, &options)?;
                row.decode_tokens_per_s.push(number(&decoded, "tokens_per_s")?);
                row.reduce_share.push(number(&decoded, "reduce_share")?);
                row.prefill_tokens_per_s.push(number(&read, "tokens_per_s")?);
            }
        }
        Ok(rows)
    }

    fn all_reduce(&self) -> anyhow::Result<Vec<AllReduce>> {
        let sizes = self.plan.message_bytes;
        let mut rows: Vec<AllReduce> = ["shm", "tcp"]
            .into_iter()
            .flat_map(|transport| sizes.iter().map(move |&bytes| (transport, bytes)))
            .map(|(transport, bytes)| AllReduce {
                ranks: 2,
                transport: transport.to_owned(),
                bytes,
                median_us: Vec::new(),
                mpi_median_us: Vec::new(),
            })
            .collect();
        for round in 1..=self.plan.rounds {
            self.say(&format!("all-reduces, round {round} of {}", self.plan.rounds));
            for transport in ["shm", "tcp"] {
                let ours = self.comm(transport)?;
                let theirs =
                    self.mpi.as_ref().map(|mpi| mpi.median_us(transport, sizes, self.plan.message_ms));
                let theirs = theirs.transpose()?.unwrap_or_default();
                let rows = rows.iter_mut().filter(|row| row.transport == transport);
                for (index, row) in rows.enumerate() {
                    row.median_us.push(*ours.get(index).context("thunder bench comm: a size is missing")?);
                    row.mpi_median_us.extend(theirs.get(index));
                }
            }
        }
        Ok(rows)
    }

    /// Medians for each size, for two ranks that are pinned to the first two cores, like MPI's.
    fn comm(&self, transport: &str) -> anyhow::Result<Vec<f64>> {
        let port = std::net::TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
        let sizes: Vec<String> = self.plan.message_bytes.iter().map(u64::to_string).collect();
        let (sizes, time) = (sizes.join(","), self.plan.message_ms.to_string());
        let rank = |rank: &str| {
            let pinned = ["taskset", "--cpu-list", rank];
            let pinned = if cfg!(target_os = "linux") { &pinned[..] } else { &[] };
            let words: Vec<&Path> = pinned.iter().map(Path::new).chain([self.thunder.as_path()]).collect();
            let mut command = command(words);
            command.args([
                "bench",
                "comm",
                "--op",
                "all_reduce",
                "--sizes",
                &sizes,
                "--time",
                &time,
                "--json",
            ]);
            command
                .env("THUNDER_RANK", rank)
                .env("THUNDER_WORLD_SIZE", "2")
                .env("THUNDER_TRANSPORT", transport);
            command.env("THUNDER_COORDINATOR", format!("127.0.0.1:{port}")).env("THUNDER_SECRET", "bench");
            command
        };
        let mut other =
            rank("1").stdout(std::process::Stdio::null()).spawn().context("could not start a rank")?;
        let text = output(&mut rank("0"));
        other.wait()?;
        let measured: Value = serde_json::from_str(&text?).context("thunder bench comm printed no JSON")?;
        let rows = measured["rows"].as_array().context("thunder bench comm: no rows")?;
        rows.iter().map(|row| number(row, "median_us")).collect()
    }

    fn start(&self) -> anyhow::Result<Vec<Start>> {
        let mut rows = Vec::new();
        for model in self.plan.prefill_models() {
            for &threads in &self.plan.threads {
                self.say(&format!("start with {}, {} bits, threads: {threads}", model.shape, model.bits));
                let folder = self.folder(model).display().to_string();
                let count = threads.to_string();
                let mut seconds = Vec::new();
                for _ in 0..self.plan.rounds {
                    let begun = Instant::now();
                    let words = ["run", &folder, "hi", "--raw", "--max-tokens", "1", "--context", "512"];
                    output(Command::new(&self.thunder).args(words).args(["--threads", &count]))?;
                    seconds.push(begun.elapsed().as_secs_f64());
                }
                rows.push(Start {
                    model: model.clone(),
                    threads,
                    seconds,
                    command: format!(
                        "time thunder run {}-{} hi --raw --max-tokens 1 --context 512 --threads {threads}",
                        model.shape, model.bits
                    ),
                });
            }
        }
        Ok(rows)
    }

    fn builtin(&self) -> anyhow::Result<Vec<Builtin>> {
        self.say("the built-in model");
        let demo = self.thunder(&["demo"])?;
        let outcomes = demo["outcomes"].as_array().context("thunder demo: no outcomes")?;
        let rows = outcomes.iter().map(|outcome| {
            Ok(Builtin {
                ranks: number(outcome, "ranks")? as usize,
                tokens_per_s: number(outcome, "tokens_per_s")?,
                time_to_first_token_s: number(outcome, "time_to_first_token_s")?,
            })
        });
        rows.collect()
    }
}
