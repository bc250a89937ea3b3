//! `thunder bench report`: step times of a model on this machine, for `thunder capacity
//! --measured`.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use clap::Args;
use thunder_capacity::measured::Measured;
use thunder_capacity::power::Meter;
use thunder_capacity::simulate::{self, Arrival, Habit, Outcome, Served, Simulator, WARM_UP, Workload};
use thunder_compute::step::KV_BLOCK_TOKENS;
use thunder_engine::{Engine, Request, RoutedExperts, Sampling, StepTime, Usage};

use crate::engine_args::EngineArgs;
use crate::model_arg::ModelArg;
use crate::session::{self, Session};
use crate::{progress, prompt, table};

/// Number of rounds; the medians over all rounds are used.
const ROUNDS: usize = 9;
/// If the rounds take longer than this, fewer rounds are enough: in longer steps, interruptions of
/// a processor matter less.
const ROUNDS_TAKE: Duration = Duration::from_secs(20);
const LEAST_ROUNDS: usize = 3;
/// Tokens of a prompt whose reading must not count.
const SHORT_PROMPT: usize = 8;
/// Tokens of an answer whose steps are timed.
const TIMED_TOKENS: usize = 40;
/// Number of requests that are timed together, up to the maximum batch.
const BATCHES: [usize; 11] = [1, 2, 4, 8, 12, 16, 24, 32, 64, 128, 256];
/// Rows of the timed prompts, up to the rows of a step. Steps with running answers have few.
const PROMPT_ROWS: [usize; 16] = [2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 512, 768, 1024, 2048];
/// The longest prompts that are read next to running answers.
const NEXT_TO_STREAMS: usize = 6;

/// Minimum requests of a workload, and for each client: with fewer requests, the 95 % time is that
/// of the slowest. The first ones are left out, because all clients begin at once.
const LEAST_REQUESTS: usize = 100;
const REQUESTS_OF_EACH: usize = 12;

/// Workloads of --verify.
const WORKLOADS: usize = 10;

/// Runs of each workload, measured and simulated: if another guest of the host uses a core for a
/// moment, the slowest twentieth of one run takes twice as long.
const VERIFYING_RUNS: usize = 3;

/// Numbers of the workloads' requests: larger than those of the measurements, and each used only
/// once, so that the cache has no prompt.
static NUMBERS: AtomicU32 = AtomicU32::new(1 << 20);

/// Measure a model's step times on this machine, for `thunder capacity --measured`
///
/// Prints one JSON object. The machine should do nothing else during the measurement. Guessing of
/// repeated text is off, because simulations have no text.
#[derive(Args)]
pub struct ReportCommand {
    #[command(flatten)]
    model: ModelArg,
    /// Also run ten workloads three times and simulate them with the measured times; print both
    /// medians to standard error
    #[arg(long)]
    verify: bool,
    /// With --verify: how many of the ten workloads to run, evenly chosen
    #[arg(long, value_name = "N", default_value_t = WORKLOADS as u8, value_parser = clap::value_parser!(u8).range(1..=WORKLOADS as i64))]
    workloads: u8,
    #[command(flatten)]
    engine: EngineArgs,
}

impl ReportCommand {
    /// Runs the command.
    pub fn run(mut self) -> anyhow::Result<()> {
        if self.engine.draft.is_some() {
            bail!("--draft depends on the text, and simulations have none: leave it out");
        }
        self.engine.no_speculation = true;
        let Some(session) = session::open(self.model.name(), &self.engine)? else { return Ok(()) };
        let sequences = usize::from(self.engine.cache.max_batch);
        let outcome = measure(&session, sequences, self.engine.step_time).and_then(|measured| {
            println!("{}", serde_json::to_string(&measured)?);
            if self.verify { verify(&session.head.engine, &measured, self.workloads.into()) } else { Ok(()) }
        });
        let closed = session.close();
        outcome.and(closed)
    }
}

/// Answers requests with prompts of `prompt` tokens together; returns their usages.
fn answer(
    engine: &Engine,
    count: usize,
    prompt: usize,
    tokens: usize,
    seed: &mut u32,
) -> anyhow::Result<Vec<Usage>> {
    let streams = (0..count).map(|_| {
        *seed += 1;
        let arrival = Arrival { at_s: 0.0, user: 0, prompt, shared: 0, answer: tokens };
        Ok(engine.submit(request(engine, &arrival, *seed))?)
    });
    let streams = streams.collect::<anyhow::Result<Vec<_>>>()?;
    streams.into_iter().map(|stream| Ok(prompt::read(stream, || false, |_| Ok(()))?.usage)).collect()
}

fn request(engine: &Engine, arrival: &Arrival, number: u32) -> Request {
    let vocab = engine.info().vocab_size as u32;
    Request {
        prompt: simulate::prompt(arrival, number).into_iter().map(|token| token % vocab).collect(),
        sampling: Sampling { temperature: 0.0, ..Sampling::default() },
        max_tokens: Some(arrival.answer),
        ignore_eos: true,
        ..Request::default()
    }
}

/// What a round measures.
struct Round<'a> {
    engine: &'a Engine,
    /// Requests that are timed together.
    batches: Vec<usize>,
    /// Rows of the timed whole prompts.
    prompt_rows: Vec<usize>,
    /// Requests that decode while other prompts are read; 0 if only one may run.
    streams: usize,
    /// Tokens of a prompt of several steps.
    long: usize,
    seed: u32,
}

impl Round<'_> {
    /// Measurements of a round.
    fn kinds(&self) -> usize {
        self.batches.len() + self.prompt_rows.len() + 3
    }

    /// Lets the engine compute steps of all kinds. Returns the times between requests and their
    /// first steps.
    fn run(&mut self, done: impl Fn()) -> anyhow::Result<(Vec<StepTime>, Vec<f64>)> {
        let watch = &self.engine.counters().watch;
        let (mut steps, mut wakes) = (Vec::new(), Vec::new());
        watch.take();
        for &batch in &self.batches {
            answer(self.engine, batch, SHORT_PROMPT, TIMED_TOKENS, &mut self.seed)?;
            done();
        }
        steps.append(&mut watch.take());
        for &rows in &self.prompt_rows {
            let usages = answer(self.engine, 1, rows, 1, &mut self.seed)?;
            let mut alone = watch.take();
            let first_s = usages.first().map_or(0.0, |usage| usage.time_to_first_token.as_secs_f64());
            wakes.extend(alone.first().map(|step| (first_s - (step.ended_s - step.began_s)).max(0.0)));
            steps.append(&mut alone);
            done();
        }
        answer(self.engine, 1, self.long, TIMED_TOKENS, &mut self.seed)?;
        done();
        let loads = if self.streams > 0 { vec![1, self.streams] } else { Vec::new() };
        for streams in loads {
            self.prompts_next_to(streams)?;
            done();
        }
        steps.append(&mut watch.take());
        Ok((steps, wakes))
    }

    /// Reads prompts while this many answers are generated.
    fn prompts_next_to(&mut self, streams: usize) -> anyhow::Result<()> {
        let lasting = (0..streams).map(|_| {
            self.seed += 1;
            let room = self.engine.info().context_length - SHORT_PROMPT;
            let arrival = Arrival { at_s: 0.0, user: 0, prompt: SHORT_PROMPT, shared: 0, answer: room };
            Ok(self.engine.submit(request(self.engine, &arrival, self.seed))?)
        });
        let lasting = lasting.collect::<anyhow::Result<Vec<_>>>()?;
        for rows in self.prompt_rows.iter().rev().take(NEXT_TO_STREAMS) {
            answer(self.engine, 1, *rows, 1, &mut self.seed)?;
        }
        // Dropped streams cancel their requests.
        drop(lasting);
        while self.engine.load() != (0, 0) {
            std::thread::sleep(Duration::from_millis(1));
        }
        Ok(())
    }
}

fn measure(session: &Session, sequences: usize, step_time: Duration) -> anyhow::Result<Measured> {
    let engine = &session.head.engine;
    let (info, counters) = (engine.info(), engine.counters());
    let step_rows = session.head.step_rows;
    // At least three pieces: the first, one in the middle, and the last.
    let long = (4 * step_rows).min(info.context_length - SHORT_PROMPT - TIMED_TOKENS);
    if long <= 2 * step_rows {
        let (context, enough) = (info.context_length, 4 * step_rows);
        bail!("the context of {context} tokens is too short: give --context {enough} or more");
    }
    let up_to = |most: usize, of: &[usize]| of.iter().copied().filter(|rows| *rows <= most).collect();
    let mut round = Round {
        engine,
        batches: up_to(sequences, &BATCHES),
        prompt_rows: up_to(step_rows, &PROMPT_ROWS),
        streams: sequences / 2,
        long,
        seed: 0,
    };
    let bar = progress::measurements(ROUNDS * round.kinds());
    // The first round warms up.
    round.run(|| ())?;
    let (mut steps, mut wakes) = (Vec::new(), Vec::new());
    let began = Instant::now();
    for done in 0..ROUNDS {
        if done >= LEAST_ROUNDS && began.elapsed() > ROUNDS_TAKE {
            break;
        }
        let (mut more, mut waited) = round.run(|| bar.inc(1))?;
        steps.append(&mut more);
        wakes.append(&mut waited);
    }
    bar.finish_and_clear();
    counters.watch.end();
    let measured = Measured {
        model: info.name.clone(),
        ranks: info.ranks,
        decode: Vec::new(),
        prompt: Vec::new(),
        piece_saves_s: 0.0,
        mixed_saves_s: 0.0,
        mixed_end_s: 0.0,
        wake_s: median(&mut wakes),
        decode_pair_s: 0.0,
        prompt_pair_s: 0.0,
        joules_token: joules_token(engine, sequences, &mut round.seed)?,
        sequences,
        rows: step_rows,
        kv_tokens: counters.kv_blocks.load(Ordering::Relaxed) * KV_BLOCK_TOKENS,
        context: info.context_length,
        step_time_s: step_time.as_secs_f64(),
        routed: RoutedExperts::of(&session.head.footprints),
    };
    Ok(measured.with_times(&steps))
}

/// Joules for each token with a full batch; `None` without a meter.
fn joules_token(engine: &Engine, sequences: usize, seed: &mut u32) -> anyhow::Result<Option<f64>> {
    let Some(mut meter) = Meter::open() else {
        eprintln!(
            "no energy: no RAPL counter that this user may read (root may, on Linux on a machine that has them)"
        );
        return Ok(None);
    };
    let before = meter.joules();
    let usages = answer(engine, sequences, SHORT_PROMPT, TIMED_TOKENS, seed)?;
    let tokens: usize = usages.iter().map(|usage| usage.completion_tokens).sum();
    Ok(Some((meter.joules() - before) / tokens.max(1) as f64))
}

fn median(times: &mut [f64]) -> f64 {
    times.sort_by(f64::total_cmp);
    times.get(times.len() / 2).copied().unwrap_or(0.0)
}

/// Ten workloads that differ in clients, lengths, shared beginnings and rate.
fn workloads(measured: &Measured) -> Vec<(String, Workload)> {
    let (most, limit) = (measured.sequences, measured.context / 4);
    let habit = |prompt: usize, answer: usize, shared: f64| Habit {
        users: 4,
        prompt: prompt.min(limit),
        answer,
        shared,
    };
    let closed = |clients: usize, habit: Habit| {
        let Habit { prompt, answer, shared, .. } = habit;
        let name = format!("{clients} client(s), {prompt} + {answer} tokens, {:.0} % shared", shared * 100.0);
        let requests = habit.open(1.0, (REQUESTS_OF_EACH * clients).max(LEAST_REQUESTS), 5);
        (name, Workload::Closed { clients, requests })
    };
    let mut workloads = vec![
        closed(1, habit(64, 48, 0.0)),
        closed(1, habit(400, 16, 0.0)),
        closed(2, habit(128, 48, 0.0)),
        closed(4, habit(64, 64, 0.0)),
        closed((most / 2).max(1), habit(128, 32, 0.0)),
        closed(most, habit(48, 48, 0.0)),
        closed(4, habit(384, 32, 0.7)),
    ];
    let usual = habit(128, 40, 0.0);
    let requests = usual.open(1.0, 6 * most, 9);
    let full = Workload::Closed { clients: most, requests };
    let full = simulate::run(measured, measured.limits(), measured.context, full);
    let capacity = full.served.len() as f64 / full.span_s.max(1e-9);
    for share in [0.3, 0.5, 0.7] {
        let name = format!("at random times, {:.0} % of capacity", share * 100.0);
        workloads.push((name, Workload::Open(usual.open(share * capacity, LEAST_REQUESTS, 11))));
    }
    workloads
}

/// Medians of a workload's runs: tokens a second, and the time that 95 % of first tokens keep.
fn medians(mut run: impl FnMut() -> anyhow::Result<Outcome>) -> anyhow::Result<[f64; 2]> {
    let (mut throughputs, mut first_tokens) = (Vec::new(), Vec::new());
    for _ in 0..VERIFYING_RUNS {
        let summary = run()?.summary(WARM_UP);
        throughputs.push(summary.throughput_tokens_s);
        first_tokens.push(summary.first_token_p95_s);
    }
    Ok([median(&mut throughputs), median(&mut first_tokens)])
}

/// Runs some of the ten workloads, simulates them, and prints both.
fn verify(engine: &Engine, measured: &Measured, count: usize) -> anyhow::Result<()> {
    let mut table = table::new(&[
        "workload",
        "tokens/s",
        "simulated",
        "off by",
        "first token, 95 %",
        "simulated",
        "off by",
    ]);
    let mut simulator = Simulator::new(measured, measured.limits(), measured.context);
    // The engine has learned the time of prompts from the measurements.
    let requests = Habit { users: 1, prompt: SHORT_PROMPT, answer: TIMED_TOKENS, shared: 0.0 };
    simulator.run(Workload::Closed { clients: 2, requests: requests.open(1.0, LEAST_REQUESTS, 3) });
    let workloads: Vec<_> = workloads(measured).into_iter().step_by(WORKLOADS / count).take(count).collect();
    let bar = progress::measurements(workloads.len());
    for (name, workload) in workloads {
        let [real, real_first] = medians(|| run(engine, &workload).with_context(|| name.clone()))?;
        let [model, model_first] = medians(|| Ok(simulator.run(workload.clone())))?;
        let off = |model: f64, real: f64| format!("{:+.0} %", (model / real - 1.0) * 100.0);
        table.add_row([
            name,
            format!("{real:.1}"),
            format!("{model:.1}"),
            off(model, real),
            format!("{:.1} ms", real_first * 1e3),
            format!("{:.1} ms", model_first * 1e3),
            off(model_first, real_first),
        ]);
        bar.inc(1);
    }
    bar.finish_and_clear();
    eprintln!("{table}");
    Ok(())
}

/// Runs a workload on the engine itself.
fn run(engine: &Engine, workload: &Workload) -> anyhow::Result<Outcome> {
    let began = Instant::now();
    let (served, failed) = (Mutex::new(Vec::new()), Mutex::new(None));
    let note = |number: u32, arrival: &Arrival| {
        let at_s = began.elapsed().as_secs_f64();
        match engine
            .submit(request(engine, arrival, number))
            .map_err(anyhow::Error::from)
            .and_then(|stream| Ok(prompt::read(stream, || false, |_| Ok(()))?.usage))
        {
            Ok(usage) => {
                let first_s = at_s + usage.time_to_first_token.as_secs_f64();
                let end_s = first_s + usage.decode_time.as_secs_f64();
                let request = Served { at_s, first_s, end_s, tokens: usage.completion_tokens };
                served.lock().unwrap_or_else(PoisonError::into_inner).push(request);
            }
            Err(error) => *failed.lock().unwrap_or_else(PoisonError::into_inner) = Some(error),
        }
    };
    let numbered = |requests: &[Arrival]| -> VecDeque<(u32, Arrival)> {
        let first = NUMBERS.fetch_add(requests.len() as u32, Ordering::Relaxed);
        requests
            .iter()
            .enumerate()
            .map(|(index, arrival)| (first.wrapping_add(index as u32), *arrival))
            .collect()
    };
    std::thread::scope(|scope| match workload {
        Workload::Open(requests) => {
            for (number, arrival) in numbered(requests) {
                let wait = Duration::from_secs_f64(arrival.at_s).saturating_sub(began.elapsed());
                std::thread::sleep(wait);
                let note = &note;
                scope.spawn(move || note(number, &arrival));
            }
        }
        Workload::Closed { clients, requests } => {
            let left = std::sync::Arc::new(Mutex::new(numbered(requests)));
            for _ in 0..*clients {
                let (left, note) = (left.clone(), &note);
                scope.spawn(move || {
                    loop {
                        let next = left.lock().unwrap_or_else(PoisonError::into_inner).pop_front();
                        let Some((number, arrival)) = next else { return };
                        note(number, &arrival);
                    }
                });
            }
        }
    });
    if let Some(error) = failed.into_inner().unwrap_or_else(PoisonError::into_inner) {
        return Err(error);
    }
    let served = served.into_inner().unwrap_or_else(PoisonError::into_inner);
    let span_s = served.iter().map(|request| request.end_s).fold(0.0, f64::max);
    Ok(Outcome { served, span_s, busy_s: span_s, ..Outcome::default() })
}
