//! One rank of an engine: its part of the model, and the loop in which it follows rank 0.

use std::ops::ControlFlow;

use sha2::{Digest, Sha256};
use thunder_collectives::{CommError, Group, InitError, Stats};
use thunder_compute::{Backend, ComputeError, CpuBackend, CpuConfig, Largest, Step};
use thunder_model::{Capacity, Model, ModelError, ModelFolder, ShardPlan};

use crate::protocol::{BadMessage, Command, Message};
use crate::sampler::argmax;

/// Why a rank cannot go on.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    /// A peer was lost, or a link.
    #[error(transparent)]
    Comm(#[from] CommError),
    /// The groups inside of the world could not be formed.
    #[error(transparent)]
    Init(#[from] InitError),
    /// The model could not be loaded.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// The backend failed.
    #[error(transparent)]
    Compute(#[from] ComputeError),
    /// RankWorker 0 runs another version.
    #[error(transparent)]
    BadMessage(#[from] BadMessage),
    /// The ranks were started with different models or plans.
    #[error(
        "rank {rank} has another model or plan than rank 0: start all ranks with the same model (the same files), --split, \
         --parallel, --activations, --overlap, --kv, --context and --max-batch"
    )]
    Mismatch {
        /// The rank that differs.
        rank: usize,
    },
}

/// A rank with its weights loaded.
pub struct RankWorker {
    world: Group,
    backend: CpuBackend,
    model: Model<CpuBackend>,
    message: Message,
    tables: Vec<Vec<u32>>,
    step: Step,
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

impl RankWorker {
    /// Loads this rank's part of the model. All ranks of `world` call this together.
    ///
    /// # Errors
    /// When the model cannot be loaded here, or a peer failed to.
    pub fn load(
        folder: &ModelFolder,
        plan: &ShardPlan,
        mut world: Group,
        cpu: &CpuConfig,
        capacity: Capacity,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<Self, EngineError> {
        let (rank, tensor_ranks) = (world.rank(), plan.tensor_ranks());
        agree(&mut world, folder, plan, capacity, cpu)?;
        let tensor = world.split((rank / tensor_ranks) as u32, rank as u32)?;
        let mut backend = CpuBackend::new(cpu, tensor);
        let mut peers = Ok(());
        let loaded = Model::load(folder, plan, rank, capacity, &mut backend, &mut |done, total| {
            progress(done, total);
            peers = world.check();
            if peers.is_ok() { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
        });
        peers?;
        let model = loaded?;
        // Nobody begins before all have loaded; one that fails closes its links, which ends this wait for the others.
        let mut ready = [1u32];
        for root in 0..world.size() {
            world.broadcast_idle(root, &mut ready)?;
        }
        // All ranks are here and idle, as the probe needs them.
        backend.tune(folder.spec.hidden, model.bytes_per_reduction())?;
        backend.take_reduction_stats();
        let last = plan.ranks() - tensor_ranks;
        let vocab =
            (last..plan.ranks()).map(|rank| plan.shard(rank).vocab(folder.spec.vocab).len()).collect();
        Ok(Self {
            world,
            backend,
            model,
            message: Message::default(),
            tables: Vec::new(),
            step: Step::default(),
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

    /// Follows rank 0 until it says stop.
    ///
    /// # Errors
    /// When a peer was lost or a step cannot be computed. The group is of no use afterwards.
    pub fn follow(&mut self) -> Result<(), EngineError> {
        self.pin_thread();
        loop {
            match self.exchange_step()? {
                Command::Stop => return Ok(()),
                Command::Ping => {}
                command @ (Command::ComputeLogits | Command::ComputeLargest) => {
                    self.compute()?;
                    self.send_hidden()?;
                    self.gather_results(command)?;
                }
            }
        }
    }

    /// Called by the thread that will compute, before it does: keeps it to its core, if the rank has cores of its own.
    pub fn pin_thread(&self) {
        self.backend.pin_caller();
    }

    /// The message that rank 0 fills in before [`RankWorker::exchange_step`].
    pub fn message(&mut self) -> &mut Message {
        &mut self.message
    }

    /// The step that [`RankWorker::exchange_step`] read.
    pub fn step(&self) -> &Step {
        &self.step
    }

    /// Stages of the pipeline: as many steps can be under way at once.
    pub fn stages(&self) -> usize {
        self.stages
    }

    /// Time and bytes of the reductions since the last call; for a rank that is alone, zero.
    pub fn reductions(&mut self) -> Stats {
        self.backend.take_reduction_stats()
    }

    /// Exchanges the message and reads the step.
    ///
    /// # Errors
    /// When a peer was lost.
    pub fn exchange_step(&mut self) -> Result<Command, EngineError> {
        self.message.exchange(&mut self.world)?;
        Ok(self.message.read(&mut self.tables, &mut self.step)?)
    }

    /// Computes the step on this rank's layers.
    ///
    /// # Errors
    /// When a peer was lost.
    pub fn compute(&mut self) -> Result<(), EngineError> {
        let rank = self.world.rank();
        if rank < self.tensor_ranks {
            self.model.forward(&mut self.backend, &self.step, None)?;
        } else {
            self.hidden_rows.resize(self.step.rows() * self.hidden, 0.0);
            // The stage before may be busy with a long prompt: only its liveness limits this wait.
            self.world.recv_idle(rank - self.tensor_ranks, &mut self.hidden_rows)?;
            self.model.forward(&mut self.backend, &self.step, Some(&self.hidden_rows))?;
        }
        Ok(())
    }

    /// Hands the hidden states to the next stage, if there is one.
    ///
    /// # Errors
    /// When a peer was lost.
    pub fn send_hidden(&mut self) -> Result<(), EngineError> {
        let next = self.world.rank() + self.tensor_ranks;
        if next < self.world.size() {
            // It may be busy with a long prompt.
            self.model.read_hidden(&mut self.backend, &self.step, &mut self.outgoing)?;
            self.world.send_idle(next, &self.outgoing)?;
        }
        Ok(())
    }

    /// On the last stage: brings the results together on its first rank, which sends them to rank 0. `self.gathered` then
    /// holds `[rank][row]`: logits of the rank's rows, or index and value of the largest.
    ///
    /// # Errors
    /// When a peer was lost.
    pub fn gather_results(&mut self, command: Command) -> Result<(), EngineError> {
        let (rank, rows) = (self.world.rank(), self.step.logit_rows.len());
        if rank + self.tensor_ranks < self.world.size() || rows == 0 {
            return Ok(());
        }
        self.layout(command, rows);
        if command == Command::ComputeLargest {
            let first = self.model.vocab_rows().start as u32;
            self.model.read_largest(&mut self.backend, &self.step, &mut self.largest)?;
            let of_row = |largest: &Largest| [f32::from_bits(first + largest.column), largest.value];
            self.outgoing.clear();
            self.outgoing.extend(self.largest.iter().flat_map(of_row));
        } else {
            self.model.read_logits(&mut self.backend, &self.step, &mut self.outgoing)?;
        }
        let root = rank.is_multiple_of(self.tensor_ranks);
        let recv = root.then_some(self.gathered.as_mut_slice());
        self.backend.group().gather(0, &self.outgoing, recv, &self.counts)?;
        if root && rank > 0 {
            self.world.send_idle(0, &self.gathered)?;
        }
        Ok(())
    }

    /// On rank 0: waits for the results of the oldest step under way, of which `rows` rows wanted logits.
    ///
    /// # Errors
    /// When a peer was lost.
    pub fn results(&mut self, command: Command, rows: usize) -> Result<StepResults<'_>, EngineError> {
        self.layout(command, rows);
        if self.stages > 1 && rows > 0 {
            let from = (self.stages - 1) * self.tensor_ranks;
            self.world.recv_idle(from, &mut self.gathered)?;
        }
        Ok(StepResults { command, rows, vocab: &self.vocab, gathered: &self.gathered })
    }

    fn layout(&mut self, command: Command, rows: usize) {
        let width = |vocab: usize| if command == Command::ComputeLargest { 2 } else { vocab };
        self.counts.clear();
        self.counts.extend(self.vocab.iter().map(|&vocab| rows * width(vocab)));
        let all = self.counts.iter().sum();
        if self.gathered.len() != all {
            self.gathered.resize(all, 0.0);
        }
    }
}

/// What a step gave, on rank 0.
#[derive(Debug, Clone, Copy)]
pub struct StepResults<'a> {
    command: Command,
    rows: usize,
    vocab: &'a [usize],
    gathered: &'a [f32],
}

impl StepResults<'_> {
    /// The likeliest token of a row.
    pub fn argmax(&self, row: usize, scratch: &mut Vec<f32>) -> u32 {
        if self.command == Command::ComputeLogits {
            self.logits(row, scratch);
            return argmax(scratch).0;
        }
        let mut best = Largest::NONE;
        for rank in 0..self.vocab.len() {
            let &[id, value] = &self.gathered[(rank * self.rows + row) * 2..][..2] else { continue };
            // The lowest id wins a tie, as on one rank.
            best = best.or(Largest { column: id.to_bits(), value });
        }
        best.column
    }

    /// A row's logits over the whole vocabulary.
    pub fn logits(&self, row: usize, out: &mut Vec<f32>) {
        out.clear();
        let mut start = 0;
        for &vocab in self.vocab {
            out.extend_from_slice(&self.gathered[start + row * vocab..][..vocab]);
            start += self.rows * vocab;
        }
    }
}

/// All ranks must have been given the same model and plan: anything else would compute nonsense.
fn agree(
    world: &mut Group,
    folder: &ModelFolder,
    plan: &ShardPlan,
    capacity: Capacity,
    cpu: &CpuConfig,
) -> Result<(), EngineError> {
    if world.size() == 1 {
        return Ok(());
    }
    let what = format!("{:?} {plan:?} {capacity:?} {:?} {:?}", folder.spec, cpu.activations, cpu.overlap);
    let own: [u8; 64] = std::array::from_fn({
        let parts = [Sha256::digest(what).into(), folder.weights.fingerprint()];
        move |index| parts[index / 32][index % 32]
    });
    let mut all = vec![0u8; own.len() * world.size()];
    world.all_gather(&own, &mut all, &vec![own.len(); world.size()])?;
    match all.chunks(own.len()).position(|other| *other != all[..own.len()]) {
        Some(rank) => Err(EngineError::Mismatch { rank }),
        None => Ok(()),
    }
}
