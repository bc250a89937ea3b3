//! Kernels that have one form, on small data, against the plain reference.

use std::ops::Range;

use thunder_collectives::Group;
use thunder_compute::conformance::{chosen_outputs, likely_outputs};
use thunder_compute::step::KV_BLOCK_TOKENS;
use thunder_compute::{
    Activation, AttentionSpec, Backend, CacheKind, CacheShape, ComputeError, Curve, ExpertGroups, KvFormat,
    Largest, Norm, PartNorm, QkNorm, Reference, Rope, RouterSpec, Scores, Scoring, SharedExpert, Step,
};

use super::latent::LatentShape;
use super::{Family, Numbers, attend, change, compare, compress, latent, levels, select, state};
use crate::backend::GpuBackend;
use crate::kernel::{
    AttendLatent, AttendLatentMatrices, AttendMany, AttendMatrices, AttendShared, AttendTiles, Attended,
    HeldRecurrence, Kernel, Rule, TokenSearch, UNIT,
};

/// Tokens of the sequence: more than a split of attention.
const TOKENS: usize = 300;

/// Runs a family on the device and on the reference. The inner error says what is wrong.
pub(super) fn check(backend: &mut GpuBackend, family: Family) -> Result<Result<(), String>, ComputeError> {
    match family {
        Family::CombinedLevels => return levels::combined(backend),
        Family::NormedLevels => return levels::normed(backend),
        Family::Selection { int8 } => return select::check(backend, LatentShape::ODD, int8),
        Family::Shared(form) if form.tokens == Attended::Selected => {
            let outcome = select::check(backend, LatentShape::of(form), form.int8)?;
            return if outcome.is_ok() { latent::same_bits(backend, form) } else { Ok(outcome) };
        }
        Family::Pooling { int8 } => return compress::check_pools(backend, int8),
        _ => {}
    }
    let has_shared_results = backend.has_shared_results;
    if let Family::Many(form) = family {
        // Only a form that adds its splits has a substitute.
        backend.has_shared_results = form.whole;
    }
    let found = run(backend, family);
    if let (Family::Many(form), Ok(_)) = (family, &found)
        && let Err(reason) = attend::leaves(backend, form)?
    {
        backend.has_shared_results = has_shared_results;
        return Ok(Err(reason));
    }
    backend.has_shared_results = has_shared_results;
    let found = found?;
    let expected = run(&mut Reference::new(Group::solo()), family)?;
    if family == Family::Rows
        && let Err(reason) = next_tokens(backend)?
    {
        return Ok(Err(reason));
    }
    let limit = match family {
        Family::Rows
        | Family::Draws(_)
        | Family::Likely
        | Family::Experts
        | Family::State
        | Family::HeldState(_)
        | Family::Changes
        | Family::CombinedLevels
        | Family::NormedLevels
        | Family::Selection { .. }
        | Family::Pooling { .. } => 1e-4,
        // The cost of the cache's number format.
        Family::Tokens { int8: false, .. } | Family::Compression { int8: false } => 3e-3,
        Family::Tokens { int8: true, .. } | Family::Compression { int8: true } => 3e-2,
        Family::Many(AttendMany { int8, .. })
        | Family::Tiles(AttendTiles { int8, .. })
        | Family::Matrices(AttendMatrices { int8, .. })
        | Family::LatentTiles(AttendLatent { int8, .. })
        | Family::LatentMatrices(AttendLatentMatrices { int8, .. })
        | Family::Shared(AttendShared { int8, .. }) => {
            if int8 {
                3e-2
            } else {
                3e-3
            }
        }
    };
    let outcome =
        found.iter().zip(&expected).try_for_each(|(found, expected)| compare(found, expected, limit));
    match family {
        Family::Shared(form) if outcome.is_ok() => latent::same_bits(backend, form),
        _ => Ok(outcome),
    }
}

/// Results of a family's operations, each compared separately.
fn run<B: Backend>(backend: &mut B, family: Family) -> Result<Vec<Vec<f32>>, ComputeError> {
    match family {
        Family::Rows => rows(backend),
        Family::Draws(_) => draws(backend),
        Family::Likely => likely(backend),
        Family::Tokens { latent: false, int8 } => attention(backend, format(int8)),
        Family::Tokens { latent: true, int8 } => latent::run(backend, LatentShape::ODD, format(int8)),
        Family::Shared(form) => latent::shared(backend, form),
        Family::Many(form) => attend::many(backend, form),
        Family::Tiles(AttendTiles { columns, int8 }) => attend::tiles(backend, [72, columns], int8),
        Family::Matrices(AttendMatrices { columns, int8, .. }) => {
            attend::tiles(backend, [columns - UNIT, columns], int8)
        }
        Family::LatentTiles(AttendLatent { columns, int8 })
        | Family::LatentMatrices(AttendLatentMatrices { columns, int8 }) => {
            attend::latent_tiles(backend, columns, int8)
        }
        Family::Experts => route(backend),
        Family::CombinedLevels | Family::NormedLevels | Family::Selection { .. } | Family::Pooling { .. } => {
            unreachable!("they have checks of their own")
        }
        Family::State => {
            let mut results = Vec::new();
            // Several threads share the rows of a convolution's channel.
            for rule in Rule::ALL {
                results.extend(state::recurrence(backend, rule, (24, 150))?);
            }
            for kernel in [3, 7] {
                results.extend(state::gated_conv(backend, kernel)?);
            }
            Ok(results)
        }
        // Keys fill most of its space, and workgroups compute long enough to get apart.
        Family::HeldState(HeldRecurrence { rule, keys }) => state::recurrence(backend, rule, (keys - 24, 70)),
        Family::Changes => change::run(backend),
        Family::Compression { int8 } => compress::run(backend, 3, 44, int8),
    }
}

pub(super) fn format(int8: bool) -> KvFormat {
    if int8 { KvFormat::Int8 } else { KvFormat::F16 }
}

pub(super) fn filled<B: Backend>(
    backend: &mut B,
    values: &[f32],
    width: usize,
) -> Result<B::Buffer, ComputeError> {
    let mut buffer = backend.buffer(values.len() / width, width)?;
    backend.write(values, &mut buffer)?;
    Ok(buffer)
}

pub(super) fn read<B: Backend>(
    backend: &mut B,
    x: &B::Buffer,
    rows: usize,
) -> Result<Vec<f32>, ComputeError> {
    let (_, width) = backend.extent(x);
    let mut values = vec![0.0; rows * width];
    backend.read(x, 0..rows, &mut values)?;
    Ok(values)
}

fn rows<B: Backend>(backend: &mut B) -> Result<Vec<Vec<f32>>, ComputeError> {
    let (mut numbers, count, width) = (Numbers(1), 3, 330);
    let mut x = filled(backend, &numbers.take(count * width), width)?;
    let mut normed = backend.buffer(count, width)?;
    let norm = Norm { weight: backend.vector(&numbers.take(width))?, eps: 1e-5 };
    backend.rms_norm(&x, 0..count, &norm, &mut normed)?;
    backend.add(&normed, 1..count, &mut x)?;
    let mut taken = backend.buffer(2, width)?;
    backend.take_rows(&x, &[2, 0], &mut taken)?;
    let mut results = vec![read(backend, &normed, count)?, read(backend, &taken, 2)?];
    results.push(part_norms(backend, &mut numbers)?);
    results.push(columns_and_curves(backend, &x, &mut numbers)?);
    let clamped = Activation::Clamped { alpha: 1.7, limit: 0.7 };
    let limited = Activation::Limited { limit: 0.6 };
    let situ = Activation::Situ { beta: 1.5, cap: Some(0.6) };
    let plain = [Activation::Silu, Activation::Sigmoid, Activation::Gelu, Activation::ExactGelu];
    for activation in plain.into_iter().chain([clamped, limited, situ]) {
        let mut gated = backend.buffer(count, width / 2)?;
        backend.gate(&x, 0..count, activation, &mut gated)?;
        results.push(read(backend, &gated, count)?);
    }
    let mut values = numbers.take(count * width);
    (values[301], values[40], values[290]) = (f32::NAN, 0.0, 0.0);
    values[width..2 * width].iter_mut().for_each(|value| *value = value.min(0.5));
    (values[width + 37], values[width + 310]) = (2.0, 2.0);
    let x = filled(backend, &values, width)?;
    let mut largest = [Largest::NONE; 3];
    backend.read_largest(&x, &mut largest)?;
    let of = |l: &Largest| [l.column as f32, if l.value.is_nan() { 9.0 } else { l.value }];
    results.push(largest.iter().flat_map(of).collect());
    Ok(results)
}

/// Tokens chosen among many different numbers, and among equal ones: very many, or a few of each.
fn draws<B: Backend>(backend: &mut B) -> Result<Vec<Vec<f32>>, ComputeError> {
    let mut numbers = Numbers(5);
    let different: Vec<f32> = numbers.take(3 * 1700).iter().map(|x| 6.0 * x).collect();
    let equal: Vec<f32> = numbers.take(2 * 3001).iter().map(|x| (2.0 * x).round()).collect();
    let few: Vec<f32> = (0..700).map(|column| (column * 37 % 100) as f32 / 20.0).collect();
    let all = [(different, 1700), (equal, 3001), (few, 700)];
    all.iter().map(|(x, width)| chosen_outputs(backend, x, *width)).collect()
}

/// Likelihoods among many different numbers, among equal ones, and of few tokens.
fn likely<B: Backend>(backend: &mut B) -> Result<Vec<Vec<f32>>, ComputeError> {
    let mut numbers = Numbers(6);
    let different: Vec<f32> = numbers.take(3 * 1700).iter().map(|x| 6.0 * x).collect();
    let equal: Vec<f32> = numbers.take(2 * 3001).iter().map(|x| (2.0 * x).round()).collect();
    let all = [(different, 1700), (equal, 3001), (numbers.take(11), 11)];
    all.iter().map(|(x, width)| likely_outputs(backend, x, *width)).collect()
}

/// Columns that are copied between others, and curves and weights of all of them.
fn columns_and_curves<B: Backend>(
    backend: &mut B,
    x: &B::Buffer,
    numbers: &mut Numbers,
) -> Result<Vec<f32>, ComputeError> {
    let (count, width) = (3, 300);
    let mut copied = filled(backend, &numbers.take(count * width), width)?;
    backend.copy_columns((x, 7), 1..count, (&mut copied, 20..290))?;
    backend.scale(5..280, &[3.0, -2.0], 1..count, &mut copied)?;
    let values = read(backend, &copied, count)?;
    let mut results = values.clone();
    let curves = [Curve::SquaredRelu, Curve::Relu, Curve::Gelu, Curve::GeluTanh, Curve::Silu, Curve::Tanh];
    for curve in curves {
        let mut bent = filled(backend, &values, width)?;
        backend.bend(curve, 1..count, &mut bent)?;
        results.extend(read(backend, &bent, count)?);
    }
    let mut choices = filled(backend, &[4.0, 0.5, 2.0, 3.0, 9.0, 0.25], 2)?;
    backend.weigh_input(&mut choices, 1..count, &mut copied)?;
    results.extend(read(backend, &copied, count)?);
    results.extend(read(backend, &choices, count)?);
    Ok(results)
}

/// The columns of the largest of a row's parts, which no operation returns.
fn next_tokens(backend: &mut GpuBackend) -> Result<Result<(), String>, ComputeError> {
    let part = |column: u32, value: f32| [column, value.to_bits()];
    let parts = [
        [part(5, 1.0), part(70, f32::NAN), part(130, 2.0)],
        [part(9, -2.0), part(80, -1.0), part(140, -1.0)],
        [part(0, 0.5), part(90, -0.0), part(139, 0.75)],
    ];
    let parts = backend.device.filled(parts.as_flattened().as_flattened(), "a proof")?;
    let [tokens, shared] =
        [backend.device.filled(&[7; 4], "a proof")?, backend.device.filled(&[7; 13], "a proof")?];
    let search = TokenSearch { parts: 3, to: 1, ranks: 2, rank: 1, first: 1000, are_floats: false };
    let device = &mut backend.device;
    device.dispatch(&Kernel::NextTokens, &[&parts, &tokens], &search.arguments(), [3, 1, 1])?;
    let mut found = Vec::new();
    device.read(&tokens, 0..4, &mut found)?;
    if found != [7, 70, 80, 139] {
        return Ok(Err(format!("the tokens of a next step are {found:?}")));
    }
    device.dispatch(&Kernel::ShareLargest, &[&parts, &shared], &search.arguments(), [3, 1, 1])?;
    let mut own = Vec::new();
    device.read(&shared, 1..13, &mut own)?;
    let of_row = |column: f32, value: f32| [0, 0, column.to_bits(), value.to_bits()];
    // NaN comes first, and stays NaN.
    let expected = [of_row(1070.0, f32::NAN), of_row(1080.0, -1.0), of_row(1139.0, 0.75)];
    if own != expected.as_flattened() {
        return Ok(Err(format!("a rank's largest numbers are {own:?}")));
    }
    // As if they were the sum over ranks.
    let search = TokenSearch { parts: 2, are_floats: true, ..search };
    let sums = [[3.0f32, -1.0, 1070.0, f32::NAN], [4.0, -1.0, 1080.0, -1.0], [5.0, 0.5, 1139.0, 0.75]];
    let sums =
        device.filled(&sums.as_flattened().iter().map(|x| x.to_bits()).collect::<Vec<_>>(), "a proof")?;
    device.dispatch(&Kernel::NextTokens, &[&sums, &tokens], &search.arguments(), [3, 1, 1])?;
    device.read(&tokens, 0..4, &mut found)?;
    let is_right = found == [7, 1070, 4, 1139];
    Ok(if is_right { Ok(()) } else { Err(format!("the tokens of a next step of all ranks are {found:?}")) })
}

/// Rows after two norms of parts; the second norm excludes its last column.
fn part_norms<B: Backend>(backend: &mut B, numbers: &mut Numbers) -> Result<Vec<f32>, ComputeError> {
    let (count, width) = (3, 340);
    let mut x = filled(backend, &numbers.take(count * width), width)?;
    let mut norms = Vec::new();
    for (columns, counted) in [(2..290, 2..290), (290..330, 290..329)] {
        let weight = backend.vector(&numbers.take(columns.len()))?;
        norms.push(PartNorm { width: 2 * counted.len(), columns, counted, weight, eps: 1e-5 });
    }
    let mut sums = backend.buffer(count, norms.len())?;
    backend.square_sums(&norms, &x, 0..count, &mut sums)?;
    backend.norm_by_sums(&norms, &sums, 1..count, &mut x)?;
    read(backend, &x, count)
}

/// A prompt in two pieces, then a generated token of it and one of another sequence.
pub(super) fn steps() -> Vec<Step> {
    let blocks = TOKENS.div_ceil(KV_BLOCK_TOKENS) as u32 + 1;
    let mine: Vec<u32> = (0..blocks).map(|block| 2 * block).collect();
    let other = [1];
    let mut all = vec![Step::default(), Step::default(), Step::default()];
    let cut = TOKENS - 40;
    all[0].push(&vec![1; cut], 0, &mine, 0, true);
    all[1].push(&vec![1; TOKENS - cut], cut, &mine, 0, true);
    all[2].push(&[1], TOKENS, &mine, 0, true);
    all[2].push(&[1], 0, &other, 1, true);
    all
}

pub(super) fn cache_shape(format: KvFormat, cache: CacheKind) -> CacheShape {
    CacheShape { format, caches: vec![cache], blocks: 2 * TOKENS.div_ceil(KV_BLOCK_TOKENS) + 2, slots: 2 }
}

/// The last rows of a step: enough to compare, and few enough for the reference.
pub(super) fn compared_rows(step: &Step) -> Range<usize> {
    step.rows().saturating_sub(3)..step.rows()
}

/// The last rows of a result.
pub(super) fn last_rows<B: Backend>(
    backend: &mut B,
    x: &B::Buffer,
    step: &Step,
) -> Result<Vec<f32>, ComputeError> {
    let (_, width) = backend.extent(x);
    let rows = compared_rows(step);
    let mut values = vec![0.0; rows.len() * width];
    backend.read(x, rows, &mut values)?;
    Ok(values)
}

fn attention<B: Backend>(backend: &mut B, format: KvFormat) -> Result<Vec<Vec<f32>>, ComputeError> {
    let mut results = Vec::new();
    // Widths for which no family that shares keys and values has a form.
    let cases = [(16, 12, None, true), (12, 16, Some(290), false)];
    // A chunk begins inside a prompt, and scores have a cap.
    let scored = Scoring { cap: Some(0.3), chunk: Some(130), after: 0 };
    let usual = |fused| (fused, Scoring::default());
    let cases = [
        (cases[0], usual(false)),
        (cases[1], usual(true)),
        (cases[0], usual(true)),
        (cases[1], usual(false)),
        (cases[0], (false, scored)),
        (cases[0], (false, Scoring { after: 30, ..Scoring::default() })),
    ];
    for ((key_dim, value_dim, window, with_all), (fused, scoring)) in cases {
        let mut numbers = Numbers(2);
        let spec = AttentionSpec {
            key_dim,
            value_dim,
            queries_of: vec![0..2, 2..3],
            scale: 0.25,
            window,
            qk_norm: with_all.then(|| QkNorm {
                query: numbers.take(key_dim),
                key: numbers.take(key_dim),
                eps: 1e-5,
            }),
            rope: Some(0),
            sinks: with_all.then(|| vec![0.5, -0.5, 1.0]),
            temperature: with_all.then_some((0.3, 64)),
            out_column: 3,
        };
        let spec = spec.try_map(&mut |values| backend.vector(&values))?;
        let rope = Rope { inverse_frequencies: vec![1.0, 0.3, 0.1], amplitude: 1.1, interleaved: with_all };
        let mut caches = backend.caches(&cache_shape(format, spec.cache()))?;
        let (width, outputs) = (spec.qkv_width(), spec.out_column + spec.heads() * value_dim);
        for step in steps() {
            let mut qkv = filled(backend, &numbers.take(step.rows() * width), width)?;
            let mut out = filled(backend, &vec![0.0; step.rows() * outputs], outputs)?;
            let rows = 0..step.rows();
            backend.begin(&step, std::slice::from_ref(&rope))?;
            let cache = (&mut caches, 0);
            if fused {
                backend.attention(&spec, &step, rows, &mut qkv, cache, &mut out)?;
            } else {
                backend.prepare_heads(&spec, &step, rows.clone(), &mut qkv)?;
                backend.append(&spec, &step, rows.clone(), &qkv, (&mut *cache.0, 0))?;
                backend.attend_by(&spec, scoring, &step, rows, &qkv, cache, &mut out)?;
            }
            results.push(last_rows(backend, &out, &step)?);
        }
    }
    Ok(results)
}

fn route<B: Backend>(backend: &mut B) -> Result<Vec<Vec<f32>>, ComputeError> {
    let plain = RouterSpec {
        experts: 70,
        chosen: 5,
        scores: Scores::Softmax,
        correction: None,
        groups: None,
        renormalise: true,
        scale: 1.5,
        shared: SharedExpert::Gated,
    };
    let mut numbers = Numbers(4);
    let grouped = RouterSpec {
        scores: Scores::Sigmoid,
        correction: Some(numbers.take(70)),
        groups: Some(ExpertGroups { count: 7, chosen: 3, best: 2 }),
        shared: SharedExpert::Plain,
        ..plain.clone()
    };
    let rooted = RouterSpec { scores: Scores::RootSoftplus, groups: None, ..grouped.clone() };
    let mut results = Vec::new();
    for spec in [plain, grouped, rooted] {
        let spec = spec.try_map(&mut |values| backend.vector(&values))?;
        let logits: Vec<f32> = numbers.take(3 * spec.logits()).iter().map(|x| 3.0 * x).collect();
        let logits = filled(backend, &logits, spec.logits())?;
        let mut choices = backend.buffer(3, 2 * spec.choices())?;
        backend.route(&spec, &logits, 0..3, &mut choices)?;
        results.push(read(backend, &choices, 3)?);
    }
    Ok(results)
}
