//! Rank 0's loop: accepts requests, makes the ranks compute the scheduler's steps, and turns their
//! results into events.

mod disk;
mod edits;
mod masks;
mod propose;
mod together;

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use thunder_compute::Backend;
use thunder_model::Place;

use crate::active_request::{ActiveRequest, ChoiceBuffers, Speculates};
use crate::disk::{DISK_COUNTS, DiskList};
use crate::draft_model::{DraftModel, WARM_UP_PASSES};
use crate::error::EngineError;
use crate::event::{Event, Fault, FinishReason};
use crate::handle::{Inbox, Submission, Unpark};
use crate::model_info::ModelInfo;
use crate::protocol::Command;
use crate::rank::RankWorker;
use crate::scheduler::{
    Awaiting, Limits, ReadTokens, RequestId, RowResults, Scheduler, StepPart, TokenEvent,
};
use crate::speculation::{Calibration, Candidate, Ledger, ModelRecord, StepCosts, Verified, counted_s};
use crate::step_watch::StepTime;
use crate::transfer::Transfer;

/// Interval at which an idle engine checks that all ranks are alive.
const PING_INTERVAL: Duration = Duration::from_millis(500);

/// The message for a client if the model computes numbers that are not finite: the text before and
/// after the place where they begin, if that is known.
const NOT_FINITE: [&str; 2] = [
    "the model computed logits that are not finite numbers (NaN or infinite)",
    ": its weights or its config.json are damaged, so download the model again",
];

/// Rank 0's loop.
pub struct EngineLoop<B: Backend> {
    worker: RankWorker<B>,
    info: Arc<ModelInfo>,
    inbox: Inbox,
    scheduler: Scheduler,
    /// The model keeps a state of fixed size for each sequence.
    has_states: bool,
    /// Requests whose answers have not ended.
    requests: HashMap<RequestId, ActiveRequest>,
    /// The scheduler's part of the shared counters, as last published.
    published: Load,
    /// All handles are gone.
    closed: bool,
    speculates: Speculates,
    costs: StepCosts,
    /// Measured costs and savings of drafts.
    ledger: Ledger,
    /// Time spent on guesses for the next step.
    guessing_s: f32,
    /// Measured value of guesses from texts.
    calibration: Calibration,
    /// Measured value of the draft model's guesses, or of the model's own layer's.
    record: ModelRecord,
    /// The next step guesses for requests of several stages together, to measure whether this pays.
    tries_together: bool,
    candidates: Vec<Candidate<RequestId>>,
    /// Rank 0's blocks on disk.
    disk: Option<DiskList>,
    /// Sums of the other ranks' disk counters, and the time of the last query.
    disk_of_others: [u64; DISK_COUNTS],
    disk_counted: Option<Instant>,
    /// The steps in flight.
    issued: VecDeque<Issued>,
    /// Time 0 of the scheduler's clock.
    origin: Instant,
    /// When the other ranks last heard from this one while all requests waited for masks.
    pinged: Instant,
    // Reused from step to step: a token allocates memory only for its text, log-probabilities and
    // penalties.
    buffers: ChoiceBuffers,
    tokens: Vec<u32>,
    events: Vec<TokenEvent>,
    transfers: Vec<Transfer>,
    /// Requests whose logits are not finite.
    damaged: Vec<RequestId>,
    /// Requests that the step has ended; `None` if their logits are not finite.
    ended: Vec<(ActiveRequest, Option<FinishReason>)>,
}

/// A step in flight.
#[derive(Debug, Clone, Copy)]
struct Issued {
    began: Instant,
    /// Number of its rows, if it only decodes.
    rows: Option<usize>,
    /// Time spent on guesses before it.
    guessing_s: f32,
    /// Number of steps that would decode its requests at the same time if nothing was guessed.
    apart: usize,
}

/// The scheduler's load, as last added to the shared counters.
#[derive(Debug, Clone, Copy, Default)]
struct Load {
    running: usize,
    waiting: usize,
    preemptions: u64,
    read: ReadTokens,
}

impl<B: Backend> EngineLoop<B> {
    /// A loop that serves the requests of `inbox` on the ranks that follow `worker`, which is rank
    /// 0's. A token of `eos` ends an answer.
    pub fn new(
        worker: RankWorker<B>,
        info: Arc<ModelInfo>,
        inbox: Inbox,
        limits: Limits,
        eos: Vec<u32>,
    ) -> Self {
        let pass_s = worker.draft_model().map(DraftModel::pass_s);
        let draft_states = worker.draft_model().is_some_and(DraftModel::has_states);
        let limits = Limits { ahead: worker.has_ahead(), draft_states, ..limits };
        let speculates = match (limits.draft_rows > 0, pass_s.is_some() || limits.ahead) {
            (false, _) => Speculates::Never,
            (true, false) => Speculates::FromText,
            (true, true) => Speculates::WithModel,
        };
        let has_states = limits.snapshots.is_some();
        // An encoder's texts may fill the context; the scheduler counts one token more.
        let context = info.context_length + usize::from(limits.whole_prompts.is_some());
        let mut scheduler = Scheduler::new(limits, worker.stages(), context, eos);
        if let Some(disk) = worker.head_disk() {
            scheduler = scheduler.with_disk(Box::new(disk), disk::now_us());
        }
        let disk = worker.disk_list();
        inbox.counters.kv_blocks.store(limits.kv_blocks, Ordering::Relaxed);
        Self {
            worker,
            info,
            inbox,
            scheduler,
            has_states,
            requests: HashMap::new(),
            published: Load::default(),
            closed: false,
            speculates,
            costs: StepCosts::default(),
            ledger: Ledger::default(),
            guessing_s: 0.0,
            calibration: Calibration::default(),
            record: ModelRecord::new(pass_s.unwrap_or(f32::MAX)),
            tries_together: false,
            candidates: Vec::new(),
            disk,
            disk_of_others: [0; DISK_COUNTS],
            disk_counted: None,
            issued: VecDeque::new(),
            origin: Instant::now(),
            pinged: Instant::now(),
            buffers: ChoiceBuffers::default(),
            tokens: Vec::new(),
            events: Vec::new(),
            transfers: Vec::new(),
            damaged: Vec::new(),
            ended: Vec::new(),
        }
    }

    /// Serves until all handles are dropped or a rank is lost. Every request gets its last event
    /// before this returns.
    ///
    /// # Errors
    /// Why the engine cannot continue.
    pub fn run(mut self) -> Result<(), EngineError> {
        let _guard = NotePanic(self.inbox.stopped.clone());
        self.worker.pin_thread();
        let result = self.serve();
        if let Err(error) = &result {
            self.fail_all(&error.to_string());
        }
        result
    }

    fn serve(&mut self) -> Result<(), EngineError> {
        let waker = Waker::from(Arc::new(Unpark(std::thread::current())));
        self.time_passes()?;
        loop {
            self.take_submissions(&waker)?;
            self.cancel_abandoned();
            self.use_disk()?;
            let issued = self.issue_step()?;
            if !issued && self.closed && self.scheduler.is_idle() {
                return self.broadcast(Command::Stop);
            }
            // Keeps a pipeline full while there are steps to issue.
            if !issued || self.scheduler.steps_in_flight() >= self.worker.stages() {
                self.apply_oldest_step()?;
            }
            if self.scheduler.is_idle() {
                self.store_noted()?;
            }
            self.publish_load();
        }
    }

    /// Measures the time of a pass of the layer that predicts further tokens, if there is one. No
    /// request has a slot yet.
    fn time_passes(&mut self) -> Result<(), EngineError> {
        if self.speculates != Speculates::WithModel || !self.worker.has_ahead() {
            return Ok(());
        }
        let part = StepPart {
            slot: 0,
            start: 0,
            tokens: &[0],
            next: None,
            kept_blocks: 0,
            new_blocks: &[0],
            prompt: false,
            wanted_rows: 1,
            accepted: 0,
            restore: None,
            save: None,
            adapter: 0,
            draws: None,
        };
        let mut fastest = f32::MAX;
        for _ in 0..WARM_UP_PASSES {
            let (began, results) = (Instant::now(), RowResults::default());
            self.worker.message().begin(Command::Predict(results));
            self.worker.message().push(&part);
            self.worker.predict_with_all(results)?;
            fastest = fastest.min(began.elapsed().as_secs_f32());
        }
        self.record = ModelRecord::new(fastest);
        Ok(())
    }

    /// Accepts submitted requests. Sleeps while the engine is idle, and pings the other ranks
    /// meanwhile.
    fn take_submissions(&mut self, waker: &Waker) -> Result<(), EngineError> {
        let mut context = Context::from_waker(waker);
        loop {
            match self.inbox.submissions.poll_recv(&mut context) {
                Poll::Ready(Some(submission)) => self.take_submission(submission),
                Poll::Ready(None) => {
                    self.closed = true;
                    return Ok(());
                }
                Poll::Pending if !self.scheduler.is_idle() => return Ok(()),
                Poll::Pending => {
                    let since = Instant::now();
                    std::thread::park_timeout(PING_INTERVAL);
                    if since.elapsed() >= PING_INTERVAL {
                        self.broadcast(Command::Ping)?;
                        self.count_disk()?;
                        self.publish_disk();
                    }
                }
            }
        }
    }

    fn take_submission(&mut self, Submission { request, events, at }: Submission) {
        let (tokens, context) = (self.info.tokenizer.stream(), self.info.context_length);
        let mut active = ActiveRequest::new(&request, (events, at), tokens, context, self.speculates);
        if request.reports_work {
            active.watch_work(self.worker.work(), self.steps());
        }
        let generation = active.generation(&request, self.worker.chooses() > 0);
        for (index, token) in request.answered.iter().enumerate() {
            let finish = self.scheduler.finish(&generation, request.prompt.len(), index + 1, token.id);
            if let Some(reason) = active.replay(token, finish) {
                self.inbox.counters.waiting.fetch_sub(1, Ordering::Relaxed);
                return active.finish(reason);
            }
        }
        let answered = request.answered.iter().map(|token| token.id);
        match self.scheduler.resume(&request.prompt, answered, generation) {
            Ok(id) => {
                // The handle has already counted the submission as waiting.
                self.published.waiting += 1;
                self.requests.insert(id, active);
            }
            // The handle has checked the request against the context, but the KV cache is smaller.
            Err(error) => {
                self.inbox.counters.waiting.fetch_sub(1, Ordering::Relaxed);
                active.fail(&error.to_string());
            }
        }
    }

    /// Cancels the requests of clients that have left.
    fn cancel_abandoned(&mut self) {
        let scheduler = &mut self.scheduler;
        self.requests.retain(|&id, request| {
            let abandoned = request.is_abandoned();
            if abandoned {
                scheduler.cancel(id);
            }
            !abandoned
        });
    }

    /// Makes the ranks compute the scheduler's next step, and computes this rank's part. Returns
    /// false if there is nothing to compute.
    fn issue_step(&mut self) -> Result<bool, EngineError> {
        if self.speculates != Speculates::Never {
            let began = Instant::now();
            self.choose_together();
            let usual_s = self.propose()?;
            self.guessing_s += counted_s(began.elapsed().as_secs_f32(), usual_s);
        }
        self.hold_late_masks();
        let apart = self.scheduler.steps_apart();
        let Some(step) = self.scheduler.next_step() else {
            self.wait_for_masks()?;
            return Ok(false);
        };
        let began = Instant::now();
        let guessing_s = std::mem::take(&mut self.guessing_s);
        self.issued.push_back(Issued { began, rows: step.rows_if_decoding(), guessing_s, apart });
        let edits = self.choose_after_edits();
        let Some(step) = self.scheduler.newest_step() else { return Ok(false) };
        let wanted = step.results();
        let message = self.worker.message();
        message.begin(Command::Compute(wanted));
        let chooses = wanted.chosen && !wanted.logits;
        for (part, id) in step.parts().zip(step.requests()) {
            let draws = self.requests.get(&id).filter(|_| chooses).and_then(ActiveRequest::draws);
            message.push(&StepPart { draws, ..part });
        }
        let prompt: usize = step.parts().filter(|part| part.prompt).map(|part| part.tokens.len()).sum();
        self.inbox.counters.prompt_tokens.fetch_add(prompt as u64, Ordering::Relaxed);
        self.publish_load();
        self.worker.exchange_step()?;
        self.worker.compute()?;
        if edits {
            self.edit_step();
        }
        if self.worker.stages() > 1 {
            // Takes results first: a last stage that waits for rank 0 to take its results could not
            // receive rank 0's rows.
            if self.scheduler.steps_in_flight() >= self.worker.stages() {
                self.apply_oldest_step()?;
            }
            self.worker.send_hidden()?;
        } else {
            self.worker.gather_results(wanted)?;
            self.worker.read_ahead()?;
        }
        let (counters, reductions) = (&self.inbox.counters, self.worker.reductions());
        counters.steps.fetch_add(1, Ordering::Relaxed);
        counters.step_ns.fetch_add(began.elapsed().as_nanos() as u64, Ordering::Relaxed);
        counters.reduce_ns.fetch_add(reductions.time.as_nanos() as u64, Ordering::Relaxed);
        Ok(true)
    }

    /// Number of issued steps.
    fn steps(&self) -> u64 {
        self.inbox.counters.steps.load(Ordering::Relaxed)
    }

    /// Waits for the results of the oldest step in flight, chooses its tokens, and sends the
    /// clients' events.
    fn apply_oldest_step(&mut self) -> Result<(), EngineError> {
        let Some(step) = self.scheduler.oldest_step() else { return Ok(()) };
        let load = step.load();
        let results = self.worker.results(step.results(), step.wanted_rows())?;
        self.tokens.clear();
        let mut verified = Verified::default();
        let counters = &self.inbox.counters;
        for Awaiting { request: id, draft } in step.awaiting() {
            let first = self.tokens.len();
            for row in first..=first + draft.len() {
                let token = match self.requests.get_mut(&id) {
                    // The scheduler drops everything after a wrong token of the draft.
                    _ if self.tokens[first..] != draft[..row - first] => Some(0),
                    Some(request) => request.take(&results, row, &self.info.tokenizer, &mut self.buffers),
                    // The scheduler drops the tokens of a cancelled request.
                    None => Some(0),
                };
                if token.is_none() {
                    self.damaged.push(id);
                }
                self.tokens.push(token.unwrap_or(0));
            }
            let right =
                draft.iter().zip(&self.tokens[first..]).take_while(|(drafted, chosen)| drafted == chosen);
            let right = right.count();
            verified.requests += 1;
            verified.drafted += draft.len();
            verified.tokens += right + 1;
            let note = |[drafted, right_ones]: [&AtomicU64; 2]| {
                drafted.fetch_add(draft.len() as u64, Ordering::Relaxed);
                right_ones.fetch_add(right as u64, Ordering::Relaxed);
            };
            note([&counters.drafted, &counters.drafts_right]);
            if let Some(request) = self.requests.get_mut(&id)
                && request.note_verified(right, draft.len(), &mut self.record.rate)
            {
                note([&counters.model_drafted, &counters.model_drafts_right]);
            }
        }
        // The cost of a row includes choosing its token.
        if let Some(Issued { began, rows, guessing_s, apart }) = self.issued.pop_front() {
            let [began_s, now_s] =
                [began, Instant::now()].map(|at| at.duration_since(self.origin).as_secs_f64());
            self.scheduler.note_time(began_s, now_s);
            self.inbox.counters.watch.note(StepTime { load, began_s, ended_s: now_s });
            let seconds = (now_s - began_s) as f32;
            if let Some(rows) = rows {
                self.costs.note(rows, seconds);
                let counted_s = counted_s(seconds, self.costs.expected(rows).unwrap_or(seconds));
                self.record.note_step(counted_s / self.scheduler.steps_in_flight() as f32);
            }
            // If the step reads prompts, only its drafts are recorded.
            if rows.is_some() || verified.drafted > 0 {
                let seconds = rows.map(|_| seconds);
                self.ledger.note(Verified { seconds, guessing_s, apart, ..verified }, &self.costs);
            }
        }
        let place = self.locate_damage()?;
        for id in self.damaged.drain(..) {
            self.scheduler.cancel(id);
            self.ended.extend(self.requests.remove(&id).map(|request| (request, None)));
        }
        self.scheduler.apply(&self.tokens, &mut self.events);
        self.inbox.counters.generated_tokens.fetch_add(self.events.len() as u64, Ordering::Relaxed);
        let steps = self.steps();
        for event in self.events.drain(..) {
            let Some(request) = self.requests.get_mut(&event.request) else { continue };
            request.cached_tokens = event.cached_tokens;
            request.note_work(self.worker.work(), steps);
            let ended = request.push(event.token, event.finish);
            if let Some((share, hit)) = request.take_noted() {
                self.calibration.note(share, hit);
            }
            if let Some(reason) = ended
                && let Some(mut request) = self.requests.remove(&event.request)
            {
                request.report_work(self.worker.work(), steps);
                // The answer ended with a stop text, which the scheduler does not know.
                self.scheduler.cancel(event.request);
                self.record.note_answer(request.generated());
                self.ended.push((request, Some(reason)));
            }
        }
        // Updates counters first: a client that has read its last event is no longer counted.
        self.publish_load();
        for (request, reason) in self.ended.drain(..) {
            match reason {
                Some(reason) => request.finish(reason),
                None => {
                    let [what, remedy] = NOT_FINITE;
                    let place = place.map(|place| format!("; the first came out of {place}"));
                    request.fail(&format!("{what}{}{remedy}", place.unwrap_or_default()));
                }
            }
        }
        Ok(())
    }

    /// Finds where the oldest step's numbers stop being finite, if they do, by computing the step
    /// once more on all ranks. `None` if that would change states, or tables that later steps use.
    fn locate_damage(&mut self) -> Result<Option<Place>, EngineError> {
        let is_without_reason =
            |id| self.requests.get(id).is_some_and(|request| request.own_failure().is_none());
        if !self.damaged.iter().any(is_without_reason) || self.scheduler.steps_in_flight() > 1 {
            return Ok(None);
        }
        let Some(step) = self.scheduler.oldest_step() else { return Ok(None) };
        // At position 0 a state starts from zero.
        if self.has_states && step.parts().any(|part| part.start > 0) {
            return Ok(None);
        }
        let message = self.worker.message();
        message.begin(Command::Locate);
        step.parts().for_each(|part| message.push(&part));
        self.worker.exchange_step()?;
        Ok(Some(self.worker.locate()?))
    }

    /// Adds the scheduler's changes to the shared counters.
    fn publish_load(&mut self) {
        let load = Load {
            running: self.scheduler.running(),
            waiting: self.scheduler.waiting(),
            preemptions: self.scheduler.preemptions(),
            read: self.scheduler.read_tokens(),
        };
        let (counters, before) = (&self.inbox.counters, self.published);
        // The difference may be negative, because counters wrap. Handles also change `waiting`, so
        // it cannot be stored.
        counters.running.fetch_add(load.running.wrapping_sub(before.running), Ordering::Relaxed);
        counters.waiting.fetch_add(load.waiting.wrapping_sub(before.waiting), Ordering::Relaxed);
        counters.kv_blocks_used.store(self.scheduler.blocks_used(), Ordering::Relaxed);
        counters.preempted.fetch_add(load.preemptions - before.preemptions, Ordering::Relaxed);
        counters.read_tokens.fetch_add(load.read.all - before.read.all, Ordering::Relaxed);
        counters.cached_tokens.fetch_add(load.read.cached - before.read.cached, Ordering::Relaxed);
        self.publish_disk();
        self.published = load;
    }

    fn broadcast(&mut self, command: Command) -> Result<(), EngineError> {
        self.worker.message().begin(command);
        self.worker.exchange_step()?;
        Ok(())
    }

    /// Ends all requests with an error, and refuses new ones.
    fn fail_all(&mut self, message: &str) {
        // An earlier reason is the better one.
        let _ = self.inbox.stopped.set(message.to_owned());
        for (_, request) in self.requests.drain() {
            request.fail(message);
        }
        self.inbox.submissions.close();
        while let Ok(submission) = self.inbox.submissions.try_recv() {
            submission.events.send(Event::Failed { message: message.to_owned(), fault: Fault::Engine });
        }
    }
}

/// If the loop panics, sets this as the engine's reason for stopping, so that the engine does not
/// seem to run.
struct NotePanic(Arc<OnceLock<String>>);

impl Drop for NotePanic {
    fn drop(&mut self) {
        if std::thread::panicking() {
            // An earlier reason is the better one.
            let _ = self.0.set("the engine loop panicked; standard error says where".to_owned());
        }
    }
}
