//! A small model that guesses what the served model will say. Only rank 0 has it, as a whole.

use std::ops::ControlFlow;
use std::time::Instant;

use thunder_collectives::Group;
use thunder_compute::choice::are_finite;
use thunder_compute::{Backend, ComputeError, Largest, Step};
use thunder_model::model::shard_footprints;
use thunder_model::{Capacity, Model, ModelError, ModelFolder, Parallelism, ShardPlan};

use crate::error::EngineError;

/// Number of passes before the first request; the fastest one counts.
pub(crate) const WARM_UP_PASSES: usize = 3;

/// A draft model to load.
#[derive(Clone, Copy)]
pub struct DraftShard<'a> {
    /// The model. Its tokenizer is that of the served model.
    pub folder: &'a ModelFolder,
    /// Rows, requests and cache blocks to allocate. Blocks and slots are the served model's; a
    /// model with states allocates twice as many slots.
    pub capacity: Capacity,
}

/// A loaded draft model, on the backend of rank 0's shard.
pub struct DraftModel<B: Backend> {
    model: Model<B>,
    /// Replaces the backend's group while this model computes.
    alone: Group,
    step: Step,
    largest: Vec<Largest>,
    logits: Vec<f32>,
    /// Tokens of the draft model's vocabulary, including padding.
    vocab: usize,
    /// Maximum tokens of a text.
    context: usize,
    /// Maximum rows of a pass.
    rows: usize,
    /// Seconds of the fastest pass before the first request.
    pass_s: f32,
    /// Requests that have a slot, if the model has states. The slots after theirs hold the states
    /// for guesses, so that no state has to undo a wrong guess.
    requests: Option<usize>,
    /// Slots whose states are copied for guesses before the pass.
    copies: Vec<usize>,
}

impl<B: Backend> DraftModel<B> {
    /// Loads the model.
    ///
    /// # Errors
    /// If it cannot be loaded or computed, or `progress` breaks.
    pub fn load(
        DraftShard { folder, capacity }: DraftShard<'_>,
        backend: &mut B,
        progress: &mut dyn FnMut(u64, u64) -> ControlFlow<()>,
    ) -> Result<Self, EngineError> {
        let plan = ShardPlan::new(&folder.spec, Parallelism::Tensor, &[1.0])?;
        let mut alone = Group::solo();
        let footprints = shard_footprints(folder, &plan, capacity.kv_format)?;
        let has_states = footprints.iter().any(|footprint| footprint.state_bytes_per_sequence > 0);
        let requests = has_states.then_some(capacity.slots);
        let capacity = Capacity { slots: capacity.slots + requests.unwrap_or(0), ..capacity };
        let load = |backend: &mut B| Model::load(folder, &plan, 0, capacity, backend, progress);
        let model: Result<_, ModelError> = apart(backend, &mut alone, load);
        let mut draft = Self {
            model: model?,
            alone,
            step: Step::default(),
            largest: Vec::new(),
            logits: Vec::new(),
            vocab: folder.spec.vocab,
            context: folder.spec.context,
            rows: capacity.rows,
            pass_s: f32::MAX,
            requests,
            copies: Vec::new(),
        };
        for _ in 0..WARM_UP_PASSES {
            let began = Instant::now();
            draft.begin();
            draft.push(&[0], 0, (&[0], 0), true, 0);
            draft.compute(backend, false)?;
            draft.pass_s = draft.pass_s.min(began.elapsed().as_secs_f32());
        }
        Ok(draft)
    }

    /// Maximum tokens of a text that it can read.
    pub fn context(&self) -> usize {
        self.context
    }

    /// Maximum rows of a pass.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// True if it must read each text from its first token on, and each token once.
    pub fn has_states(&self) -> bool {
        self.requests.is_some()
    }

    /// Seconds of a pass for one request.
    pub fn pass_s(&self) -> f32 {
        self.pass_s
    }

    /// Begins a pass.
    pub fn begin(&mut self) {
        self.step.clear();
        self.copies.clear();
    }

    /// Adds tokens of a sequence to the pass, starting at position `start`, with the sequence's
    /// blocks and slot. `guesses` requests what follows the last token. `depth` is 0 for tokens of
    /// the text, and counts guesses after it.
    pub fn push(
        &mut self,
        tokens: &[u32],
        start: usize,
        (blocks, mut slot): (&[u32], usize),
        guesses: bool,
        depth: usize,
    ) {
        if let Some(requests) = self.requests.filter(|_| depth > 0) {
            if depth == 1 {
                self.copies.push(slot);
            }
            slot += requests;
        }
        self.step.push(tokens, start, blocks, slot, guesses);
        if let Some(sequence) = self.step.sequences.last_mut() {
            // A guess is a row or two, too few for a prompt's products.
            sequence.prompt = !guesses;
        }
    }

    /// Computes the pass. The results are then in [`DraftModel::largest`], or with `logits` in
    /// [`DraftModel::logits`].
    ///
    /// # Errors
    /// If an operation fails.
    pub fn compute(&mut self, backend: &mut B, logits: bool) -> Result<(), ComputeError> {
        let Self { model, alone, step, largest, logits: out, requests, copies, .. } = self;
        apart(backend, alone, |backend| {
            for slot in copies.iter() {
                model.copy_slot(backend, *slot, slot + requests.unwrap_or(0))?;
            }
            model.forward(backend, step, None)?;
            match (step.logit_rows.is_empty(), logits) {
                (true, _) => Ok(()),
                (false, true) => model.read_logits(backend, step, out),
                (false, false) => model.read_largest(backend, step, largest),
            }
        })
    }

    /// The most probable token after sequence number `index` of the pass; `None` if a number is not
    /// finite.
    pub fn largest(&self, index: usize) -> Option<u32> {
        self.largest.get(index).filter(|largest| largest.value.is_finite()).map(|largest| largest.column)
    }

    /// The logits after sequence number `index` of the pass, for a vocabulary of `vocab` tokens;
    /// `None` if one is not finite. Models pad their vocabularies differently.
    pub fn logits(&self, index: usize, vocab: usize, out: &mut Vec<f32>) -> Option<()> {
        let logits = self.logits.get(index * self.vocab..(index + 1) * self.vocab)?;
        are_finite(logits).then(|| {
            out.clear();
            out.extend_from_slice(&logits[..vocab.min(logits.len())]);
            out.resize(vocab, f32::NEG_INFINITY);
        })
    }
}

/// Uses a backend with the group `alone` in place of its own.
fn apart<B: Backend, R>(backend: &mut B, alone: &mut Group, work: impl FnOnce(&mut B) -> R) -> R {
    std::mem::swap(backend.group(), alone);
    let result = work(backend);
    std::mem::swap(backend.group(), alone);
    result
}
