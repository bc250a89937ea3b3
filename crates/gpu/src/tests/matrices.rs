//! Products by cooperative matrices. Mesa's llvmpipe has none: set `THUNDER_TEST_GPU` to the number
//! of a device that has.

use std::time::Instant;

use thunder_collectives::Group;
use thunder_compute::{
    Activations, Backend as _, ComputeError, Device as _, Encoding, Float, LinearInput, MatrixSource,
    RowOrder, Strided,
};

use super::device;
use crate::format::Elements;
use crate::kernel::{Kernel, Matrices, Shape};
use crate::matrix::Matrix;
use crate::operations::matrices::RowProduct;
use crate::proof::Numbers;
use crate::{GpuBackend, GpuConfig};

/// A backend on a device with matrices. Reports a skipped test if there is none.
fn opened(test: &str, activations: Activations) -> Option<GpuBackend> {
    let found = device(test)?;
    if found.matrix_side().is_none() {
        thunder_testing::skip(test, "the device has no cooperative matrices");
        return None;
    }
    let config = GpuConfig { activations, ..GpuConfig::default() };
    Some(GpuBackend::unproved(&found, config, Group::solo()).unwrap())
}

fn matrix(backend: &mut GpuBackend, rows: usize, cols: usize, bits: u32) -> Matrix {
    quantized(backend, [rows, cols], bits, 3, None)
}

/// A matrix of random levels, which differ by the seed.
pub(super) fn quantized(
    backend: &mut GpuBackend,
    [rows, cols]: [usize; 2],
    bits: u32,
    seed: u64,
    bias: Option<Vec<f32>>,
) -> Matrix {
    let group = if cols.is_multiple_of(64) { 64 } else { 32 };
    let halves = |value: f32| half::bf16::from_f32(value).to_le_bytes().repeat(rows * cols / group);
    let weight = thunder_testing::Random::new(seed).bytes(rows * cols * bits as usize / 8);
    let (scales, offsets) = (halves(0.01), halves(-0.01 * (1 << (bits - 1)) as f32));
    let of_row = |bytes: &[u8]| bytes.len() / rows.max(1);
    let view = |bytes| Strided { bytes, stride: of_row(bytes), row_bytes: of_row(bytes) };
    let source = MatrixSource {
        rows,
        cols,
        encoding: Encoding::Affine { bits, group, scales: Float::BF16 },
        weight: view(&weight),
        scales: Some(view(&scales)),
        offsets: Some(view(&offsets)),
        row_order: RowOrder::AsStored,
        first_row: 0,
        bias,
        pages: None,
    };
    backend.matrix(&[source]).unwrap()
}

/// The product of `rows` rows. The first rows do not depend on the number of rows.
fn product(backend: &mut GpuBackend, w: &Matrix, rows: usize) -> Vec<f32> {
    let (mut x, mut out) =
        (backend.buffer(rows, w.blocks * 32).unwrap(), backend.buffer(rows, w.rows).unwrap());
    backend.write(&Numbers(3).take(rows * w.blocks * 32), &mut x).unwrap();
    backend.product(&x, 0..rows, w, &mut out).unwrap();
    let mut found = vec![0.0; rows * w.rows];
    backend.read(&out, 0..rows, &mut found).unwrap();
    found
}

pub(super) fn distance(a: &[f32], b: &[f32]) -> f32 {
    let sum = |values: &mut dyn Iterator<Item = f32>| values.map(|x| x * x).sum::<f32>();
    (sum(&mut a.iter().zip(b).map(|(a, b)| a - b)) / sum(&mut b.iter().copied())).sqrt()
}

#[test]
fn few_and_many_rows_have_the_same_bits_and_those_of_f16() {
    let test = "few_and_many_rows_have_the_same_bits_and_those_of_f16";
    let Some(mut exact) = opened(test, Activations::F32) else { return };
    let Some(mut rounded) = opened(test, Activations::Auto) else { return };
    // 17 blocks: the last step of 64 columns is half empty.
    let [of_exact, of_rounded] = [&mut exact, &mut rounded].map(|backend| matrix(backend, 300, 544, 4));
    let many = product(&mut rounded, &of_rounded, 150);
    for rows in [16, 32, 33, 129] {
        let few = product(&mut rounded, &of_rounded, rows);
        assert!(few.iter().zip(&many).all(|(a, b)| a.to_bits() == b.to_bits()), "{rows} rows");
    }
    let expected = product(&mut exact, &of_exact, 150);
    let off = distance(&many, &expected);
    assert!(off > 1e-5, "f32 activations were multiplied: off by {off}");
    assert!(off < 1e-3, "off by {off}");
    assert!(rounded.refusals().is_empty(), "{:?}", rounded.refusals());
    assert!(
        !exact.products.keys().any(|kernel| matches!(kernel, Kernel::Matrices(_))),
        "f32 activations must not be rounded"
    );
}

#[test]
fn wrong_matrices_are_refused_and_tiles_taken() {
    let test = "wrong_matrices_are_refused_and_tiles_taken";
    type Sabotage = fn(&Kernel, String) -> String;
    let wrong: Sabotage = |kernel, text| match kernel {
        Kernel::Matrices(_) => text.replace("* args.inverse", "* 1.1 * args.inverse"),
        _ => text,
    };
    let broken: Sabotage = |kernel, text| match kernel {
        Kernel::Matrices(_) => text.replace("coopMultiplyAdd", "coopMultiplyAd"),
        _ => text,
    };
    for (sabotage, why) in [(wrong, "off by"), (broken, "does not compile")] {
        let Some(mut exact) = opened(test, Activations::F32) else { return };
        let Some(mut backend) = opened(test, Activations::Auto) else { return };
        backend.device.sabotage = Some(sabotage);
        let [of_exact, of_backend] = [&mut exact, &mut backend].map(|backend| matrix(backend, 300, 544, 4));
        let (expected, found) = (product(&mut exact, &of_exact, 40), product(&mut backend, &of_backend, 40));
        assert_eq!(found, expected, "{why}");
        let refused = backend.refusals().iter().any(|it| it.contains("Large") && it.contains(why));
        assert!(refused, "{:?}", backend.refusals());
    }
}

/// TFLOP/s of a form, including the rounding of rows.
fn measure(backend: &mut GpuBackend, w: &Matrix, form: Matrices, rows: usize) -> Result<f64, ComputeError> {
    let (mut x, outputs) = (backend.buffer(rows, w.blocks * 32)?, w.rows / if form.gated { 2 } else { 1 });
    let mut out = backend.buffer(rows, outputs)?;
    backend.write(&Numbers(3).take(rows * w.blocks * 32), &mut x)?;
    out.shape(rows)?;
    let (mut best, times) = (f64::INFINITY, 8);
    for _ in 0..4 {
        backend.device.submit()?;
        backend.device.wait()?;
        let start = Instant::now();
        for _ in 0..times {
            let halves = backend.halves(&LinearInput::Plain(&x), 0..rows, w.blocks)?;
            let product =
                RowProduct { outputs, ..RowProduct::of_chunk(&w.chunks[0], w.blocks, None, 0..rows) };
            backend.record_matrices(form, &product, &halves, &out)?;
        }
        backend.device.submit()?;
        backend.device.wait()?;
        best = best.min(start.elapsed().as_secs_f64() / f64::from(times));
    }
    Ok((2 * rows * w.rows * w.blocks * 32) as f64 / best / 1e12)
}

#[test]
#[ignore = "a benchmark: THUNDER_TEST_GPU=0 with --ignored --nocapture"]
fn times_of_the_8b_shapes() {
    let Some(mut backend) = opened("times_of_the_8b_shapes", Activations::Auto) else { return };
    let Some(side) = backend.device.matrix_side else { return };
    for (lines, cols, gated) in [
        (6144, 4096, false),
        (4096, 4096, false),
        (14336, 4096, false),
        (28672, 4096, true),
        (4096, 14336, false),
    ] {
        for bits in [4, 8] {
            let w = matrix(&mut backend, lines, cols, bits);
            let format = w.chunks[0].format;
            assert_eq!(format.elements, Elements::Levels(bits));
            for shape in Shape::of_side(side) {
                let form = Matrices { format, shape, gated, pairs: false };
                let of =
                    [16, 32, 64, 128, 512, 2048].map(|rows| measure(&mut backend, &w, form, rows).unwrap());
                println!("{lines}x{cols}, {bits} bits, {shape:?}, gated {gated}: {of:.1?} TFLOP/s");
            }
        }
    }
    assert!(backend.refusals().is_empty(), "{:?}", backend.refusals());
}
