//! The source of guesses: a draft model, or the model's own layer that predicts further tokens.

use thunder_compute::choice::are_finite;
use thunder_compute::{Backend, ComputeError};

use crate::draft_model::DraftModel;
use crate::error::EngineError;
use crate::hidden_rows::KEPT_ROWS;
use crate::protocol::Command;
use crate::rank::RankWorker;
use crate::scheduler::{Decoding, RowResults, StepPart};
use crate::speculation::MAX_DRAFT;

/// Tokens of a text that a guessing pass reads in addition: those that a step has added since the
/// last pass.
const FEW_TOKENS: usize = 4;

/// The source of guesses on rank 0.
pub enum Drafter<'a, B: Backend> {
    /// A draft model on rank 0.
    Model(&'a mut DraftModel<B>, &'a mut B),
    /// A layer of the served model, on all ranks that compute logits. It reads a token together
    /// with the model's hidden state before it, so it cannot read text that the model has not read.
    Layer(&'a mut RankWorker<B>),
}

/// One sequence's tokens in a pass.
pub struct Reads<'a> {
    /// The sequence.
    pub of: &'a Decoding<'a>,
    /// Position of the first token.
    pub start: usize,
    /// The tokens: of the sequence, or guesses that follow it.
    pub tokens: &'a [u32],
    /// True if the token after the last one is requested.
    pub guesses: bool,
    /// 0 for tokens of the sequence; the first guess has depth 1.
    pub depth: usize,
}

impl<B: Backend> Drafter<'_, B> {
    /// Maximum tokens of a text that it can read.
    pub fn context(&self) -> usize {
        match self {
            Self::Model(model, _) => model.context(),
            Self::Layer(_) => usize::MAX,
        }
    }

    /// Maximum rows of a pass.
    pub fn rows(&self) -> usize {
        match self {
            Self::Model(model, _) => model.rows(),
            Self::Layer(worker) => worker.rows(),
        }
    }

    /// True for the model's own layer.
    pub fn is_layer(&self) -> bool {
        matches!(self, Self::Layer(_))
    }

    /// True if it reads each token only once, even the last one for its logits.
    pub fn has_states(&self) -> bool {
        match self {
            Self::Model(model, _) => model.has_states(),
            Self::Layer(_) => false,
        }
    }

    /// Unread tokens that a pass which guesses for `requests` requests reads in addition.
    pub fn few(&self, requests: usize) -> usize {
        match self {
            Self::Model(..) => FEW_TOKENS,
            Self::Layer(worker) => {
                let most = if requests == 1 { MAX_DRAFT } else { FEW_TOKENS };
                (worker.rows() / requests.max(1)).saturating_sub(1).min(most)
            }
        }
    }

    /// The first token of a sequence that it has not read and can still read.
    pub fn first_unread(&self, of: &Decoding<'_>) -> usize {
        match self {
            Self::Model(..) => of.draft_read,
            Self::Layer(_) => of.draft_read.max(of.tokens.len().saturating_sub(KEPT_ROWS)),
        }
    }

    /// True if the tokens are in blocks that others may read, and so must be written separately.
    pub fn is_shared(&self, of: &Decoding<'_>, first: usize) -> bool {
        match self {
            Self::Model(..) => first < of.shared,
            // A token is stored at the position before its own.
            Self::Layer(_) => first <= of.shared && of.shared > 0,
        }
    }

    /// Begins a pass. Its guesses are chosen from logits, or are the most probable tokens.
    pub fn begin(&mut self, logits: bool) {
        match self {
            Self::Model(model, _) => model.begin(),
            Self::Layer(worker) => {
                worker.message().begin(Command::Predict(RowResults { logits, ..RowResults::default() }));
            }
        }
    }

    /// Adds tokens of a sequence to the pass.
    pub fn push(&mut self, Reads { of, start, tokens, guesses, depth }: Reads<'_>) {
        match self {
            Self::Model(model, _) => model.push(tokens, start, (of.blocks, of.slot), guesses, depth),
            Self::Layer(worker) => {
                // The first token of a text follows nothing.
                let skipped = usize::from(start == 0);
                worker.message().push(&StepPart {
                    slot: of.slot,
                    start: start + skipped - 1,
                    tokens: &tokens[skipped.min(tokens.len())..],
                    next: None,
                    kept_blocks: of.sent_blocks,
                    new_blocks: &of.blocks[of.sent_blocks..],
                    prompt: !guesses,
                    wanted_rows: usize::from(guesses),
                    accepted: 0,
                    restore: None,
                    save: None,
                    adapter: 0,
                    draws: None,
                });
            }
        }
    }

    /// Computes the pass. The results are then in [`Drafter::largest`], or with `logits` in
    /// [`Drafter::logits`].
    ///
    /// # Errors
    /// If an operation fails, or a peer was lost.
    pub fn compute(&mut self, logits: bool) -> Result<(), EngineError> {
        match self {
            Self::Model(model, backend) => {
                let computed: Result<(), ComputeError> = model.compute(backend, logits);
                Ok(computed?)
            }
            Self::Layer(worker) => worker.predict_with_all(RowResults { logits, ..RowResults::default() }),
        }
    }

    /// The most probable token after sequence number `index` of the pass; `None` if a number is not
    /// finite.
    pub fn largest(&self, index: usize) -> Option<u32> {
        match self {
            Self::Model(model, _) => model.largest(index),
            Self::Layer(worker) => worker.received(RowResults::default()).token(index),
        }
    }

    /// The logits after sequence number `index` of the pass, for a vocabulary of `vocab` tokens;
    /// `None` if one is not finite.
    pub fn logits(&self, index: usize, vocab: usize, out: &mut Vec<f32>) -> Option<()> {
        match self {
            Self::Model(model, _) => model.logits(index, vocab, out),
            Self::Layer(worker) => {
                worker.received(RowResults { logits: true, ..RowResults::default() }).logits(index, out);
                are_finite(out).then_some(())
            }
        }
    }
}
