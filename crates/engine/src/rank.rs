//! One rank of an engine: its shard of the model, and the loop that follows rank 0.

mod disk;
mod gather;

use std::ops::ControlFlow;
use std::time::Instant;

use thunder_collectives::{Group, Stats};
use thunder_compute::{Backend, ComputeError, Largest, RowEdits, Step};
use thunder_model::{Capacity, Model, ModelFolder, Place, ShardPlan};

use crate::disk::DiskSpec;
use crate::draft_model::{DraftModel, DraftShard};
use crate::drafter::Drafter;
use crate::error::EngineError;
use crate::hidden_rows::HiddenRows;
use crate::protocol::{Bounds, Command, Message, StepExtras};
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
        backend.loaded()?;
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

    /// Maximum rows of a step of which a rank has, or soon gets, all logits, so that it can choose
    /// their tokens.
    pub fn chooses(&self) -> usize {
        match (self.tensor_ranks, self.stages) {
            (1, _) => usize::MAX,
            (_, 1) => self.backend.gathers(),
            _ => 0,
        }
    }

    /// The same for rank 0, whose choices may depend on what only it knows.
    pub fn head_chooses(&self) -> usize {
        if self.stages == 1 { self.chooses() } else { 0 }
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
