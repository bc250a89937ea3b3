//! One rank of an engine: its shard of the model, and the loop that follows rank 0.

mod disk;

use std::ops::ControlFlow;
use std::time::Instant;

use thunder_collectives::{Group, Stats};
use thunder_compute::choice::RowLikelihoods;
use thunder_compute::{Backend, Choices, ComputeError, Largest, RowEdits, Step};
use thunder_model::{Capacity, Model, ModelFolder, Place, ShardPlan};

use crate::disk::DiskSpec;
use crate::draft_model::{DraftModel, DraftShard};
use crate::drafter::Drafter;
use crate::error::EngineError;
use crate::hidden_rows::HiddenRows;
use crate::protocol::{Bounds, Command, Message, StepExtras};
use crate::results::StepResults;
use crate::same_shard::{Setting, adapters_setting, check_same, model_setting};
use crate::scheduler::RowResults;
use crate::work::{WorkClock, WorkSums};
use disk::RankDisk;

/// What a rank loads. Must be the same on all ranks of a world.
#[derive(Clone, Copy)]
pub struct RankShard<'a> {
    /// The model.
    pub folder: &'a ModelFolder,
    /// How the model is split over the ranks.
    pub plan: &'a ShardPlan,
    /// Rows, slots and cache blocks to allocate. The last slots hold `snapshots` copies of states.
    pub capacity: Capacity,
    /// Copies of states, within the capacity's slots.
    pub snapshots: usize,
    /// All other settings that must be the same on all ranks.
    pub settings: &'a [Setting],
    /// The draft model, on rank 0.
    pub draft: Option<DraftShard<'a>>,
    /// The prefix cache's tier on disk: on all ranks or on none.
    pub disk: Option<&'a DiskSpec>,
}

/// A rank with its weights loaded, on any backend. An [`EngineLoop`](crate::EngineLoop) drives rank
/// 0; the others [`follow`](Self::follow).
pub struct RankWorker<B: Backend> {
    world: Group,
    backend: B,
    model: Model<B>,
    draft: Option<DraftModel<B>>,
    disk: Option<RankDisk>,
    message: Message,
    bounds: Bounds,
    /// Block tables of all sequences, by slot.
    tables: Vec<Vec<u32>>,
    step: Step,
    extras: StepExtras,
    /// Vocabulary rows of each rank of the last stage.
    vocab: Vec<usize>,
    tensor_ranks: usize,
    stages: usize,
    /// Numbers in a hidden state, or in an encoder's result.
    hidden: usize,
    /// Numbers per token that one stage sends to the next.
    stream_width: usize,
    hidden_rows: Vec<f32>,
    /// A layer of the model makes drafts. It is on the ranks that compute logits.
    has_ahead: bool,
    /// Hidden states that this layer has not read yet, on ranks that have it.
    pending: HiddenRows,
    /// The tokens that follow those of the step's rows.
    next: Vec<u32>,
    /// Maximum rows of a step.
    rows: usize,
    outgoing: Vec<f32>,
    largest: Vec<Largest>,
    /// How likely the chosen tokens are.
    likely: Vec<f32>,
    /// Changes of logits before tokens are chosen, for each of the step's rows that gives a token.
    edits: Vec<RowEdits>,
    /// Rows whose edits are filled in; 0: none.
    edited: usize,
    gathered: Vec<f32>,
    /// Number of rows in the results that rank 0 received last.
    received_rows: usize,
    counts: Vec<usize>,
    clock: WorkClock,
    /// The work of all ranks, on rank 0.
    work: WorkSums,
}

impl<B: Backend> RankWorker<B> {
    /// Loads this rank's shard of the model. All ranks of `world` call this together.
    /// `make_backend` gets the rank's tensor-parallel group. `progress` gets the bytes read so far
    /// and the total.
    ///
    /// # Errors
    /// If the model cannot be loaded here or on a peer, or the ranks were given different models or
    /// plans.
    pub fn load(
        shard: RankShard<'_>,
        mut world: Group,
        make_backend: impl FnOnce(Group) -> Result<B, ComputeError>,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<Self, EngineError> {
        let RankShard { folder, plan, capacity, snapshots, settings, draft, disk } = shard;
        check_same(&mut world, &[&[model_setting(folder), adapters_setting(folder)], settings].concat())?;
        let (rank, tensor_ranks) = (world.rank(), plan.tensor_ranks());
        let disk = disk.map(|spec| RankDisk::open(spec, &shard, &mut world)).transpose()?;
        let tensor = world.split((rank / tensor_ranks) as u32, rank as u32)?;
        let mut backend = make_backend(tensor)?;
        let mut peers = Ok(());
        let mut watched = |done, total| {
            progress(done, total);
            peers = world.check();
            if peers.is_ok() { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
        };
        let loaded = Model::load(folder, plan, rank, capacity, &mut backend, &mut watched);
        // Loaded only if the rank's own part was; otherwise that error is reported.
        let draft = match (draft, &loaded) {
            (Some(draft), Ok(_)) => Some(DraftModel::load(draft, &mut backend, &mut watched)),
            _ => None,
        };
        peers?;
        let (model, draft) = (loaded?, draft.transpose()?);
        if model.predicts_ahead() {
            // The layer for drafts reads each step's rows before the next step.
            backend.never_ahead();
        }
        // No rank begins before all have loaded. A rank that fails closes its links, which ends
        // this wait on the others.
        let mut ready = [1u32];
        for root in 0..world.size() {
            world.broadcast_idle(root, &mut ready)?;
        }
        // Tuning measures the links, so all ranks must be here and idle.
        backend.tune(folder.spec.hidden, model.bytes_per_reduction())?;
        backend.take_reduction_stats();
        let last = plan.ranks() - tensor_ranks;
        let vocab =
            (last..plan.ranks()).map(|rank| plan.shard(rank).vocab(folder.spec.vocab).len()).collect();
        Ok(Self {
            world,
            backend,
            model,
            draft,
            disk,
            message: Message::default(),
            bounds: Bounds {
                slots: capacity.slots - snapshots,
                blocks: capacity.kv_blocks,
                snapshots,
                adapters: folder.adapters.len(),
                wanted_rows: capacity.logit_rows,
            },
            tables: Vec::new(),
            step: Step::default(),
            extras: StepExtras::default(),
            vocab,
            tensor_ranks,
            stages: plan.stages(),
            hidden: folder.spec.result_width(),
            stream_width: folder.spec.stream_width(),
            hidden_rows: Vec::new(),
            has_ahead: folder.spec.ahead.is_some(),
            pending: HiddenRows::new(folder.spec.hidden),
            next: Vec::new(),
            rows: capacity.rows,
            outgoing: Vec::new(),
            largest: Vec::new(),
            likely: Vec::new(),
            edits: Vec::new(),
            edited: 0,
            gathered: Vec::new(),
            received_rows: 0,
            counts: Vec::new(),
            clock: WorkClock::new(rank / tensor_ranks),
            work: WorkSums::new(plan.ranks(), tensor_ranks),
        })
    }

    /// Computes the steps that rank 0 sends, until rank 0 sends [`Command::Stop`].
    ///
    /// # Errors
    /// If a peer was lost or a step cannot be computed. The group cannot be used afterwards.
    pub fn follow(&mut self) -> Result<(), EngineError> {
        self.pin_thread();
        loop {
            match self.exchange_step()? {
                Command::Stop => return Ok(()),
                Command::Ping => {}
                Command::Store => self.store_blocks()?,
                Command::CountDisk => {
                    let counts = self.disk_counts();
                    self.world.send_idle(0, &counts)?;
                }
                Command::Load => {
                    let count = self.load_blocks()?;
                    self.world.send_idle(0, &[count])?;
                }
                Command::Compute(results) => {
                    self.compute()?;
                    self.send_hidden()?;
                    self.gather_results(results)?;
                    self.read_ahead()?;
                    self.lap();
                }
                Command::Predict(results) => {
                    self.predict()?;
                    self.gather_results(results)?;
                    self.lap();
                }
                Command::Locate => {
                    self.locate()?;
                }
            }
        }
    }

    /// Pins the calling thread to its core, if the rank has cores of its own. The thread that
    /// computes calls this first.
    pub fn pin_thread(&self) {
        self.backend.pin_caller();
    }

    /// The backend that computes the rank's steps.
    pub fn backend(&self) -> &B {
        &self.backend
    }

    /// The draft model, if this rank has it.
    pub fn draft_model(&self) -> Option<&DraftModel<B>> {
        self.draft.as_ref()
    }

    /// True if a layer of the model makes drafts.
    pub fn has_ahead(&self) -> bool {
        self.has_ahead && self.draft.is_none()
    }

    /// On rank 0: the source of guesses, if there is one.
    pub fn drafter(&mut self) -> Option<Drafter<'_, B>> {
        if self.has_ahead() {
            return Some(Drafter::Layer(self));
        }
        self.draft.as_mut().map(|draft| Drafter::Model(draft, &mut self.backend))
    }

    /// Maximum rows of a step.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// True if a rank has, or soon gets, all logits of a row, so that it can choose a token.
    pub fn chooses(&self) -> bool {
        self.tensor_ranks == 1 || self.stages == 1 && self.backend.gathers()
    }

    /// True if rank 0 has, or soon gets, all logits of a row, so that choices may depend on what
    /// only it knows.
    pub fn head_chooses(&self) -> bool {
        self.stages == 1 && self.chooses()
    }

    /// Changes of the first rows of the step that is being computed, to be filled in before
    /// [`RankWorker::gather_results`].
    pub fn edits(&mut self, rows: usize) -> &mut [RowEdits] {
        if self.edits.len() < rows {
            self.edits.resize_with(rows, RowEdits::default);
        }
        self.edited = rows;
        self.edits[..rows].iter_mut().for_each(RowEdits::clear);
        &mut self.edits[..rows]
    }

    /// The message that rank 0 fills in before [`RankWorker::exchange_step`].
    pub fn message(&mut self) -> &mut Message {
        &mut self.message
    }

    /// The step that [`RankWorker::exchange_step`] read.
    pub fn step(&self) -> &Step {
        &self.step
    }

    /// Stages of the pipeline, which is also the maximum number of steps in flight.
    pub fn stages(&self) -> usize {
        self.stages
    }

    /// After a step: time and bytes of the reductions since the last call; zero for a single rank.
    pub fn reductions(&mut self) -> Stats {
        self.lap();
        self.clock.take_reductions()
    }

    /// Sums of the ranks' work, on rank 0.
    pub(crate) fn work(&self) -> &WorkSums {
        &self.work
    }

    /// Records the time since the beginning of the step, or since the last call.
    fn lap(&mut self) {
        self.clock.lap(self.backend.take_reduction_stats());
    }

    /// Sends the message (rank 0) or receives it (other ranks), and reads the step from it.
    ///
    /// # Errors
    /// When a peer was lost.
    pub fn exchange_step(&mut self) -> Result<Command, EngineError> {
        self.message.exchange(&mut self.world)?;
        self.clock.begin();
        let command = self.message.read(self.bounds, &mut self.tables, &mut self.step, &mut self.extras)?;
        if let (true, Some(disk)) = (command.has_transfers(), &mut self.disk) {
            self.message.read_transfers(self.bounds, &mut disk.transfers)?;
        }
        Ok(command)
    }

    /// Computes the step on this rank's layers, and copies states. Later stages first receive the
    /// hidden states of the previous stage.
    ///
    /// # Errors
    /// If a peer was lost or an operation failed.
    pub fn compute(&mut self) -> Result<(), EngineError> {
        let first_snapshot = self.bounds.slots;
        for (slot, snapshot) in &self.extras.restore {
            self.model.copy_slot(&mut self.backend, first_snapshot + snapshot, *slot)?;
        }
        let is_given = self.receive_hidden()?;
        let hidden = is_given.then_some(&self.hidden_rows[..]);
        self.model.forward(&mut self.backend, &self.step, hidden)?;
        for (slot, snapshot) in &self.extras.save {
            self.model.copy_slot(&mut self.backend, *slot, first_snapshot + snapshot)?;
        }
        Ok(())
    }

    /// Computes the step once more, without copying states, and finds where its numbers stop being
    /// finite. All ranks call this together.
    ///
    /// # Errors
    /// When a peer was lost or an operation failed.
    pub fn locate(&mut self) -> Result<Place, EngineError> {
        let is_given = self.receive_hidden()?;
        let hidden = is_given.then_some(&self.hidden_rows[..]);
        let own = self.model.first_not_finite(&mut self.backend, &self.step, hidden)?;
        self.send_hidden()?;
        let mut first = own;
        for root in 0..self.world.size() {
            let mut word = [own.word()];
            self.world.broadcast_idle(root, &mut word)?;
            first = first.min(Place::from_word(word[0]));
        }
        Ok(first)
    }

    /// On later stages: waits for the hidden states of the previous stage. Returns false on the
    /// first stage.
    fn receive_hidden(&mut self) -> Result<bool, EngineError> {
        let Some(from) = self.world.rank().checked_sub(self.tensor_ranks) else { return Ok(false) };
        let width = self.model.hidden_width(self.stream_width);
        let reports = WorkClock::words(self.world.rank() / self.tensor_ranks);
        self.hidden_rows.resize(self.step.rows() * width + reports, 0.0);
        let began = Instant::now();
        // The previous stage may be busy with a long prompt, so only its liveness limits this wait.
        self.world.recv_idle(from, &mut self.hidden_rows)?;
        self.clock.note_wait(began);
        self.clock.take_reports(&mut self.hidden_rows);
        Ok(true)
    }

    /// Sends the hidden states to the next stage, if there is one.
    ///
    /// # Errors
    /// When a peer was lost.
    pub fn send_hidden(&mut self) -> Result<(), EngineError> {
        let next = self.world.rank() + self.tensor_ranks;
        if next < self.world.size() {
            self.model.read_hidden(&mut self.backend, &self.step, &mut self.outgoing)?;
            self.lap();
            self.clock.report(&mut self.outgoing);
            let began = Instant::now();
            // The next stage may be busy with a long prompt, so only its liveness limits this wait.
            self.world.send_idle(next, &self.outgoing)?;
            self.clock.note_wait(began);
        }
        Ok(())
    }

    /// On the last stage: gathers the results on the stage's first rank, which sends them to rank
    /// 0. See [`StepResults`] for their layout. Does nothing on other stages.
    ///
    /// # Errors
    /// When a peer was lost.
    pub fn gather_results(&mut self, results: RowResults) -> Result<(), EngineError> {
        let (rank, rows) = (self.world.rank(), self.step.logit_rows.len());
        if rank + self.tensor_ranks < self.world.size() || rows == 0 {
            return Ok(());
        }
        self.size_results(results, rows);
        if !results.logits {
            let first = match results.chosen {
                true => {
                    self.read_chosen(results)?;
                    0
                }
                false => {
                    self.model.read_largest(&mut self.backend, &self.step, &mut self.largest)?;
                    self.model.vocab_rows().start as u32
                }
            };
            let of_row =
                |largest: &Largest| [f32::from_bits(first.wrapping_add(largest.column)), largest.value];
            self.outgoing.clear();
            self.outgoing.extend(self.largest.iter().flat_map(of_row));
            if results.likely.is_some() {
                self.outgoing.extend_from_slice(&self.likely);
            }
        } else {
            self.model.read_logits(&mut self.backend, &self.step, &mut self.outgoing)?;
        }
        self.lap();
        self.clock.report(&mut self.outgoing);
        let root = rank.is_multiple_of(self.tensor_ranks);
        let of_ranks: usize = self.counts.iter().sum();
        let recv = root.then_some(&mut self.gathered[..of_ranks]);
        self.backend.group().gather(0, &self.outgoing, recv, &self.counts)?;
        if root && results.hidden {
            self.model.read_normed(&mut self.backend, &self.step, &mut self.gathered[of_ranks..])?;
        }
        if root && rank > 0 {
            let began = Instant::now();
            self.world.send_idle(0, &self.gathered)?;
            self.clock.note_wait(began);
        }
        Ok(())
    }

    /// Chooses the step's tokens. If a stage has several ranks, all of them choose the same, after
    /// they have got each other's logits, or only rank 0 chooses.
    fn read_chosen(&mut self, results: RowResults) -> Result<(), EngineError> {
        let Self { model, backend, step, extras, edits, edited, largest, likely, .. } = self;
        let edits = &edits[..std::mem::take(edited)];
        let StepExtras { choices: rows, next_draws, .. } = extras;
        let choices = Choices { cap: None, edits, rows, next_draws, likely: results.likely.map(usize::from) };
        if self.tensor_ranks == 1 {
            return Ok(model.read_chosen(backend, None, &choices, largest, likely)?);
        }
        let all = model.gather_logits(backend, step, self.vocab.iter().sum())?;
        if !results.by_head || self.world.rank() == 0 {
            model.read_chosen(backend, Some(&all), &choices, largest, likely)?;
        } else {
            largest.clear();
            largest.resize(choices.rows.len(), Largest::NONE);
            likely.clear();
            likely.resize(choices.rows.len() * choices.likely_words(), 0.0);
        }
        backend.give_back(all);
        Ok(())
    }

    /// Called after the results of the step were gathered. Keeps hidden states for the layer that
    /// predicts further tokens, and makes it read the rows that give no token. Does nothing on
    /// ranks without this layer.
    ///
    /// # Errors
    /// If a peer was lost or an operation failed.
    pub fn read_ahead(&mut self) -> Result<(), EngineError> {
        if !self.model.predicts_ahead() {
            return Ok(());
        }
        let Self { model, backend, step, pending, outgoing, next, extras, hidden, .. } = self;
        if !step.logit_rows.is_empty() {
            outgoing.resize(step.logit_rows.len() * *hidden, 0.0);
            model.read_normed(backend, step, outgoing)?;
            keep_wanted(step, 0, (outgoing, *hidden), pending);
        }
        if step.logit_rows.len() < step.rows() {
            next.clear();
            for (sequence, follows) in step.sequences.iter().zip(&extras.next) {
                next.extend_from_slice(&step.tokens[sequence.rows.start + 1..sequence.rows.end]);
                next.push(*follows);
            }
            model.read_ahead(backend, step, next)?;
        }
        Ok(())
    }

    /// Makes the layer that predicts further tokens read the tokens of the message that
    /// [`RankWorker::exchange_step`] read. Does nothing on ranks without this layer.
    ///
    /// # Errors
    /// If a peer was lost or an operation failed.
    pub fn predict(&mut self) -> Result<(), EngineError> {
        if !self.model.predicts_ahead() {
            return Ok(());
        }
        let Self { model, backend, step, pending, outgoing, hidden_rows, hidden, .. } = self;
        hidden_rows.clear();
        for sequence in &step.sequences {
            pending.append_to(hidden_rows, sequence.slot, sequence.start, sequence.rows.len());
        }
        model.predict(backend, step, hidden_rows)?;
        if !step.logit_rows.is_empty() {
            model.read_chained(backend, step, outgoing)?;
            keep_wanted(step, 1, (outgoing, *hidden), pending);
        }
        Ok(())
    }

    /// On rank 0: makes all ranks compute the pass in the message, and waits for its results.
    ///
    /// # Errors
    /// If a peer was lost or an operation failed.
    pub fn predict_with_all(&mut self, results: RowResults) -> Result<(), EngineError> {
        self.exchange_step()?;
        self.predict()?;
        self.gather_results(results)?;
        self.lap();
        self.results(results, self.step.logit_rows.len()).map(drop)
    }

    /// On rank 0: waits for the results of the oldest step in flight, in which `rows` rows have
    /// logits.
    ///
    /// # Errors
    /// If a peer was lost.
    pub fn results(&mut self, results: RowResults, rows: usize) -> Result<StepResults<'_>, EngineError> {
        self.size_results(results, rows);
        if self.stages > 1 && rows > 0 {
            let from = (self.stages - 1) * self.tensor_ranks;
            let began = Instant::now();
            self.world.recv_idle(from, &mut self.gathered)?;
            self.clock.note_wait(began);
        }
        self.take_reports();
        self.received_rows = rows;
        Ok(self.received(results))
    }

    /// Adds up the reports of the results, if there are any.
    fn take_reports(&mut self) {
        let words = WorkClock::words(self.stages);
        let mut end = 0;
        for (rank, count) in self.counts.iter().enumerate().filter(|(_, count)| **count > 0) {
            end += count;
            self.work.add(rank, &self.gathered[end - words..end]);
        }
    }

    /// The results that [`RankWorker::results`] has waited for.
    pub fn received(&self, results: RowResults) -> StepResults<'_> {
        let hidden = if results.hidden { self.hidden } else { 0 };
        let (rows, has_logits) = (self.received_rows, results.logits);
        let report = WorkClock::words(self.stages);
        let likely = likely_words(results);
        StepResults { rows, vocab: &self.vocab, has_logits, likely, report, hidden, gathered: &self.gathered }
    }

    /// Sizes the buffer for the results of `rows` rows. If there are no rows, there are no results
    /// and no reports.
    fn size_results(&mut self, results: RowResults, rows: usize) {
        let likely = likely_words(results);
        let width = |vocab: usize| if results.logits { vocab } else { 2 + likely };
        self.counts.clear();
        let report = if rows == 0 { 0 } else { WorkClock::words(self.stages) };
        self.counts.extend(self.vocab.iter().map(|&vocab| rows * width(vocab) + report));
        let hidden = if results.hidden { rows * self.hidden } else { 0 };
        let all = self.counts.iter().sum::<usize>() + hidden;
        if self.gathered.len() != all {
            self.gathered.resize(all, 0.0);
        }
    }
}

/// Numbers of a row that say how likely tokens are.
fn likely_words(results: RowResults) -> usize {
    results.likely.map_or(0, |count| RowLikelihoods::words(usize::from(count)))
}

/// Keeps the rows that have logits, each `offset` positions after its own.
fn keep_wanted(step: &Step, offset: usize, (rows, width): (&[f32], usize), pending: &mut HiddenRows) {
    let mut sequences = step.sequences.iter();
    let mut sequence = sequences.next();
    for (row, values) in step.logit_rows.iter().zip(rows.chunks(width)) {
        let row = *row as usize;
        while sequence.is_some_and(|sequence| row >= sequence.rows.end) {
            sequence = sequences.next();
        }
        if let Some(sequence) = sequence {
            pending.keep(sequence.slot, sequence.position(row) + offset, values);
        }
    }
}
