//! The kernels against plain arithmetic, on every instruction set of this CPU.

mod attention;
mod gated;

use half::{bf16, f16};
use proptest::prelude::*;
use thunder_collectives::Group;

use super::product::{Form, Manner};
use super::*;
use crate::backend::LinearInput::Plain;
use crate::source::{Encoding, Float, Strided};

/// A repeatable sequence of numbers in −1..1.
struct Numbers(u64);

impl Numbers {
    fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        self.0 >> 33
    }
    fn next(&mut self) -> f32 {
        self.next_u64() as f32 / (1u64 << 30) as f32 - 1.0
    }
    fn vec(&mut self, len: usize) -> Vec<f32> {
        (0..len).map(|_| self.next()).collect()
    }
}

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

/// A stored matrix and the values that it stands for.
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
    fn random(rows: usize, cols: usize, encoding: Encoding, numbers: &mut Numbers) -> Self {
        let mut stored =
            Self { rows, cols, encoding, weight: vec![], scales: vec![], biases: vec![], values: vec![] };
        match encoding {
            Encoding::Float(float) => {
                stored.weight = encode(float, &numbers.vec(rows * cols));
                stored.values = vec![0.0; rows * cols];
                float.decode(&stored.weight, &mut stored.values);
            }
            Encoding::Affine { bits, group, scales } => {
                let count = rows * cols / group;
                stored.scales = encode(scales, &numbers.vec(count));
                stored.biases = encode(scales, &numbers.vec(count));
                let (mut s, mut b) = (vec![0.0; count], vec![0.0; count]);
                scales.decode(&stored.scales, &mut s);
                scales.decode(&stored.biases, &mut b);
                stored.weight = vec![0; rows * cols * bits as usize / 8];
                for i in 0..rows * cols {
                    let q = numbers.next_u64() & ((1 << bits) - 1);
                    for bit in 0..bits as usize {
                        let at = i * bits as usize + bit;
                        stored.weight[at / 8] |= (((q >> bit) & 1) as u8) << (at % 8);
                    }
                    stored.values.push(q as f32 * s[i / group] + b[i / group]);
                }
            }
        }
        stored
    }

    fn view<'a>(&self, bytes: &'a [u8]) -> Strided<'a> {
        let row_bytes = bytes.len() / self.rows;
        Strided { bytes, stride: row_bytes, row_bytes }
    }

    fn source(&self, bias: Option<Vec<f32>>) -> MatrixSource<'_> {
        let scales = match self.encoding {
            Encoding::Float(_) => None,
            Encoding::Affine { .. } => Some((self.view(&self.scales), self.view(&self.biases))),
        };
        MatrixSource {
            rows: self.rows,
            cols: self.cols,
            encoding: self.encoding,
            weight: self.view(&self.weight),
            scales,
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
    all
}

fn filled(backend: &mut CpuBackend, values: &[f32], width: usize) -> Buffer {
    let mut buffer = backend.buffer(values.len() / width, width).unwrap();
    backend.write(values, &mut buffer);
    buffer
}

/// ‖a − b‖ / ‖b‖.
fn distance(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    let norm = |v: &mut dyn Iterator<Item = f32>| v.map(|x| x * x).sum::<f32>().sqrt();
    norm(&mut a.iter().zip(b).map(|(a, b)| a - b)) / norm(&mut b.iter().copied()).max(1e-30)
}

/// How far a product may be off.
fn limit(manner: Manner, encoding: Encoding) -> f32 {
    match (manner.form(encoding), encoding, manner.activations) {
        (Form::Halves, ..) => 3e-3,
        (_, Encoding::Float(_), _) => 2e-6,
        (_, _, Activations::Int8) => 2e-2,
        // What weights lose as integers.
        _ => 3e-4,
    }
}

#[test]
fn products_match_plain_arithmetic_in_every_encoding() {
    let mut numbers = Numbers(1);
    let (rows, cols, batch) = (37, 256, 11);
    for encoding in encodings() {
        let stored = Stored::random(rows, cols, encoding, &mut numbers);
        let (x, bias) = (numbers.vec(batch * cols), numbers.vec(rows));
        let mut expected = Vec::new();
        for x in x.chunks(cols) {
            for (w, bias) in stored.values.chunks(cols).zip(&bias) {
                expected.push(
                    w.iter().zip(x).map(|(w, x)| f64::from(*w) * f64::from(*x)).sum::<f64>() as f32 + bias,
                );
            }
        }
        for isa in Isa::available() {
            for activations in [Activations::Auto, Activations::Int16, Activations::Int8, Activations::F32] {
                let manner = Manner { isa, activations, prompts: batch >= MANY_ROWS };
                let limit = limit(manner, encoding);
                let mut backend = backend(isa, 2, activations);
                let w = backend.matrix(&[stored.source(Some(bias.clone()))]).unwrap();
                let x = filled(&mut backend, &x, cols);
                let mut out = backend.buffer(batch, rows).unwrap();
                backend.linear(Plain(&x), 0..batch, &w, &mut out);
                let error = distance(backend.read(&out), &expected);
                assert!(error < limit, "{encoding:?} on {}: {activations:?} is off by {error}", isa.name());
            }
        }
    }
}

/// Every output is there twice: the first counts, whichever threads made the two.
#[test]
fn the_first_of_the_largest_outputs_is_found() {
    let mut numbers = Numbers(21);
    // Many pieces, the last of which are anybody's.
    let (rows, cols, batch) = (1205, 64, 5);
    for encoding in [Encoding::Float(Float::F32), Encoding::Affine { bits: 4, group: 64, scales: Float::F16 }]
    {
        let stored = Stored::random(rows, cols, encoding, &mut numbers);
        let values = numbers.vec(batch * cols);
        for (isa, threads) in Isa::available().into_iter().flat_map(|isa| [1, 2, 5].map(|count| (isa, count)))
        {
            let mut backend = backend(isa, threads, Activations::Int16);
            let w = backend.matrix(&[stored.source(None), stored.source(None)]).unwrap();
            for batch in [batch, 1] {
                let x = filled(&mut backend, &values[..batch * cols], cols);
                let mut out = backend.buffer(batch, 2 * rows).unwrap();
                // What was found before must not count.
                let mut largest = vec![Largest { column: 7, value: 1e30 }; batch];
                backend.linear_largest(Plain(&x), &w, &mut out, &mut largest);
                for (outputs, largest) in backend.read(&out).chunks(2 * rows).zip(largest) {
                    let value = outputs.iter().copied().fold(f32::NEG_INFINITY, f32::max);
                    let column = outputs.iter().position(|output| *output == value).unwrap() as u32;
                    assert!((column as usize) < rows);
                    let expected = Largest { column, value };
                    assert_eq!(largest, expected, "{encoding:?}, {threads} threads on {}", isa.name());
                }
            }
        }
    }
}

#[test]
fn the_first_of_the_largest_does_not_depend_on_who_looked_first() {
    let outputs: Vec<f32> = (0..100).map(|i| [0.5, 2.0, -1.0, 2.0][i % 4]).collect();
    for isa in Isa::available() {
        let mut best = Largest::NONE;
        for first in [60, 20, 0, 40, 80] {
            // SAFETY: the instruction set is there.
            unsafe { isa::largest(isa, &outputs[first..first + 20], first as u32, &mut best) };
        }
        assert_eq!(best, Largest { column: 1, value: 2.0 }, "on {}", isa.name());
    }
    let (first, second) = (Largest { column: 3, value: 2.0 }, Largest { column: 8, value: 2.0 });
    assert_eq!((first.or(second), second.or(first)), (first, first));
    assert_eq!((first.or(Largest::NONE), Largest::NONE.or(first)), (first, first));
}

#[test]
fn a_row_does_not_depend_on_the_batch() {
    let mut numbers = Numbers(2);
    let (rows, cols, batch) = (48, 192, 13);
    for encoding in [
        Encoding::Float(Float::BF16),
        Encoding::Affine { bits: 4, group: 64, scales: Float::F16 },
        Encoding::Affine { bits: 6, group: 32, scales: Float::BF16 },
    ] {
        let stored = Stored::random(rows, cols, encoding, &mut numbers);
        let values = numbers.vec(batch * cols);
        for (isa, activations) in Isa::available()
            .into_iter()
            .flat_map(|isa| [Activations::Int16, Activations::F32].map(|activations| (isa, activations)))
        {
            let mut backend = backend(isa, 3, activations);
            let w = backend.matrix(&[stored.source(None)]).unwrap();
            let all = filled(&mut backend, &values, cols);
            let mut together = backend.buffer(batch, rows).unwrap();
            backend.linear(Plain(&all), 0..batch, &w, &mut together);
            for (x, expected) in values.chunks(cols).zip(backend.read(&together).to_vec().chunks(rows)) {
                let x = filled(&mut backend, x, cols);
                let mut alone = backend.buffer(1, rows).unwrap();
                backend.linear(Plain(&x), 0..1, &w, &mut alone);
                assert_eq!(backend.read(&alone), expected, "{encoding:?}, {activations:?} on {}", isa.name());
            }
        }
    }
}

/// Sums within groups are exact, and groups are added in one order, so nothing may change a bit of them.
#[test]
fn quantized_products_have_the_same_bits_in_any_batch_on_every_instruction_set() {
    let mut numbers = Numbers(7);
    let (rows, batch) = (37, 70);
    for encoding in encodings() {
        let Encoding::Affine { group, .. } = encoding else { continue };
        // More than a chunk of tiles, and with groups of 32 a block that is half empty.
        let cols = 1088_usize.next_multiple_of(group) + group % 64;
        let stored = Stored::random(rows, cols, encoding, &mut numbers);
        let values = numbers.vec(batch * cols);
        for activations in [Activations::Int16, Activations::Int8] {
            let mut expected = Vec::new();
            for isa in Isa::available() {
                let mut backend = backend(isa, 2, activations);
                let w = backend.matrix(&[stored.source(None)]).unwrap();
                for batch in [batch, 1, 2, 3, 4, 7, 8, 9, 12, 16, 33] {
                    // A step that decodes: prompts may be bf16.
                    let mut step = Step::default();
                    (0..batch).for_each(|_| step.push(&[0], 0, &[0], false));
                    backend.begin(&step, &[]);
                    let x = filled(&mut backend, &values[..batch * cols], cols);
                    let mut out = backend.buffer(batch, rows).unwrap();
                    backend.linear(Plain(&x), 0..batch, &w, &mut out);
                    let out = backend.read(&out);
                    if expected.is_empty() {
                        expected = out.to_vec();
                    }
                    assert!(
                        out == &expected[..batch * rows],
                        "{encoding:?}, {activations:?}, {batch} rows on {}",
                        isa.name()
                    );
                }
            }
        }
    }
}

/// Trained models have a few channels that are a hundred times as large as the others.
#[test]
fn a_large_activation_costs_bytes_their_precision_in_its_own_group_only() {
    let mut numbers = Numbers(31);
    let (rows, cols, group) = (32, 512, 64);
    let stored =
        Stored::random(rows, cols, Encoding::Affine { bits: 4, group, scales: Float::F16 }, &mut numbers);
    let mut all = numbers.vec(cols);
    all[group] = 100.0;
    let (mut large, mut others) = (vec![0.0; cols], all.clone());
    large[group..2 * group].swap_with_slice(&mut others[group..2 * group]);
    for isa in Isa::available() {
        let product = |activations, x: &[f32]| {
            let mut backend = backend(isa, 1, activations);
            let w = backend.matrix(&[stored.source(None)]).unwrap();
            let x = filled(&mut backend, x, cols);
            let mut out = backend.buffer(1, rows).unwrap();
            backend.linear(Plain(&x), 0..1, &w, &mut out);
            backend.read(&out).to_vec()
        };
        let (all, large) = (product(Activations::Int8, &all), product(Activations::Int8, &large));
        let rest: Vec<f32> = all.iter().zip(large).map(|(all, large)| all - large).collect();
        let error = distance(&rest, &product(Activations::F32, &others));
        assert!(error < 1e-2, "off by {error} on {}", isa.name());
    }
}

/// Odd shapes on matrix units: rows and panels without a partner, chunks that end early, columns that are no multiple of anything.
#[test]
fn products_of_halves_are_right_in_any_shape() {
    let mut numbers = Numbers(8);
    let quantized = |bits, group| Encoding::Affine { bits, group, scales: Float::F16 };
    for (encoding, rows, cols) in [
        (quantized(4, 64), 300, 1088),
        (quantized(8, 32), 17, 544),
        (quantized(6, 128), 16, 128),
        (Encoding::Float(Float::BF16), 33, 515),
        (Encoding::Float(Float::F16), 50, 37),
    ] {
        let stored = Stored::random(rows, cols, encoding, &mut numbers);
        let values = numbers.vec(530 * cols);
        for isa in Isa::available() {
            let mut exact = backend(isa, 1, Activations::F32);
            let mut halved = backend(isa, 3, Activations::Auto);
            let (w, w_halved) = (
                exact.matrix(&[stored.source(None)]).unwrap(),
                halved.matrix(&[stored.source(None)]).unwrap(),
            );
            for batch in [9, 16, 17, 32, 33, 48, 530] {
                let x = filled(&mut exact, &values[..batch * cols], cols);
                let mut expected = exact.buffer(batch, rows).unwrap();
                exact.linear(Plain(&x), 0..batch, &w, &mut expected);
                let mut out = halved.buffer(batch, rows).unwrap();
                halved.linear(Plain(&x), 0..batch, &w_halved, &mut out);
                let error = distance(halved.read(&out), exact.read(&expected));
                assert!(error < 4e-3, "{encoding:?}, {batch} rows on {}: off by {error}", isa.name());
            }
        }
    }
}

/// Where the compiler makes calls of a kernel's operations, as it does in closures, that takes ten times as long and more.
#[test]
fn weights_of_all_bits_are_multiplied_about_equally_fast() {
    let (rows, cols) = (1024, 1024);
    let mut numbers = Numbers(5);
    for isa in Isa::available() {
        for activations in [Activations::Int8, Activations::Int16, Activations::F32] {
            let mut fastest = |bits| {
                let encoding = Encoding::Affine { bits, group: 64, scales: Float::F16 };
                let mut backend = backend(isa, 1, activations);
                let w = backend
                    .matrix(&[Stored::random(rows, cols, encoding, &mut numbers).source(None)])
                    .unwrap();
                let x = filled(&mut backend, &numbers.vec(cols), cols);
                let mut out = backend.buffer(1, rows).unwrap();
                let mut once = || {
                    let start = std::time::Instant::now();
                    backend.linear(Plain(&x), 0..1, &w, &mut out);
                    start.elapsed()
                };
                (0..30).map(|_| once()).min().unwrap_or_default()
            };
            let usual = fastest(4);
            for bits in [2, 3, 5, 6, 8] {
                let time = fastest(bits);
                assert!(
                    time < usual * 5,
                    "{bits} bits take {time:?} and 4 bits {usual:?}: {isa:?}, {activations:?}"
                );
            }
        }
    }
}

/// With more ranks than heads or channels, some have no columns of a matrix whose products are summed.
#[test]
fn a_product_without_columns_is_its_bias_whatever_was_there() {
    let stored = |encoding| Stored {
        rows: 50,
        cols: 0,
        encoding,
        weight: vec![],
        scales: vec![],
        biases: vec![],
        values: vec![],
    };
    for encoding in
        [Encoding::Affine { bits: 4, group: 64, scales: Float::F16 }, Encoding::Float(Float::BF16)]
    {
        for isa in Isa::available() {
            for (batch, activations) in
                [1, 4, 40, 530].into_iter().zip([Activations::Auto, Activations::Int8].into_iter().cycle())
            {
                let mut backend = backend(isa, 3, activations);
                let bias: Vec<f32> = (0..50).map(|i| i as f32).collect();
                let w = backend.matrix(&[stored(encoding).source(Some(bias.clone()))]).unwrap();
                let mut x = backend.buffer(batch, 0).unwrap();
                x.shape(batch);
                let mut out = filled(&mut backend, &vec![7.0; batch * 50], 50);
                backend.linear(Plain(&x), 0..batch, &w, &mut out);
                assert!(
                    backend.read(&out).chunks(50).all(|row| row == bias),
                    "{encoding:?}, {batch} on {}",
                    isa.name()
                );
            }
        }
    }
}

#[test]
fn embedding_returns_the_stored_rows() {
    let mut numbers = Numbers(3);
    for encoding in encodings() {
        let (cols, limit) = match encoding {
            Encoding::Float(_) => (37, 0.0), // no whole number of any block
            Encoding::Affine { .. } => (384, 3e-4),
        };
        let stored = Stored::random(21, cols, encoding, &mut numbers);
        let mut backend = backend(Isa::Portable, 2, Activations::Int16);
        let table = backend.matrix(&[stored.source(None)]).unwrap();
        let mut out = backend.buffer(4, cols).unwrap();
        backend.embed(&table, &[100, 120, 99, 121], 100, 1.0, &mut out);
        let out = backend.read(&out);
        assert!(distance(&out[..cols], &stored.values[..cols]) <= limit, "{encoding:?}");
        assert!(distance(&out[cols..2 * cols], &stored.values[20 * cols..]) <= limit, "{encoding:?}");
        assert!(out[2 * cols..].iter().all(|x| *x == 0.0), "ids of other ranks are zero");
    }
}

#[test]
fn packing_gives_the_same_bytes_with_any_vectors() {
    let mut numbers = Numbers(5);
    for encoding in encodings() {
        let stored = Stored::random(21, 256, encoding, &mut numbers);
        let source = stored.source(None);
        let matrix = Matrix::pack(&source, &mut Arena::default(), &mut Pool::new(1, None)).unwrap();
        let mut packer = pack::Packer::new(&source);
        for (panel, expected) in matrix.panels.chunks_exact(matrix.panel_bytes()).enumerate() {
            let (mut out, mut units) = (vec![0; expected.len()], [0.0; simd::LANES]);
            packer.panel_inlined(panel, &mut out, Some(&mut units));
            assert!(out == expected, "{encoding:?}: panel {panel}");
            if let Encoding::Affine { .. } = encoding {
                assert_eq!(units, matrix.units[panel * simd::LANES..][..simd::LANES]);
            }
        }
    }
}

#[test]
fn several_matrices_of_different_encodings_share_one_product() {
    let mut numbers = Numbers(4);
    let kinds = [
        Encoding::Affine { bits: 4, group: 64, scales: Float::F16 },
        Encoding::Affine { bits: 6, group: 32, scales: Float::F16 },
        Encoding::Float(Float::BF16),
    ];
    let parts: Vec<_> = kinds.map(|kind| Stored::random(20, 64, kind, &mut numbers)).into();
    let values = numbers.vec(2 * 64);
    let mut backend = backend(Isa::detect().unwrap(), 2, Activations::Int16);
    let x = filled(&mut backend, &values, 64);
    let sources: Vec<_> = parts.iter().map(|part| part.source(None)).collect();
    let fused = backend.matrix(&sources).unwrap();
    let mut out = backend.buffer(2, 60).unwrap();
    backend.linear(Plain(&x), 0..2, &fused, &mut out);
    let out = backend.read(&out).to_vec();
    for (i, source) in sources.iter().enumerate() {
        let alone = backend.matrix(std::slice::from_ref(source)).unwrap();
        let mut expected = backend.buffer(2, 20).unwrap();
        backend.linear(Plain(&x), 0..2, &alone, &mut expected);
        for row in 0..2 {
            assert_eq!(out[row * 60 + i * 20..][..20], backend.read(&expected)[row * 20..][..20]);
        }
    }
}

#[test]
fn exponential_is_accurate() {
    fn check<S: simd::Simd>() {
        for i in -8600..200 {
            let x = i as f32 * 0.01;
            let mut out = [0.0; simd::LANES];
            // SAFETY: called for detected sets only; the array has 16 lanes.
            unsafe { S::store(out.as_mut_ptr(), S::exp(S::splat(x))) };
            let expected = f64::from(x).exp() as f32;
            assert!((out[0] - expected).abs() <= 4e-7 * expected, "e^{x} is {expected}, not {}", out[0]);
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
    /// Norms on their way into a product with a unit matrix.
    #[test]
    fn norm_matches_plain_arithmetic(len in 1usize..200, seed in 0u64..1000) {
        let mut numbers = Numbers(seed);
        let (x, w) = (numbers.vec(len), numbers.vec(len));
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
            let weight = backend.vector(&w);
            let mut out = backend.buffer(1, len).unwrap();
            backend.linear(LinearInput::Normed { x: &input, weight: &weight, eps: 1e-5 }, 0..1, &unit, &mut out);
            prop_assert!(distance(backend.read(&out), &normed) < 1e-5);
        }
    }
}
