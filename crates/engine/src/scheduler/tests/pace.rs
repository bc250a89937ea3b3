//! Times of steps on machines with simulated clocks, and how long clients wait.

use std::collections::BTreeMap;
use std::time::Duration;

use super::cases::{TOKEN, limits};
use crate::scheduler::{Generation, Limits, RequestId, RoutedExperts, STEP_TIME, Scheduler, StepLoad};

/// Times in seconds.
#[derive(Clone, Copy)]
struct Machine {
    /// Reading the weights, once for generated tokens and once for prompts.
    weights: f64,
    /// One row of a prompt.
    row: f64,
    /// One token that a row attends to.
    pair: f64,
    /// Reading all routed experts.
    experts: f64,
}

/// Two cores with a model of half a gigabyte.
const DESK: Machine = Machine { weights: 0.010, row: 0.001, pair: 2e-7, experts: 0.0 };
/// Four M3 Ultra with DeepSeek V3 at 4 bits: 143 ms to read everything, 618 tokens of a prompt per
/// second.
const STUDIOS: Machine = Machine { weights: 0.006, row: 0.0015, pair: 0.0, experts: 0.137 };
/// DeepSeek V3's.
const ROUTED: RoutedExperts = RoutedExperts { experts: 256, chosen: 8 };

impl Machine {
    fn seconds(&self, load: &StepLoad) -> f64 {
        // Experts that no row uses are not read.
        let experts = |rows: usize| self.experts * (1.0 - (1.0 - 8.0 / 256.0_f64).powi(rows as i32));
        let decode = if load.decode > 0 { self.weights + 1e-3 * load.decode as f64 } else { 0.0 };
        let rows = load.prompt as f64 * self.row;
        let prompt = if load.prompt > 0 { rows.max(self.weights) + 0.2 * self.weights } else { 0.0 };
        let prompt = prompt.max(experts(load.decode + load.prompt) - experts(load.decode));
        let decode = decode + experts(load.decode);
        decode + prompt + (load.decode_pairs + load.prompt_pairs) * self.pair
    }
}

/// A server in simulated time.
struct Server {
    scheduler: Scheduler,
    machine: Machine,
    now: f64,
    /// When each stage becomes free.
    stages: Vec<f64>,
    /// Begin, end and load of steps in flight.
    in_flight: Vec<(f64, f64, StepLoad)>,
    /// When each request was sent, or got its last token.
    last: BTreeMap<RequestId, (f64, bool)>,
    /// Times between tokens, and to first tokens.
    between: Vec<f64>,
    first: Vec<f64>,
    /// Loads of all steps, with their seconds.
    steps: Vec<(StepLoad, f64)>,
}

impl Server {
    fn new(machine: Machine, limits: Limits, stages: usize) -> Self {
        Self {
            scheduler: Scheduler::new(limits, stages, 40_000, Vec::new()),
            machine,
            now: 0.0,
            stages: vec![0.0; stages],
            in_flight: Vec::new(),
            last: BTreeMap::new(),
            between: Vec::new(),
            first: Vec::new(),
            steps: Vec::new(),
        }
    }

    fn send(&mut self, prompt: usize, answer: usize) {
        let generation = Generation { max_tokens: Some(answer), ignore_eos: true, ..Generation::default() };
        let id = self.scheduler.submit(&vec![TOKEN; prompt], generation).unwrap();
        self.last.insert(id, (self.now, false));
    }

    /// Computes a step. Returns false if there is nothing to do.
    fn step(&mut self) -> bool {
        while let Some(step) = self.scheduler.next_step() {
            let load = step.load();
            let seconds = self.machine.seconds(&load) / self.stages.len() as f64;
            let began = self.now;
            let mut at = began;
            for free in &mut self.stages {
                at = at.max(*free) + seconds;
                *free = at;
            }
            self.in_flight.push((began, at, load));
        }
        if self.in_flight.is_empty() {
            return false;
        }
        let (began, ended, load) = self.in_flight.remove(0);
        self.now = ended;
        self.steps.push((load, ended - began));
        self.scheduler.note_time(began, ended);
        let rows = self.scheduler.oldest_step().map_or(0, |step| step.wanted_rows());
        let mut events = Vec::new();
        self.scheduler.apply(&vec![TOKEN; rows], &mut events);
        for event in events {
            let (last, is_running) = self.last[&event.request];
            if is_running { &mut self.between } else { &mut self.first }.push(ended - last);
            self.last.insert(event.request, (ended, true));
        }
        true
    }
}

impl Server {
    /// Computes steps until only `streams` requests run, at least one step.
    fn finish_prompts(&mut self, streams: usize) {
        while self.step() && self.scheduler.running() > streams {}
    }
}

fn wide(step_time: Duration) -> Limits {
    Limits { sequences: 16, rows: 2048, kv_blocks: 4000, step_time, ..limits() }
}

fn longest(times: &[f64]) -> f64 {
    times.iter().copied().fold(0.0, f64::max)
}

#[test]
fn a_step_with_a_stream_keeps_the_time_and_one_without_takes_all_rows() {
    for goal_ms in [20, 30, 50, 100, 400] {
        let mut server = Server::new(DESK, wide(Duration::from_millis(goal_ms)), 1);
        // The first prompt next to a stream meets no measurements, so only the second is checked.
        server.send(700, 4000);
        (0..10).for_each(|_| assert!(server.step()));
        assert_eq!(server.steps[0].0.prompt, 700, "nobody waits: one step reads it all");
        server.send(600, 1);
        while server.scheduler.running() > 1 || server.first.is_empty() {
            server.step();
        }
        let seen = server.between.len();
        for _ in 0..5 {
            server.send(3000, 1);
            server.send(500, 1);
            server.finish_prompts(1);
        }
        let most = longest(&server.between[seen..]);
        // Two prompts are waiting.
        let goal = 2.0 * f64::from(goal_ms as u32) / 1e3;
        // Twice a token's time if the goal is less than that, or three times with several prompts
        // for one stream.
        let least = 0.0115 * 4.0;
        // Two prompts begin at once while the costs are still being learned.
        assert!(most <= 1.6 * goal.max(least), "{most} s with a goal of {goal} s");
        let mixed = server.steps.iter().filter(|(load, _)| load.decode > 0 && load.prompt > 100);
        assert!(goal_ms < 200 || mixed.count() >= 10, "a long time is used");
    }
}

#[test]
fn prompts_get_as_much_time_as_streams_that_take_all_of_it() {
    // A token of eight streams takes 108 ms, more than the goal.
    let slow = Machine { weights: 0.100, row: 0.004, pair: 0.0, experts: 0.0 };
    let mut server = Server::new(slow, wide(STEP_TIME), 1);
    (0..8).for_each(|_| server.send(20, 2000));
    (0..40).for_each(|_| assert!(server.step()));
    server.send(400, 1);
    let (began, seen) = (server.now, server.first.len());
    while server.first.len() == seen {
        server.step();
    }
    let took = server.now - began;
    // Alone, it takes 1.7 s.
    assert!((2.0..4.5).contains(&took), "{took}");
    let most = longest(&server.between[server.between.len() - 8 * 10..]);
    assert!((0.15..0.26).contains(&most), "{most}");
}

#[test]
fn prompts_that_never_end_leave_decoding_measured() {
    // A new prompt arrives as soon as an answer ends, so that each step has one.
    let mut server = Server::new(DESK, Limits { rows: 512, ..wide(STEP_TIME) }, 1);
    let mut sent = 0;
    while sent < 32 || server.scheduler.running() > 0 {
        while sent < 32 && server.scheduler.running() + server.scheduler.waiting() < 4 {
            server.send(178, 24);
            sent += 1;
        }
        assert!(server.step());
    }
    let few = |(load, _): &&(StepLoad, f64)| load.decode > 0 && (1..=4).contains(&load.prompt);
    let (few, steps) = (server.steps.iter().filter(few).count(), server.steps.len());
    assert!(few * 10 < steps, "{few} of {steps} steps have the fewest rows of a prompt");
    // Four prompts are read in 0.72 s.
    assert!(longest(&server.first) < 1.25, "{}", longest(&server.first));
    assert!(longest(&server.between) < 0.06, "{}", longest(&server.between));
}

#[test]
fn a_machine_that_slows_down_is_noticed() {
    let mut server = Server::new(DESK, wide(Duration::from_millis(60)), 1);
    server.send(100, 8000);
    (0..20).for_each(|_| assert!(server.step()));
    for factor in [1.0, 5.0, 1.0, 0.2] {
        server.machine = Machine { row: DESK.row * factor, ..DESK };
        server.send(1500, 1);
        // It takes some steps to notice.
        (0..12).for_each(|_| assert!(server.step()));
        server.send(4000, 1);
        let seen = server.between.len();
        while server.scheduler.running() > 1 {
            server.step();
        }
        let times = &server.between[seen..];
        let mean = times.iter().sum::<f64>() / times.len() as f64;
        assert!((0.045..0.066).contains(&mean), "{mean} with rows {factor} times as slow");
    }
}

#[test]
fn pieces_of_long_contexts_have_fewer_rows() {
    let far = Machine { pair: 1e-6, ..DESK };
    let mut server = Server::new(far, wide(Duration::from_millis(60)), 1);
    server.send(40, 4000);
    (0..10).for_each(|_| assert!(server.step()));
    server.send(20_000, 1);
    while server.scheduler.running() > 1 || server.first.len() < 2 {
        server.step();
    }
    let rows: Vec<usize> = server
        .steps
        .iter()
        .filter(|(load, _)| load.decode > 0 && load.prompt > 0)
        .map(|(load, _)| load.prompt)
        .collect();
    let (early, late) = (rows[10], rows[rows.len() - 10]);
    // A row takes 1 ms, and 20 ms more at the end.
    assert!(early > 30 && late < early / 4, "{early}, then {late}");
    let mut times = server.between.clone();
    times.sort_by(f64::total_cmp);
    let (most, usual) = (times[times.len() - 1], times[times.len() * 98 / 100]);
    // At the end, the smallest piece takes 63 ms, compared with 15 ms for a step.
    assert!(usual < 0.08 && most < 0.19, "{usual} s, {most} s at most");
    // A short prompt is not mistaken for one with a long context.
    let seen = server.steps.len();
    server.send(300, 1);
    server.step();
    assert!(server.steps[seen].0.prompt > 30, "{:?}", server.steps[seen]);
}

#[test]
fn prompts_of_models_with_experts_are_read_in_pieces_that_are_worth_their_experts() {
    // Alone, a prompt of 1,000 tokens takes 1.5 s. Next to a stream with 11 ms per token, pieces of
    // 15 ms would have three rows.
    let run = |routed| {
        let mut server = Server::new(STUDIOS, Limits { routed, ..wide(STEP_TIME) }, 1);
        server.send(500, 6000);
        (0..10).for_each(|_| assert!(server.step()));
        (0..6).for_each(|_| {
            server.send(1000, 1);
            server.finish_prompts(1);
        });
        let (seen, tokens) = (server.first.len(), server.between.len());
        server.send(1000, 1);
        server.finish_prompts(1);
        let lost = server.first[seen] - (server.between.len() - tokens) as f64 * 0.011;
        (server.first[seen], lost, longest(&server.between[tokens..]))
    };
    let (slow, lost_before, _) = run(None);
    let (fast, lost, most) = run(Some(ROUTED));
    assert!(fast < 4.0 && fast < 0.6 * slow, "{fast} s, without {slow} s");
    assert!(lost < lost_before, "the stream loses less too: {lost} s, without {lost_before} s");
    assert!(most < 0.25, "{most} s between tokens");
}

#[test]
fn streams_of_a_pipeline_keep_the_time_too() {
    for stages in [2, 4] {
        let mut server = Server::new(DESK, wide(Duration::from_millis(60)), stages);
        server.send(300, 4000);
        server.send(300, 4000);
        (0..40).for_each(|_| assert!(server.step()));
        server.send(2000, 1);
        server.finish_prompts(2);
        for prompts in [1, 3] {
            let seen = server.between.len();
            (0..prompts).for_each(|_| server.send(2000, 1));
            server.finish_prompts(2);
            let most = longest(&server.between[seen..]);
            let goal = 0.060 * f64::from(prompts);
            assert!(most < 1.33 * goal + 0.020, "{most} s with {prompts} prompts and {stages} stages");
        }
    }
}

#[test]
fn many_prompts_for_few_streams_get_more_time() {
    let mut server = Server::new(DESK, wide(Duration::from_millis(1)), 1);
    server.send(30, 4000);
    (0..10).for_each(|_| assert!(server.step()));
    let mean_rows = |server: &mut Server, prompts: usize| {
        (0..prompts).for_each(|_| server.send(900, 1));
        // The size settles.
        (0..8).for_each(|_| assert!(server.step()));
        let rows = (0..4).map(|_| {
            server.step();
            server.steps[server.steps.len() - 1].0.prompt
        });
        let rows: usize = rows.sum();
        while server.scheduler.running() > 1 {
            server.step();
        }
        rows as f64 / 4.0
    };
    let one = mean_rows(&mut server, 1);
    let many = mean_rows(&mut server, 6);
    assert!(one >= 8.0 && many > 2.0 * one, "{one} rows, then {many}");
}
