//! Products of several generated tokens' rows by matrices of bytes. Mesa's llvmpipe has none: set
//! `THUNDER_TEST_GPU` to the number of a device that has.

use thunder_collectives::Group;
use thunder_compute::{Activation, Activations, Backend as _, Device as _, LinearInput, Norm, Step};

use super::matrices::quantized;
use super::{backend, device};
use crate::kernel::{Batch, Kernel};
use crate::proof::{Numbers, Weights};
use crate::{GpuBackend, Matrix, Vector};

/// 70 blocks: 2 or 3 of a lane.
const COLUMNS: usize = 70 * 32;
/// More than three workgroups', and no multiple of one's.
const LINES: usize = 110;

/// A backend on a device with such matrices. Reports a skipped test if there is none.
fn opened(test: &str, activations: Activations) -> Option<GpuBackend> {
    let found = device(test)?;
    if !found.multiplies_bytes() {
        thunder_testing::skip(test, "the device has no cooperative matrices of bytes");
        return None;
    }
    Some(backend(&found, activations, Group::solo()))
}

/// What a product reads and what it does.
#[derive(Debug, Clone, Copy)]
enum Way {
    Plain,
    /// Rows of gated activations; the product is added to rows.
    Down,
    /// Gates and ups of rows on their norm.
    Gated,
}

/// The results of `rows`, a generated token of a sequence each.
fn run(backend: &mut GpuBackend, w: &Matrix, norm: &Norm<Vector>, rows: &[f32], way: Way) -> Vec<u32> {
    let count = rows.len() / COLUMNS;
    let mut step = Step::default();
    (0..count).for_each(|slot| step.push(&[0], 0, &[slot as u32], slot, false));
    let outputs = if matches!(way, Way::Gated) { LINES / 2 } else { LINES };
    let mut x = backend.buffer(count, COLUMNS).unwrap();
    let mut out = backend.buffer(count, outputs).unwrap();
    backend.write(rows, &mut x).unwrap();
    backend.write(&vec![0.25; count * outputs], &mut out).unwrap();
    backend.begin(&step, &[]).unwrap();
    match way {
        Way::Plain => backend.linear(LinearInput::Plain(&x), 0..count, w, &mut out),
        Way::Down => backend.linear_reduce_add(LinearInput::Gated(&x), 0..count, w, &mut out),
        Way::Gated => {
            let input = LinearInput::Normed { x: &x, weight: &norm.weight, eps: norm.eps };
            backend.linear_gated(input, 0..count, w, (Activation::Silu, w), &mut out)
        }
    }
    .unwrap();
    let mut found = vec![0.0; count * outputs];
    backend.read(&out, 0..count, &mut found).unwrap();
    found.iter().map(|value| value.to_bits()).collect()
}

fn batches(backend: &GpuBackend) -> Vec<(Batch, bool)> {
    let of = |(kernel, right): (&Kernel, &bool)| match kernel {
        Kernel::Batch(batch) => Some((*batch, *right)),
        _ => None,
    };
    backend.products.iter().filter_map(of).collect()
}

#[test]
fn rows_by_matrices_of_bytes_have_the_bits_that_they_have_alone() {
    let test = "rows_by_matrices_of_bytes_have_the_bits_that_they_have_alone";
    for activations in [Activations::Auto, Activations::Int8] {
        let Some(mut backend) = opened(test, activations) else { return };
        let norm = Norm { weight: backend.vector(&Numbers(5).take(COLUMNS)).unwrap(), eps: 1e-5 };
        // Levels and sums of integers are as large as they can be, and each block has its own
        // scale.
        let scale = |column: usize| 2f32.powi((column / 32 % 5) as i32 - 3);
        let signs = Numbers(4).take(40 * COLUMNS);
        let rows: Vec<f32> = signs.iter().enumerate().map(|(i, x)| x.signum() * scale(i)).collect();
        for (bits, way) in [
            (4, Way::Plain),
            (2, Way::Plain),
            (8, Way::Down),
            (5, Way::Down),
            (3, Way::Gated),
            (8, Way::Gated),
        ] {
            let w = quantized(&mut backend, [LINES, COLUMNS], bits, 7, Some(Numbers(8).take(LINES)));
            let alone: Vec<u32> =
                rows.chunks(COLUMNS).flat_map(|row| run(&mut backend, &w, &norm, row, way)).collect();
            for count in [17, 40] {
                let found = run(&mut backend, &w, &norm, &rows[..count * COLUMNS], way);
                assert!(alone.starts_with(&found), "{activations:?}, {way:?}, {bits} bits, {count} rows");
            }
        }
        // With so few lines, products of pairs always take tiles of 16 rows.
        let input = backend.gated_input();
        let w = quantized(&mut backend, [LINES, COLUMNS], 6, 7, None);
        let chunk = &w.chunks[0];
        for form in Batch::all(chunk.format, input, false) {
            assert!(backend.proves_batch(Weights { chunk, blocks: w.blocks }, form).unwrap(), "{form:?}");
        }
        let forms = batches(&backend);
        assert!(forms.len() == 8 && forms.iter().all(|(_, right)| *right), "{forms:?}");
        assert!(backend.refusals().is_empty(), "{:?}", backend.refusals());
    }
}

#[test]
fn wrong_matrices_of_bytes_are_refused_and_lanes_multiply() {
    let test = "wrong_matrices_of_bytes_are_refused_and_lanes_multiply";
    type Sabotage = fn(&Kernel, String) -> String;
    let wrong: Sabotage = |kernel, text| match kernel {
        Kernel::Batch(_) => text.replace("= of_line.x;", "= of_line.x * 1.0001;"),
        _ => text,
    };
    let broken: Sabotage = |kernel, text| match kernel {
        Kernel::Batch(_) => text.replace("coopMultiplyAdd", "coopMultiplyAd"),
        _ => text,
    };
    for (sabotage, why) in [(wrong, "when rows are alone"), (broken, "does not compile")] {
        let Some(mut backend) = opened(test, Activations::Auto) else { return };
        let norm = Norm { weight: backend.vector(&Numbers(5).take(COLUMNS)).unwrap(), eps: 1e-5 };
        let w = quantized(&mut backend, [LINES, COLUMNS], 4, 7, None);
        let rows = Numbers(4).take(20 * COLUMNS);
        let expected = run(&mut backend, &w, &norm, &rows, Way::Plain);
        let [(batch, true)] = batches(&backend)[..] else { panic!("{:?}", backend.products) };
        let Some(mut other) = opened(test, Activations::Auto) else { return };
        other.device.sabotage = Some(sabotage);
        let w = quantized(&mut other, [LINES, COLUMNS], 4, 7, None);
        assert_eq!(run(&mut other, &w, &norm, &rows, Way::Plain), expected, "{why}");
        assert_eq!(batches(&other), [(batch, false)]);
        let refused = other.refusals().iter().any(|it| it.contains("Batch") && it.contains(why));
        assert!(refused, "{:?}", other.refusals());
    }
}
