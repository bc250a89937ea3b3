//! Random workloads: requests come and go, and every step is checked.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::{Duration, Instant};

use thunder_testing::Random;

use super::fake_disk::FakeDisk;
use super::fake_draft::FakeDraft;
use super::fake_model::{ADAPTERS, EOS, FakeModel, VOCAB, alone};
use super::invariants::{Before, check_admissions, check_state, check_step};
use crate::event::FinishReason;
use crate::scheduler::{
    Generation, Limits, RequestId, RoutedExperts, STEP_TIME, Scheduler, TokenEvent, Wanted,
};

/// A client's view of its request.
struct Client {
    expected: (Vec<u32>, FinishReason),
    answer: Vec<u32>,
    finish: Option<FinishReason>,
    cached: usize,
    /// The client cancels its request at this token, as the engine loop does for a stop text.
    stop_token: Option<u32>,
}

struct Workload {
    random: Random,
    scheduler: Scheduler,
    model: FakeModel,
    draft: FakeDraft,
    disk: Option<FakeDisk>,
    clients: BTreeMap<RequestId, Client>,
    /// Prompts so far; later ones may have the same beginnings.
    prompts: Vec<Vec<u32>>,
    live: BTreeSet<RequestId>,
    to_submit: usize,
    /// Tokens of all prompts and answers, which bound the number of steps.
    tokens: usize,
    steps: usize,
    /// The time, and when the steps in flight began; `None` if nobody measures.
    clock: Option<(f64, VecDeque<f64>)>,
    /// Number of steps planned since the oldest running request was in one, and that request.
    passed_over: (usize, Option<RequestId>),
}

#[derive(Default)]
struct Totals {
    steps: usize,
    preemptions: u64,
    cancelled: usize,
    finished: usize,
    longest_wait: usize,
    work: f64,
    /// Tokens of drafts.
    drafted: usize,
    /// Tokens that the draft model had read before it was asked for guesses.
    draft_cached: usize,
    /// Prompt tokens from disk.
    read_from_disk: usize,
    /// Prompt tokens from the cache, for models without and with states.
    cached: [usize; 2],
}

impl Workload {
    fn new(seed: u64, with_disk: bool) -> Self {
        let mut random = Random::new(seed);
        let mut from = |low: u64, count: u64| (low + random.below(count)) as usize;
        let sequences = from(1, 6);
        // The oldest sequence needs 3 rows for its prompt while the others decode.
        let limits = Limits {
            sequences,
            rows: sequences + from(2, 40),
            kv_blocks: from(2, 9),
            whole_prompts: None,
            prefix_cache: from(0, 4) > 0,
            snapshots: [None, None, Some(from(0, 5))][from(0, 3)],
            draft_rows: from(0, 12),
            ahead: false,
            draft_states: from(0, 3) == 0,
            step_time: STEP_TIME,
            routed: (seed % 2 == 1).then_some(RoutedExperts { experts: 64, chosen: 4 }),
        };
        let (stages, context_length) = (from(1, 4), from(34, 150));
        let to_submit = from(1, 14);
        let mut scheduler = Scheduler::new(limits, stages, context_length, vec![EOS]);
        let disk = (limits.prefix_cache && with_disk).then(FakeDisk::new);
        if let Some(disk) = &disk {
            scheduler = scheduler.with_disk(disk.stored(), 0);
        }
        Self {
            random,
            scheduler,
            model: FakeModel::new(limits),
            draft: FakeDraft::new(limits),
            disk,
            clients: BTreeMap::new(),
            prompts: Vec::new(),
            live: BTreeSet::new(),
            to_submit,
            tokens: 0,
            steps: 0,
            clock: seed.is_multiple_of(2).then(Default::default),
            passed_over: (0, None),
        }
    }

    fn one_in(&mut self, count: u64) -> bool {
        self.random.below(count) == 0
    }

    fn run(&mut self, totals: &mut Totals) {
        while self.to_submit > 0 || !self.scheduler.is_idle() {
            if self.to_submit > 0 && (self.scheduler.is_idle() || self.one_in(4)) {
                self.submit();
            }
            if self.one_in(40) {
                totals.cancelled += usize::from(self.cancel());
            }
            self.use_disk();
            let issued = self.plan(totals);
            // Mostly like the engine loop. Sometimes results are taken before the pipeline is full,
            // and sometimes a full pipeline is asked for a step.
            let is_full = self.scheduler.steps_in_flight() >= self.scheduler.stages;
            if !issued || is_full != self.one_in(5) {
                self.apply();
            }
        }
        self.check_answers();
        totals.steps += self.steps;
        totals.draft_cached += self.draft.found;
        totals.read_from_disk += self.disk.as_ref().map_or(0, |disk| disk.read);
        totals.preemptions += self.scheduler.preemptions();
        totals.finished += self.clients.values().filter(|client| client.finish.is_some()).count();
        let has_states = self.scheduler.limits.snapshots.is_some();
        let cached = self.clients.values().map(|client| client.cached).sum::<usize>();
        totals.cached[usize::from(has_states)] += cached;
        totals.work = totals.work.max(self.steps as f64 / self.tokens as f64);
    }

    fn submit(&mut self) {
        self.to_submit -= 1;
        let max_tokens = self.scheduler.max_tokens;
        let length = match self.random.below(4) {
            0 => 1 + self.random.below(4),
            _ => 1 + self.random.below(max_tokens as u64 - 1),
        };
        let mut prompt: Vec<u32> = (0..length).map(|_| self.random.below(VOCAB) as u32).collect();
        if let Some(last) = self.prompts.len().checked_sub(1).filter(|_| !self.one_in(3)) {
            // Most begin like an earlier one, up to a random position.
            let other = &self.prompts[self.random.below(last as u64 + 1) as usize];
            let common = prompt.len().min(other.len());
            let common = common - self.random.below(common as u64) as usize / 2;
            prompt[..common].copy_from_slice(&other[..common]);
        }
        self.prompts.push(prompt.clone());
        let generation = Generation {
            max_tokens: (self.random.below(4) > 0).then(|| 1 + self.random.below(60) as usize),
            ignore_eos: self.one_in(3),
            wanted: [Wanted::Largest, Wanted::Chosen, Wanted::Logits][self.random.below(3) as usize],
            adapter: if self.one_in(4) { self.random.below(u64::from(ADAPTERS) + 1) as u32 } else { 0 },
        };
        let stop_token = self.one_in(5).then(|| self.random.below(VOCAB) as u32);
        let id = self.scheduler.submit(&prompt, generation).unwrap();
        let expected = alone(&prompt, generation, max_tokens);
        self.tokens += prompt.len() + expected.0.len();
        let client = Client { expected, answer: Vec::new(), finish: None, cached: 0, stop_token };
        self.clients.insert(id, client);
        self.live.insert(id);
        check_state(&self.scheduler, &self.live);
    }

    /// Like the engine loop before each step.
    fn use_disk(&mut self) {
        let Some(mut disk) = self.disk.take() else { return };
        disk.store(&mut self.scheduler, &mut self.model, &mut self.random);
        if self.scheduler.waits_for_disk() {
            while self.scheduler.steps_in_flight() > 0 {
                self.apply();
            }
            disk.store(&mut self.scheduler, &mut self.model, &mut self.random);
            disk.load(&mut self.scheduler, &mut self.model, &mut self.random);
            check_state(&self.scheduler, &self.live);
        }
        self.disk = Some(disk);
    }

    /// Cancels a random request. Returns true if it had not ended.
    fn cancel(&mut self) -> bool {
        let Some(count) = self.clients.len().checked_sub(1) else { return false };
        let any = self.random.below(count as u64 + 1) as usize;
        let id = *self.clients.keys().nth(any).unwrap();
        self.scheduler.cancel(id);
        let was_live = self.live.remove(&id);
        check_state(&self.scheduler, &self.live);
        was_live
    }

    /// Proposes the requests' future tokens, sometimes with a wrong one.
    fn propose(&mut self) {
        for (id, client) in &self.clients {
            let rest = &client.expected.0[client.answer.len()..];
            let mut draft = rest[..rest.len().min(self.random.below(8) as usize)].to_vec();
            if self.random.below(3) == 0
                && let Some(token) = draft.last_mut()
            {
                *token += 1;
            }
            if self.random.below(2) == 0 {
                self.scheduler.propose(*id, &draft);
            } else {
                self.draft.guess(&mut self.scheduler, *id, &draft);
            }
        }
    }

    fn plan(&mut self, totals: &mut Totals) -> bool {
        self.propose();
        let before = Before::of(&self.scheduler);
        let is_full = self.scheduler.steps_in_flight() == self.scheduler.stages;
        let issued = match self.scheduler.next_step() {
            Some(step) => {
                assert!(!is_full, "a step is planned for a full pipeline");
                self.model.compute(&step);
                true
            }
            None => false,
        };
        if issued {
            if let Some((now, began)) = &mut self.clock {
                began.push_back(*now);
            }
            totals.drafted +=
                self.scheduler.in_flight.back().unwrap().entries.iter().map(|e| e.drafted).sum::<usize>();
            self.steps += 1;
            check_step(&self.scheduler, &before);
        }
        check_state(&self.scheduler, &self.live);
        if !is_full {
            check_admissions(&self.scheduler, &before);
            self.check_oldest(totals);
        }
        // A step computes at least one token, and few tokens are computed again after a preemption.
        let most = 2 * self.tokens + 100;
        assert!(self.steps < most, "{} steps for {} tokens: no progress", self.steps, self.tokens);
        issued
    }

    /// Checks that the oldest running request is never passed over for longer than a pipeline takes
    /// to drain.
    fn check_oldest(&mut self, totals: &mut Totals) {
        let slots = &self.scheduler.slots;
        let oldest =
            self.scheduler.running.iter().filter_map(|&slot| slots[slot].as_ref()).find(|s| !s.ended);
        let id = oldest.map(|sequence| sequence.id);
        let is_reading = oldest.is_some_and(|sequence| sequence.reading.is_some());
        if is_reading || oldest.is_none_or(|sequence| sequence.in_flight > 0) || self.passed_over.1 != id {
            self.passed_over = (0, id);
            return;
        }
        self.passed_over.0 += 1;
        totals.longest_wait = totals.longest_wait.max(self.passed_over.0);
        let most = self.scheduler.stages + 1;
        assert!(self.passed_over.0 <= most, "the oldest request was left out of {most} steps");
    }

    fn apply(&mut self) {
        if self.scheduler.steps_in_flight() == 0 {
            return;
        }
        let tokens = self.model.results();
        let step = self.scheduler.oldest_step().unwrap();
        assert_eq!(step.wanted_rows(), tokens.len());
        let of_requests: usize = step.awaiting().map(|awaiting| awaiting.draft.len() + 1).sum();
        assert_eq!(of_requests, tokens.len(), "a draft is whole until its step is applied");
        if let Some((now, began)) = &mut self.clock {
            // Random times, including zero.
            *now += self.random.below(5) as f64 * 0.004;
            self.scheduler.note_time(began.pop_front().unwrap(), *now);
        }
        let mut events = Vec::new();
        self.scheduler.apply(&tokens, &mut events);
        // In a draft, tokens may follow the one at which a client stops.
        let mut stopped = BTreeSet::new();
        for TokenEvent { request, token, finish, cached_tokens } in events {
            if stopped.contains(&request) {
                continue;
            }
            assert!(self.live.contains(&request), "an event after the last one");
            let client = self.clients.get_mut(&request).unwrap();
            client.cached = cached_tokens;
            client.answer.push(token);
            client.finish = finish;
            if finish.is_some() {
                self.live.remove(&request);
            } else if client.stop_token == Some(token) {
                stopped.insert(request);
                self.live.remove(&request);
                self.scheduler.cancel(request);
            }
        }
        check_state(&self.scheduler, &self.live);
    }

    fn check_answers(&self) {
        assert!(self.live.is_empty(), "{} requests never ended", self.live.len());
        assert_eq!(self.scheduler.blocks.unused(), self.scheduler.limits.kv_blocks);
        for client in self.clients.values() {
            let (expected, reason) = &client.expected;
            match client.finish {
                Some(finish) => assert_eq!((&client.answer, finish), (expected, *reason)),
                None => assert!(expected.starts_with(&client.answer), "the answer of a cancelled request"),
            }
        }
    }
}

#[test]
fn a_thousand_random_workloads_keep_every_invariant() {
    let mut totals = Totals::default();
    let mut fastest = Duration::MAX;
    let hundreds = thunder_testing::runs(10, 500) as u64;
    for hundred in 0..hundreds {
        let began = Instant::now();
        for seed in hundred * 100..hundred * 100 + 100 {
            // If a workload panics, its seed is the last one printed.
            println!("workload {seed}");
            Workload::new(seed, false).run(&mut totals);
        }
        fastest = fastest.min(began.elapsed());
    }
    let Totals { steps, preemptions, cancelled, finished, longest_wait, work, drafted, .. } = totals;
    let Totals { cached, draft_cached, .. } = totals;
    println!("{steps} steps, {finished} answers, {cancelled} cancelled, {preemptions} preemptions");
    println!("{cached:?} prompt tokens were cached, of models without and with states");
    println!("{drafted} tokens of drafts, {draft_cached} tokens were in the draft model's cache already");
    assert!(draft_cached > 10_000, "the draft model's cache was hardly used");
    println!("longest wait {longest_wait} steps, most steps a token {work:.2}, 100 in {fastest:?}");
    assert!(finished > 3000 && cancelled > 500 && preemptions > 1000, "the workloads are too easy");
    assert!(drafted > 10_000, "drafts were hardly used: {drafted}");
    assert!(cached[0] > 7000 && cached[1] > 400, "the cache was hardly used: {cached:?}");
    // A thousand take 5 s. The fastest hundred counts, because other tests run at the same time.
    assert!(fastest < Duration::from_millis(500), "100 workloads took {fastest:?}");
}

#[test]
fn random_workloads_with_blocks_on_disk_keep_every_invariant() {
    let mut totals = Totals::default();
    for seed in 0..100 * thunder_testing::runs(5, 500) as u64 {
        println!("workload {seed}");
        Workload::new(seed, true).run(&mut totals);
    }
    println!("{} prompt tokens were read from disk", totals.read_from_disk);
    assert!(totals.read_from_disk > 200, "the disk was hardly used: {}", totals.read_from_disk);
}
