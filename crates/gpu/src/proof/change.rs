//! Changes of rows that few families need.

use thunder_compute::{
    Backend, ComputeError, LayerNorm, Rope, Rounding, RouterSpec, Scores, SharedExpert, StreamSpec,
};

use super::Numbers;
use super::families::{filled, read};

/// Results of each change, for the comparison with the plain reference's.
pub(super) fn run<B: Backend>(backend: &mut B) -> Result<Vec<Vec<f32>>, ComputeError> {
    let (mut numbers, count, width) = (Numbers(19), 5, 300);
    let mut x = filled(backend, &numbers.take(count * width), width)?;
    let by = numbers.take(290);
    backend.center(&[0..270, 272..290], 1..count, &mut x)?;
    backend.shift(5, &by, 0..count, &mut x)?;
    let mut results = vec![read(backend, &x, count)?];
    let rope = Rope { inverse_frequencies: numbers.take(7), amplitude: 1.1, interleaved: false };
    backend.rotate_parts((&rope, false), &[5, 70, 900, 8], &[1, 33, 280], 1..count, &mut x)?;
    let rope = Rope { interleaved: true, ..rope };
    backend.rotate_parts((&rope, true), &[3, 2], &[100], 3..count, &mut x)?;
    results.push(read(backend, &x, count)?);
    let mut choices = filled(backend, &[0.0, 2.0, 0.25, 0.75, 1.0, 3.0, 0.5, 1.5], 4)?;
    backend.weigh_choices(&[2.0, 3.0, 4.0], 0..2, &mut choices)?;
    results.push(read(backend, &choices, 2)?);
    results.extend(streams(backend, &mut numbers)?);
    results.extend(heads(backend, &mut numbers)?);
    results.push(assigned(backend, &mut numbers)?);
    let selected = filled(backend, &[2.0, 0.0, 3.0, 1.0, 2.0, 0.0, 0.0, 0.0, 0.0], 3)?;
    let mut members = filled(backend, &[0.0; 36], 12)?;
    backend.select_members(4, &[18, 15, 2], (&selected, 0..3), &mut members)?;
    let all = read(backend, &members, 3)?;
    results.push(all.chunks(12).flat_map(|row| &row[..=(row[0] as usize).min(11)]).copied().collect());
    Ok(results)
}

/// LayerNorm, gates of heads, rounded and cleared rows. Widths are not whole groups of columns.
fn heads<B: Backend>(backend: &mut B, numbers: &mut Numbers) -> Result<Vec<Vec<f32>>, ComputeError> {
    let (count, width) = (5, 299);
    let mut x = filled(backend, &numbers.take(count * width), width)?;
    let norm = LayerNorm { weight: numbers.take(width), bias: numbers.take(width), eps: 1e-3 };
    backend.layer_norm(&norm, 1..count, &mut x)?;
    let gates: Vec<f32> = numbers.take(count * 7).iter().map(|gate| 4.0 * gate).collect();
    let gates = filled(backend, &gates, 7)?;
    backend.gate_heads(&gates, (3, 41), 2..count, &mut x)?;
    let mut results = vec![read(backend, &x, count)?];
    // Groups with numbers of very different sizes.
    let sizes = |i: usize| (2.0f32).powi((i / 16 % 19) as i32 - 12);
    let values: Vec<f32> =
        numbers.take(count * width).into_iter().enumerate().map(|(i, x)| x * sizes(i)).collect();
    for rounding in [Rounding::E4m3, Rounding::E2m1, Rounding::ScaledE2m1] {
        let mut x = filled(backend, &values, width)?;
        backend.round(rounding, 1..count, &mut x)?;
        backend.clear(2..3, &mut x)?;
        // All groups are of equal weight in the comparison.
        let rounded = read(backend, &x, count)?;
        results.push(rounded.into_iter().enumerate().map(|(i, x)| x / sizes(i)).collect());
    }
    Ok(results)
}

/// Choices of given experts.
fn assigned<B: Backend>(backend: &mut B, numbers: &mut Numbers) -> Result<Vec<f32>, ComputeError> {
    let mut results = Vec::new();
    for scores in [Scores::Softmax, Scores::RootSoftplus] {
        let spec = RouterSpec {
            experts: 70,
            chosen: 3,
            scores,
            correction: None,
            groups: None,
            renormalise: scores == Scores::RootSoftplus,
            scale: 1.5,
            shared: SharedExpert::Gated,
        };
        let logits = filled(backend, &numbers.take(3 * spec.logits()), spec.logits())?;
        let mut choices = filled(backend, &vec![0.0; 6 * spec.choices()], 2 * spec.choices())?;
        backend.route_assigned(&spec, &[69, 0, 7, 31, 64, 2], &logits, 1..3, &mut choices)?;
        results.extend(read(backend, &choices, 3)?);
    }
    Ok(results)
}

/// Several residual streams, a mix of sums, and values that are added.
fn streams<B: Backend>(backend: &mut B, numbers: &mut Numbers) -> Result<Vec<Vec<f32>>, ComputeError> {
    let (count, width, all) = (70, 40, StreamSpec::all_columns(4));
    let base = numbers.take(all);
    let spec = StreamSpec { streams: 4, scale: [0.7, 1.3, 0.9], base, iterations: 3, eps: 1e-6 };
    let mut weights = filled(backend, &numbers.take(count * all), all)?;
    let mut of_streams = filled(backend, &numbers.take(count * 4 * width), 4 * width)?;
    let result = filled(backend, &numbers.take(count * width), width)?;
    let mut out = filled(backend, &vec![0.0; count * width], width)?;
    let rows = 2..count;
    backend.weigh_streams(&spec, rows.clone(), &mut weights)?;
    backend.collapse_streams(&spec, (&weights, &of_streams), rows.clone(), &mut out)?;
    backend.expand_streams(&spec, (&weights, &result), rows.clone(), &mut of_streams)?;
    let mut results = vec![read(backend, &weights, count)?, read(backend, &out, count)?];
    results.push(read(backend, &of_streams, count)?);
    // The weights of the last stream.
    let spec = StreamSpec { base: numbers.take(4), iterations: 0, ..spec };
    let mut weights = filled(backend, &numbers.take(count * 4), 4)?;
    backend.weigh_streams(&spec, 1..count, &mut weights)?;
    results.push(read(backend, &weights, count)?);
    let before = [filled(backend, &numbers.take(count * width), width)?, out];
    let mut mixed = filled(backend, &vec![0.0; count * width], width)?;
    backend.mix(&before, &result, rows.clone(), (&numbers.take(width), 0.5), &mut mixed)?;
    results.push(read(backend, &mixed, count)?);
    let made = filled(backend, &numbers.take(count * 5 * width), 5 * width)?;
    backend.add_values((&numbers.take(4 * width), 1e-6), &made, rows, &mut of_streams)?;
    results.push(read(backend, &of_streams, count)?);
    Ok(results)
}
