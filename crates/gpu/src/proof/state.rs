//! Recurrences and convolutions, on small data, as in [`super::families`].

use thunder_compute::{
    Backend, CacheKind, ComputeError, Decays, DeltaSpec, GatedConvSpec, HeadSharing, KvFormat, Norm,
    StateSpaceSpec, Step,
};

use super::Numbers;
use super::families::{cache_shape, filled, read};
use crate::kernel::Rule;

type Results = Result<Vec<Vec<f32>>, ComputeError>;

/// Runs an operation on a prompt in two pieces with a token between them, and on drafts, some of
/// which are right. The first piece has `prompt` tokens. The operation gets the backend, the step,
/// random rows of `widths`, the caches, and rows of `width` for its results.
fn in_steps<B: Backend, const N: usize>(
    backend: &mut B,
    (cache, seed, prompt): (CacheKind, u64, usize),
    (widths, width): ([usize; N], usize),
    run: impl Fn(&mut B, &Step, &mut [B::Buffer; N], &mut B::Caches, &mut B::Buffer) -> Result<(), ComputeError>,
) -> Results {
    let mut numbers = Numbers(seed);
    let mut caches = backend.caches(&cache_shape(KvFormat::F16, cache))?;
    let mut results = Vec::new();
    // First position, tokens, those of a draft, right ones of the last draft.
    let steps = [(0, 1, 0, 0), (1, 3, 0, 0), (4, 4, 3, 0), (7, 3, 1, 2), (9, 1, 0, 0)];
    let steps = steps.map(|(start, tokens, drafted, accepted)| (prompt + start, tokens, drafted, accepted));
    for (start, tokens, drafted, accepted) in std::iter::once((0, prompt, 0, 0)).chain(steps) {
        let mut step = Step::default();
        step.push(&vec![1; tokens], start, &[0], 1, true);
        for sequence in &mut step.sequences {
            (sequence.drafted, sequence.accepted) = (drafted, accepted);
            sequence.prompt = drafted + accepted == 0 && tokens > 1;
        }
        let mut inputs = Vec::new();
        for width in widths {
            inputs.push(filled(backend, &numbers.take(tokens * width), width)?);
        }
        let Ok(mut inputs) = <[B::Buffer; N]>::try_from(inputs) else {
            unreachable!("there is a buffer for each width")
        };
        let mut out = backend.buffer(tokens, width)?;
        backend.begin(&step, &[])?;
        run(backend, &step, &mut inputs, &mut caches, &mut out)?;
        results.push(read(backend, &out, tokens)?);
    }
    Ok(results)
}

/// A recurrence with keys of this width, by all formulas of its decays.
pub(crate) fn recurrence<B: Backend>(
    backend: &mut B,
    rule: Rule,
    (key_dim, prompt): (usize, usize),
) -> Results {
    let bounded = Decays::Bounded { lowest: -5.0 };
    match rule {
        Rule::Delta => delta_rule(backend, (false, Decays::Softplus), (key_dim, prompt)),
        Rule::ChannelDelta => {
            let mut results = delta_rule(backend, (true, Decays::Softplus), (key_dim, prompt))?;
            results.extend(delta_rule(backend, (true, bounded), (key_dim, prompt))?);
            Ok(results)
        }
        Rule::StateSpace => state_space(backend, (key_dim, prompt)),
    }
}

fn delta_rule<B: Backend>(
    backend: &mut B,
    (channels_decay, decays): (bool, Decays),
    (key_dim, prompt): (usize, usize),
) -> Results {
    let mut numbers = Numbers(5);
    let (key_heads, value_heads, value_dim, kernel) = (2, 4, 70, 4);
    let channels = 2 * key_heads * key_dim + value_heads * value_dim;
    let of_channels = if channels_decay { key_dim } else { 1 };
    let spec = DeltaSpec {
        key_heads,
        value_heads,
        sharing: HeadSharing::Tiled,
        key_dim,
        value_dim,
        kernel,
        unit_eps: 0.25,
        decays,
        taps: numbers.take(channels * kernel),
        decay: numbers.take(value_heads),
        decay_bias: numbers.take(value_heads * of_channels),
        norm: Norm { weight: numbers.take(value_dim), eps: 1e-6 },
    };
    let spec = spec.try_map(&mut |values| backend.vector(&values))?;
    let (width, rows) = (value_heads * value_dim, value_heads * key_dim);
    let widths = ([channels, 2 * value_heads, rows, width], width);
    in_steps(
        backend,
        (spec.cache(), 15, prompt),
        widths,
        |backend, step, [x, gates, alpha, z], caches, out| {
            let all = 0..step.rows();
            backend.short_conv(&spec, step, all.clone(), x, (&mut *caches, 0))?;
            if channels_decay {
                let inputs = [&*x, &*gates, &*alpha];
                backend.channel_delta_rule(&spec, step, all.clone(), inputs, (caches, 0), out)?;
            } else {
                backend.delta_rule(&spec, step, all.clone(), (x, gates), (caches, 0), out)?;
            }
            backend.norm_gated(&spec, z, all, out)
        },
    )
}

fn state_space<B: Backend>(backend: &mut B, (state_dim, prompt): (usize, usize)) -> Results {
    let (heads, head_dim, groups) = (4, 40, 2);
    let channels = heads * head_dim + 2 * groups * state_dim;
    let mut results = Vec::new();
    for (biased, time_limit, kernel) in [(true, (0.4, 1.1), 6), (false, (0.0, f32::INFINITY), 4)] {
        let mut numbers = Numbers(16);
        let spec = StateSpaceSpec {
            heads,
            head_dim,
            groups,
            state_dim,
            kernel,
            taps: numbers.take(channels * kernel),
            conv_bias: biased.then(|| numbers.take(channels)),
            rate: numbers.take(heads),
            // Some time steps are small.
            time_bias: numbers.take(heads).iter().map(|x| 5.0 * x).collect(),
            skip: numbers.take(heads),
            time_limit,
        };
        let spec = spec.try_map(&mut |values| backend.vector(&values))?;
        let widths = ([channels, heads], heads * head_dim);
        let of = (spec.cache(), 17, prompt);
        results.extend(in_steps(backend, of, widths, |backend, step, [x, times], caches, out| {
            backend.state_space(&spec, step, 0..step.rows(), (x, times), (caches, 0), out)
        })?);
    }
    Ok(results)
}

pub(super) fn gated_conv<B: Backend>(backend: &mut B, kernel: usize) -> Results {
    let channels = 70;
    let mut numbers = Numbers(18);
    let spec = GatedConvSpec { channels, kernel, taps: numbers.take(channels * kernel) };
    let spec = spec.try_map(&mut |values| backend.vector(&values))?;
    let widths = ([3 * channels], channels);
    in_steps(backend, (spec.cache(), 19, 150), widths, |backend, step, [x], caches, out| {
        backend.gated_conv(&spec, step, 0..step.rows(), x, (caches, 0), out)
    })
}
