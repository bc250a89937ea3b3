//! Kernels compared with plain arithmetic, on every instruction set of this CPU.

mod attention;
mod conformance;
#[cfg(unix)]
mod experts;
mod gated;
mod products;

use half::{bf16, f16};
use proptest::prelude::*;
use thunder_collectives::Group;
use thunder_testing::Random;

use super::layout::matrix::Matrix;
use super::product::numerics::{ActivationFormat, Numerics};
use super::*;
use crate::backend::LinearInput::{self, Gated, Plain};
use crate::backend::{Backend, Device, Largest};
use crate::conformance::data;
use crate::source::{Block, Encoding, Float, MatrixSource, PackedFormat, RowOrder, Strided};
use crate::step::Step;

fn backend(isa: Isa, threads: usize, activations: Activations) -> CpuBackend {
    CpuBackend::new(&CpuConfig::new(threads, isa, activations), Group::solo())
}

fn encode(float: Float, values: &[f32]) -> Vec<u8> {
    let bytes = |x: &f32| match float {
        Float::F32 => x.to_le_bytes().to_vec(),
        Float::F16 => f16::from_f32(*x).to_le_bytes().to_vec(),
        Float::BF16 => bf16::from_f32(*x).to_le_bytes().to_vec(),
    };
    values.iter().flat_map(bytes).collect()
}

/// A stored matrix and its values as floats.
struct Stored {
    rows: usize,
    cols: usize,
    encoding: Encoding,
    weight: Vec<u8>,
    scales: Vec<u8>,
    biases: Vec<u8>,
    values: Vec<f32>,
}

impl Stored {
    fn random(rows: usize, cols: usize, encoding: Encoding, numbers: &mut Random) -> Self {
        let mut stored =
            Self { rows, cols, encoding, weight: vec![], scales: vec![], biases: vec![], values: vec![] };
        match encoding {
            Encoding::Float(float) => {
                stored.weight = encode(float, &numbers.floats(rows * cols));
                stored.values = vec![0.0; rows * cols];
                float.decode(&stored.weight, &mut stored.values);
            }
            Encoding::Affine { bits, group, scales } => {
                let count = rows * cols / group;
                stored.scales = encode(scales, &numbers.floats(count));
                stored.biases = encode(scales, &numbers.floats(count));
                let (mut s, mut b) = (vec![0.0; count], vec![0.0; count]);
                scales.decode(&stored.scales, &mut s);
                scales.decode(&stored.biases, &mut b);
                stored.weight = vec![0; rows * cols * bits as usize / 8];
                for i in 0..rows * cols {
                    let q = numbers.bits() & ((1 << bits) - 1);
                    for bit in 0..bits as usize {
                        let at = i * bits as usize + bit;
                        stored.weight[at / 8] |= (((q >> bit) & 1) as u8) << (at % 8);
                    }
                    stored.values.push(q as f32 * s[i / group] + b[i / group]);
                }
            }
            Encoding::Blocks(block) => {
                let mut random = data::Random(numbers.bits());
                stored.weight = data::random_blocks(block, rows * cols, &mut random);
                let mut values = vec![0.0; rows * cols];
                for (row, values) in values.chunks_exact_mut(cols).enumerate() {
                    stored.source(None).dequantize_row(row, values);
                }
                stored.values = values;
            }
            other => unreachable!("{other:?} is tested where it is packed"),
        }
        stored
    }

    fn view<'a>(&self, bytes: &'a [u8]) -> Strided<'a> {
        let row_bytes = bytes.len() / self.rows;
        Strided { bytes, stride: row_bytes, row_bytes }
    }

    fn source(&self, bias: Option<Vec<f32>>) -> MatrixSource<'_> {
        let quantized = matches!(self.encoding, Encoding::Affine { .. });
        MatrixSource {
            rows: self.rows,
            cols: self.cols,
            encoding: self.encoding,
            weight: self.view(&self.weight),
            scales: quantized.then(|| self.view(&self.scales)),
            offsets: quantized.then(|| self.view(&self.biases)),
            row_order: RowOrder::AsStored,
            first_row: 0,
            bias,
            pages: None,
        }
    }
}

fn encodings() -> Vec<Encoding> {
    let mut all: Vec<_> = [Float::F32, Float::F16, Float::BF16].map(Encoding::Float).to_vec();
    for (i, bits) in [2, 3, 4, 5, 6, 8].into_iter().enumerate() {
        for (j, group) in [32, 64, 128].into_iter().enumerate() {
            let scales = [Float::F32, Float::F16, Float::BF16][(i + j) % 3];
            all.push(Encoding::Affine { bits, group, scales });
        }
    }
    // Groups of 16, which share blocks.
    all.extend([Block::Q2K, Block::Q3K, Block::Q6K].map(Encoding::Blocks));
    // Codes in place of levels.
    all.push(Encoding::Blocks(Block::Mxfp4));
    all
}

/// All rows of a buffer.
fn read(backend: &mut CpuBackend, x: &Buffer) -> Vec<f32> {
    let mut rows = vec![0.0; x.rows * x.width];
    backend.read(x, 0..x.rows, &mut rows).unwrap();
    rows
}

fn filled(backend: &mut CpuBackend, values: &[f32], width: usize) -> Buffer {
    let mut buffer = backend.buffer(values.len() / width, width).unwrap();
    backend.write(values, &mut buffer).unwrap();
    buffer
}

/// ‖a − b‖ / ‖b‖.
fn distance(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    let norm = |v: &mut dyn Iterator<Item = f32>| v.map(|x| x * x).sum::<f32>().sqrt();
    norm(&mut a.iter().zip(b).map(|(a, b)| a - b)) / norm(&mut b.iter().copied()).max(1e-30)
}

/// Maximum relative error of a product.
fn limit(numerics: Numerics, encoding: Encoding) -> f32 {
    match (numerics.format(encoding.packed()), encoding, numerics.activations) {
        (ActivationFormat::Bf16, ..) => 3e-3,
        (_, Encoding::Float(_), _) => 2e-6,
        (_, _, Activations::Auto | Activations::Int8) => 2e-2,
        // The rounding of weights to integers.
        _ => 3e-4,
    }
}

#[test]
fn embedding_returns_the_stored_rows() {
    let mut numbers = Random::new(3);
    for encoding in encodings() {
        let (cols, limit) = match encoding {
            Encoding::Float(_) => (37, 0.0), // not a multiple of any block
            _ => (384_usize.next_multiple_of(encoding.column_unit()), 3e-4),
        };
        let stored = Stored::random(21, cols, encoding, &mut numbers);
        let mut backend = backend(Isa::Portable, 2, Activations::Int16);
        let table = backend.matrix(&[stored.source(None)]).unwrap();
        let mut out = backend.buffer(4, cols).unwrap();
        backend.embed(&table, &[100, 120, 99, 121], 100, 1.0, &mut out).unwrap();
        let out = read(&mut backend, &out);
        assert!(distance(&out[..cols], &stored.values[..cols]) <= limit, "{encoding:?}");
        assert!(distance(&out[cols..2 * cols], &stored.values[20 * cols..]) <= limit, "{encoding:?}");
        assert!(out[2 * cols..].iter().all(|x| *x == 0.0), "rows of other ranks' ids are zero");
    }
}

#[test]
fn packing_gives_the_same_bytes_with_and_without_avx512() {
    let mut numbers = Random::new(5);
    for encoding in encodings() {
        let stored = Stored::random(21, 256, encoding, &mut numbers);
        let source = stored.source(None);
        let packed = Matrix::pack(&[&source], true, &mut Arena::default(), &mut Pool::new(1, None)).unwrap();
        let matrix = &packed[0];
        let mut lines = Vec::new();
        let mut packer = layout::pack::Packer::new(&source, 0, matrix.headers, &mut lines);
        for (panel, expected) in matrix.panels.chunks_exact(matrix.panel_bytes()).enumerate() {
            let (mut out, mut units) = (vec![0; expected.len()], [0.0; simd::LANES]);
            packer.panel_inlined::<false>(panel, &mut out, Some(&mut units));
            assert!(out == expected, "{encoding:?}: panel {panel}");
            if !matches!(encoding, Encoding::Float(_)) {
                assert_eq!(units, matrix.units[panel * simd::LANES..][..simd::LANES]);
            }
        }
    }
}

#[test]
fn exponential_is_accurate() {
    fn check<S: simd::Simd>() {
        for i in -8600..200 {
            let x = i as f32 * 0.01;
            let mut out = [0.0; simd::LANES];
            // SAFETY: called for detected instruction sets only; the array has 16 lanes.
            unsafe { S::store(out.as_mut_ptr(), S::exp(S::splat(x))) };
            let expected = f64::from(x).exp() as f32;
            assert!((out[0] - expected).abs() <= 4e-7 * expected, "e^{x} is {expected}, not {}", out[0]);
        }
        // A sigmoid takes powers that f32 cannot represent.
        for x in [88.8, 89.0, 100.0, 303.0, 1e3, 1e6] {
            let mut out = [0.0; simd::LANES];
            // SAFETY: as above.
            unsafe { S::store(out.as_mut_ptr(), S::exp(S::splat(x))) };
            assert_eq!(out[0], f32::INFINITY, "e^{x}");
        }
    }
    check::<simd::portable::Portable>();
    #[cfg(target_arch = "x86_64")]
    if simd::avx2::Avx2::<false>::detected() {
        check::<simd::avx2::Avx2<false>>();
    }
    #[cfg(target_arch = "x86_64")]
    if simd::avx512::Avx512::detected() {
        check::<simd::avx512::Avx512>();
    }
    #[cfg(target_arch = "aarch64")]
    check::<simd::neon::Neon<false>>();
}

proptest! {
    /// A norm that is fused into a product with the identity matrix.
    #[test]
    fn norm_matches_plain_arithmetic(len in 1usize..200, seed in 0u64..1000) {
        let mut numbers = Random::new(seed);
        let (x, w) = (numbers.floats(len), numbers.floats(len));
        let rms = (x.iter().map(|x| x * x).sum::<f32>() / len as f32 + 1e-5).sqrt();
        let normed: Vec<f32> = x.iter().zip(&w).map(|(x, w)| x / rms * w).collect();
        let unit: Vec<f32> = (0..len * len).map(|i| f32::from(u8::from(i % (len + 1) == 0))).collect();
        let stored = Stored {
            rows: len,
            cols: len,
            encoding: Encoding::Float(Float::F32),
            weight: encode(Float::F32, &unit),
            scales: vec![],
            biases: vec![],
            values: unit,
        };
        for isa in Isa::available() {
            let mut backend = backend(isa, 1, Activations::Int16);
            let unit = backend.matrix(&[stored.source(None)]).unwrap();
            let input = filled(&mut backend, &x, len);
            let weight = backend.vector(&w).unwrap();
            let mut out = backend.buffer(1, len).unwrap();
            backend.linear(LinearInput::Normed { x: &input, weight: &weight, eps: 1e-5 }, 0..1, &unit, &mut out).unwrap();
            prop_assert!(distance(&read(&mut backend, &out), &normed) < 1e-5);
        }
    }
}
