//! One rank of an engine: its shard of the model, and the loop that follows rank 0.

use std::ops::ControlFlow;

use thunder_collectives::{Group, Stats};
use thunder_compute::{Backend, ComputeError, Largest, Step};
use thunder_model::{Capacity, Model, ModelFolder, ShardPlan};

use crate::draft_model::{DraftModel, DraftShard};
use crate::error::EngineError;
use crate::protocol::{Bounds, Command, Message, StateCopies};
use crate::results::StepResults;
use crate::same_shard::{Setting, adapters_setting, check_same, model_setting};
use crate::scheduler::RowResults;

/// What a rank loads. All ranks of a world must be given the same.
#[derive(Clone, Copy)]
pub struct RankShard<'a> {
    /// The model.
    pub folder: &'a ModelFolder,
    /// How the model is split over the ranks.
    pub plan: &'a ShardPlan,
    /// Rows, slots and cache blocks to make room for. The last slots hold `snapshots` copies of
    /// states.
    pub capacity: Capacity,
    /// Copies of states, within the capacity's slots.
    pub snapshots: usize,
    /// Everything else that must be the same on all ranks.
    pub settings: &'a [Setting],
    /// The draft model, on rank 0.
    pub draft: Option<DraftShard<'a>>,
}

/// A rank with its weights loaded, on any backend. Rank 0's is driven by an
/// [`EngineLoop`](crate::EngineLoop); the others [`follow`](Self::follow).
pub struct RankWorker<B: Backend> {
    world: Group,
    backend: B,
    model: Model<B>,
    draft: Option<DraftModel<B>>,
    message: Message,
    bounds: Bounds,
    /// Block tables of all sequences, by slot.
    tables: Vec<Vec<u32>>,
    step: Step,
    copies: StateCopies,
    /// Vocabulary rows of each rank of the last stage.
    vocab: Vec<usize>,
    tensor_ranks: usize,
    stages: usize,
    hidden: usize,
    hidden_rows: Vec<f32>,
    outgoing: Vec<f32>,
    largest: Vec<Largest>,
    gathered: Vec<f32>,
    counts: Vec<usize>,
}

impl<B: Backend> RankWorker<B> {
    /// Loads this rank's shard of the model. All ranks of `world` call this together.
    /// `make_backend` gets the rank's tensor-parallel group. `progress` is told the bytes read so
    /// far and in all.
    ///
    /// # Errors
    /// When the model cannot be loaded here or on a peer, or the ranks were given different models
    /// or plans.
    pub fn load(
        shard: RankShard<'_>,
        mut world: Group,
        make_backend: impl FnOnce(Group) -> Result<B, ComputeError>,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<Self, EngineError> {
        let RankShard { folder, plan, capacity, snapshots, settings, draft } = shard;
        check_same(&mut world, &[&[model_setting(folder), adapters_setting(folder)], settings].concat())?;
        let (rank, tensor_ranks) = (world.rank(), plan.tensor_ranks());
        let tensor = world.split((rank / tensor_ranks) as u32, rank as u32)?;
        let mut backend = make_backend(tensor)?;
        let mut peers = Ok(());
        let mut watched = |done, total| {
            progress(done, total);
            peers = world.check();
            if peers.is_ok() { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
        };
        let loaded = Model::load(folder, plan, rank, capacity, &mut backend, &mut watched);
        // Only if the rank's own part has come: why not is the error to tell.
        let draft = match (draft, &loaded) {
            (Some(draft), Ok(_)) => Some(DraftModel::load(draft, &mut backend, &mut watched)),
            _ => None,
        };
        peers?;
        let (model, draft) = (loaded?, draft.transpose()?);
        // No rank begins before all have loaded. A rank that fails closes its links, which ends
        // this wait for the others.
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
            copies: StateCopies::default(),
            vocab,
            tensor_ranks,
            stages: plan.stages(),
            hidden: folder.spec.hidden,
            hidden_rows: Vec::new(),
            outgoing: Vec::new(),
            largest: Vec::new(),
            gathered: Vec::new(),
            counts: Vec::new(),
        })
    }

    /// Computes the steps that rank 0 sends, until rank 0 sends [`Command::Stop`].
    ///
    /// # Errors
    /// When a peer was lost or a step cannot be computed. The group is of no use afterwards.
    pub fn follow(&mut self) -> Result<(), EngineError> {
        self.pin_thread();
        loop {
            match self.exchange_step()? {
                Command::Stop => return Ok(()),
                Command::Ping => {}
                Command::Compute(results) => {
                    self.compute()?;
                    self.send_hidden()?;
                    self.gather_results(results)?;
                }
            }
        }
    }

    /// Pins the calling thread to its core, if the rank has cores of its own. The thread that
    /// computes calls this first.
    pub fn pin_thread(&self) {
        self.backend.pin_caller();
    }

    /// The draft model, if this rank has it, and what it computes on.
    pub fn draft_model(&mut self) -> Option<(&mut DraftModel<B>, &mut B)> {
        self.draft.as_mut().map(|draft| (draft, &mut self.backend))
    }

    /// The message that rank 0 fills in before [`RankWorker::exchange_step`].
    pub fn message(&mut self) -> &mut Message {
        &mut self.message
    }

    /// The step that [`RankWorker::exchange_step`] read.
    pub fn step(&self) -> &Step {
        &self.step
    }

    /// Stages of the pipeline: the most steps that can be in flight.
    pub fn stages(&self) -> usize {
        self.stages
    }

    /// Time and bytes of the reductions since the last call; zero for a single rank.
    pub fn reductions(&mut self) -> Stats {
        self.backend.take_reduction_stats()
    }

    /// Sends the message (rank 0) or receives it (other ranks), and reads the step from it.
    ///
    /// # Errors
    /// When a peer was lost.
    pub fn exchange_step(&mut self) -> Result<Command, EngineError> {
        self.message.exchange(&mut self.world)?;
        Ok(self.message.read(self.bounds, &mut self.tables, &mut self.step, &mut self.copies)?)
    }

    /// Computes the step on this rank's layers, and copies states. Later stages first receive the
    /// hidden states of the stage before.
    ///
    /// # Errors
    /// When a peer was lost or an operation failed.
    pub fn compute(&mut self) -> Result<(), EngineError> {
        let (rank, first_snapshot) = (self.world.rank(), self.bounds.slots);
        for (slot, snapshot) in &self.copies.restore {
            self.model.copy_slot(&mut self.backend, first_snapshot + snapshot, *slot)?;
        }
        if rank < self.tensor_ranks {
            self.model.forward(&mut self.backend, &self.step, None)?;
        } else {
            let width = self.model.hidden_width(self.hidden);
            self.hidden_rows.resize(self.step.rows() * width, 0.0);
            // The stage before may be busy with a long prompt: only its liveness limits this wait.
            self.world.recv_idle(rank - self.tensor_ranks, &mut self.hidden_rows)?;
            self.model.forward(&mut self.backend, &self.step, Some(&self.hidden_rows))?;
        }
        for (slot, snapshot) in &self.copies.save {
            self.model.copy_slot(&mut self.backend, *slot, first_snapshot + snapshot)?;
        }
        Ok(())
    }

    /// Sends the hidden states to the next stage, if there is one.
    ///
    /// # Errors
    /// When a peer was lost.
    pub fn send_hidden(&mut self) -> Result<(), EngineError> {
        let next = self.world.rank() + self.tensor_ranks;
        if next < self.world.size() {
            self.model.read_hidden(&mut self.backend, &self.step, &mut self.outgoing)?;
            // The next stage may be busy with a long prompt: only its liveness limits this wait.
            self.world.send_idle(next, &self.outgoing)?;
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
            let first = self.model.vocab_rows().start as u32;
            self.model.read_largest(&mut self.backend, &self.step, &mut self.largest)?;
            let of_row = |largest: &Largest| [f32::from_bits(first + largest.column), largest.value];
            self.outgoing.clear();
            self.outgoing.extend(self.largest.iter().flat_map(of_row));
        } else {
            self.model.read_logits(&mut self.backend, &self.step, &mut self.outgoing)?;
        }
        let root = rank.is_multiple_of(self.tensor_ranks);
        let of_ranks: usize = self.counts.iter().sum();
        let recv = root.then_some(&mut self.gathered[..of_ranks]);
        self.backend.group().gather(0, &self.outgoing, recv, &self.counts)?;
        if root && results.hidden {
            self.model.read_normed(&mut self.backend, &self.step, &mut self.gathered[of_ranks..])?;
        }
        if root && rank > 0 {
            self.world.send_idle(0, &self.gathered)?;
        }
        Ok(())
    }

    /// On rank 0: waits for the results of the oldest step in flight, in which `rows` rows wanted
    /// logits.
    ///
    /// # Errors
    /// When a peer was lost.
    pub fn results(&mut self, results: RowResults, rows: usize) -> Result<StepResults<'_>, EngineError> {
        self.size_results(results, rows);
        if self.stages > 1 && rows > 0 {
            let from = (self.stages - 1) * self.tensor_ranks;
            self.world.recv_idle(from, &mut self.gathered)?;
        }
        let hidden = if results.hidden { self.hidden } else { 0 };
        let has_logits = results.logits;
        Ok(StepResults { rows, vocab: &self.vocab, has_logits, hidden, gathered: &self.gathered })
    }

    /// Sizes the buffer for the results of `rows` rows.
    fn size_results(&mut self, results: RowResults, rows: usize) {
        let width = |vocab: usize| if results.logits { vocab } else { 2 };
        self.counts.clear();
        self.counts.extend(self.vocab.iter().map(|&vocab| rows * width(vocab)));
        let hidden = if results.hidden { rows * self.hidden } else { 0 };
        let all = self.counts.iter().sum::<usize>() + hidden;
        if self.gathered.len() != all {
            self.gathered.resize(all, 0.0);
        }
    }
}
