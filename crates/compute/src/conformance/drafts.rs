//! Drafts in layers with states: rows of a draft have the same results as alone, and the state
//! absorbs the right ones when the sequence continues.

use super::data::{columns, filled};
use super::{Suite, Work};
use crate::backend::{
    Backend, CacheShape, ComputeError, Decays, DeltaSpec, Extra, GatedConvSpec, HeadSharing, KvFormat, Norm,
    StateSpaceSpec,
};
use crate::step::{KV_BLOCK_TOKENS, Step};

/// Tokens of each sequence.
const TOKENS: usize = 40;
/// Tokens of the prompt.
const PROMPT: usize = 7;
/// Drafts of the following steps, in turn: number of tokens, and how many of them are right.
const DRAFTS: [(usize, usize); 8] = [(3, 3), (0, 0), (4, 0), (2, 1), (1, 1), (3, 2), (0, 0), (0, 0)];
/// Sequences. Each begins at another of the drafts.
const SEQUENCES: usize = 3;

/// A recurrence of each kind.
enum Of<'a> {
    Delta(&'a DeltaSpec<Vec<f32>>),
    Channels(&'a DeltaSpec<Vec<f32>>),
    Space(&'a StateSpaceSpec<Vec<f32>>),
    Conv(&'a GatedConvSpec<Vec<f32>>),
}

struct Drafted<'a> {
    of: Of<'a>,
    /// Inputs by sequence and position, and those of wrong guesses: of the convolution, then the
    /// recurrence's other inputs.
    right: [Vec<Vec<f32>>; 3],
    wrong: [Vec<f32>; 3],
}

/// A sequence's rows in a step.
#[derive(Clone, Copy)]
struct Part {
    sequence: usize,
    start: usize,
    /// Number of rows with the sequence's tokens; wrong guesses follow.
    right: usize,
    wrong: usize,
    drafted: usize,
    accepted: usize,
}

/// The steps of all sequences, with drafts or without.
fn steps(with_drafts: bool) -> Vec<Vec<Part>> {
    let mut steps = vec![Vec::new(); TOKENS];
    for sequence in 0..SEQUENCES {
        let part = |start, right| Part { sequence, start, right, wrong: 0, drafted: 0, accepted: 0 };
        steps[0].push(part(0, PROMPT));
        let (mut start, mut accepted) = (PROMPT, 0);
        for (index, step) in steps[1..].iter_mut().enumerate() {
            let (drafted, right) = DRAFTS[(index + 3 * sequence) % DRAFTS.len()];
            let (drafted, right) = if with_drafts { (drafted, right) } else { (0, 0) };
            if start + 1 + right > TOKENS {
                break;
            }
            let wrong = drafted - right;
            step.push(Part { wrong, drafted, accepted, ..part(start, 1 + right) });
            (start, accepted) = (start + 1 + right, right);
        }
    }
    steps.retain(|parts| !parts.is_empty());
    steps
}

impl Drafted<'_> {
    /// Output rows of each sequence's tokens, one after the other.
    fn outputs<B: Backend>(&self, backend: &mut B, with_drafts: bool) -> Result<Vec<f32>, ComputeError> {
        let (cache, widths, width) = match &self.of {
            Of::Delta(spec) => {
                let widths = [spec.channels(), 2 * spec.value_heads, 1];
                (spec.cache(), widths, spec.value_heads * spec.value_dim)
            }
            Of::Channels(spec) => {
                let widths = [spec.channels(), spec.value_heads, spec.value_heads * spec.key_dim];
                (spec.cache(), widths, spec.value_heads * spec.value_dim)
            }
            Of::Space(spec) => (spec.cache(), [spec.channels(), spec.heads, 1], spec.width()),
            Of::Conv(spec) => (spec.cache(), [3 * spec.channels, 1, 1], spec.channels),
        };
        let shape = CacheShape {
            format: KvFormat::F16,
            caches: vec![cache],
            blocks: SEQUENCES * 2,
            slots: SEQUENCES,
        };
        let mut caches = backend.caches(&shape)?;
        let mut outputs = vec![Vec::new(); SEQUENCES];
        for parts in steps(with_drafts) {
            let mut step = Step::default();
            for part in &parts {
                let rows = part.right + part.wrong;
                let blocks: Vec<u32> = (0..(part.start + rows).div_ceil(KV_BLOCK_TOKENS))
                    .map(|block| (2 * part.sequence + block) as u32)
                    .collect();
                step.push(&vec![1; rows], part.start, &blocks, part.sequence, true);
                if let Some(sequence) = step.sequences.last_mut() {
                    sequence.prompt = part.start == 0;
                    (sequence.drafted, sequence.accepted) = (part.drafted, part.accepted);
                }
            }
            let input = |index: usize| -> Vec<f32> {
                let width = widths[index];
                let of = |part: &Part| {
                    let right = &self.right[index][part.sequence][part.start * width..][..part.right * width];
                    [right, &self.wrong[index][..part.wrong * width]].concat()
                };
                parts.iter().flat_map(of).collect()
            };
            let [x, second, third] = [0, 1, 2].map(|index| filled(backend, &input(index), widths[index]));
            let (mut x, second, third) = (x?, second?, third?);
            let mut out = backend.buffer(step.rows(), width)?;
            for rows in backend.begin(&step, &[])? {
                let cache = (&mut caches, 0);
                match &self.of {
                    Of::Delta(spec) => {
                        let spec = (*spec).clone().try_map(&mut |values| backend.vector(&values))?;
                        backend.short_conv(&spec, &step, rows.clone(), &mut x, (&mut *cache.0, 0))?;
                        backend.delta_rule(&spec, &step, rows, (&x, &second), cache, &mut out)?;
                    }
                    Of::Channels(spec) => {
                        let spec = (*spec).clone().try_map(&mut |values| backend.vector(&values))?;
                        backend.short_conv(&spec, &step, rows.clone(), &mut x, (&mut *cache.0, 0))?;
                        let inputs = [&x, &second, &third];
                        backend.channel_delta_rule(&spec, &step, rows, inputs, cache, &mut out)?;
                    }
                    Of::Space(spec) => {
                        let spec = (*spec).clone().try_map(&mut |values| backend.vector(&values))?;
                        backend.state_space(&spec, &step, rows, (&mut x, &second), cache, &mut out)?;
                    }
                    Of::Conv(spec) => {
                        let spec = (*spec).clone().try_map(&mut |values| backend.vector(&values))?;
                        backend.gated_conv(&spec, &step, rows, &mut x, cache, &mut out)?;
                    }
                }
            }
            let rows = columns(backend, &out, 0..step.rows(), (width, width))?;
            for (part, sequence) in parts.iter().zip(&step.sequences) {
                let right = &rows[sequence.rows.start * width..][..part.right * width];
                outputs[part.sequence].extend_from_slice(right);
            }
        }
        // Some sequences' last draft would be too long.
        let least = outputs.iter().map(Vec::len).min().unwrap_or(0).min((TOKENS - 5) * width);
        Ok(outputs.into_iter().flat_map(|rows| rows[..least].to_vec()).collect())
    }
}

impl Work for Drafted<'_> {
    fn run<B: Backend>(&self, backend: &mut B) -> Result<Vec<f32>, ComputeError> {
        let [with, without] = [true, false].map(|with_drafts| self.outputs(backend, with_drafts));
        let (with, without) = (with?, without?);
        // The same bits, or no number at all.
        Ok(if with == without { with } else { vec![f32::NAN; without.len()] })
    }
}

impl<B: Backend> Suite<'_, B> {
    pub(super) fn drafts(&mut self) {
        for (key_heads, value_heads, key_dim, value_dim, kernel) in [(1, 1, 16, 16, 4), (2, 6, 24, 20, 3)] {
            let channels = 2 * key_heads * key_dim + value_heads * value_dim;
            let delta = |decay_bias, taps, random: &mut super::data::Random| DeltaSpec {
                key_heads,
                value_heads,
                sharing: HeadSharing::Grouped,
                key_dim,
                value_dim,
                kernel,
                taps,
                unit_eps: 0.25,
                decays: Decays::Softplus,
                decay: random.numbers(value_heads),
                decay_bias,
                norm: Norm { weight: vec![1.0; value_dim], eps: 1e-6 },
            };
            let taps = self.random.numbers(channels * kernel);
            let biases = self.random.numbers(value_heads * key_dim);
            let plain = delta(biases[..value_heads].to_vec(), taps.clone(), &mut self.random);
            let of_channels = delta(biases, taps, &mut self.random);
            for (of, widths) in [
                (Of::Delta(&plain), [channels, 2 * value_heads, 1]),
                (Of::Channels(&of_channels), [channels, value_heads, value_heads * key_dim]),
            ] {
                let kind = if matches!(of, Of::Delta(_)) { "" } else { " of channels" };
                let case = format!("drafts by the delta rule{kind} of {value_heads} heads");
                self.drafted(case, of, widths);
            }
        }
        let (heads, head_dim, groups, state_dim) = (6, 21, 3, 24);
        let channels = heads * head_dim + 2 * groups * state_dim;
        let spec = StateSpaceSpec {
            heads,
            head_dim,
            groups,
            state_dim,
            kernel: 4,
            taps: self.random.numbers(channels * 4),
            conv_bias: Some(self.random.numbers(channels)),
            rate: self.random.numbers(heads),
            time_bias: self.random.numbers(heads),
            skip: self.random.numbers(heads),
            time_limit: (0.0, f32::INFINITY),
        };
        self.drafted("drafts by a state space".to_owned(), Of::Space(&spec), [channels, heads, 1]);
        if self.backend.offers(Extra::GatedConv) {
            let (channels, kernel) = (37, 3);
            let spec = GatedConvSpec { channels, kernel, taps: self.random.numbers(channels * kernel) };
            self.drafted("drafts by a gated convolution".to_owned(), Of::Conv(&spec), [3 * channels, 1, 1]);
        }
    }

    fn drafted(&mut self, case: String, of: Of<'_>, widths: [usize; 3]) {
        let mut rows = |width: usize| self.random.numbers((TOKENS + 5) * width);
        let right = widths.map(|width| (0..SEQUENCES).map(|_| rows(width)).collect());
        let wrong = widths.map(rows);
        self.compare(case, self.limits.rows, Drafted { of, right, wrong });
    }
}
