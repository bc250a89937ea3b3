//! Products compared with plain arithmetic and with each other.

use super::*;

#[test]
fn products_match_plain_arithmetic_in_every_encoding() {
    let mut numbers = Random::new(1);
    let (rows, cols, batch) = (37, 256, 11);
    for encoding in encodings() {
        let stored = Stored::random(rows, cols, encoding, &mut numbers);
        let (x, bias) = (numbers.floats(batch * cols), numbers.floats(rows));
        let mut expected = Vec::new();
        for x in x.chunks(cols) {
            for (w, bias) in stored.values.chunks(cols).zip(&bias) {
                expected.push(
                    w.iter().zip(x).map(|(w, x)| f64::from(*w) * f64::from(*x)).sum::<f64>() as f32 + bias,
                );
            }
        }
        for isa in Isa::available() {
            for activations in [
                Activations::Auto,
                Activations::Bf16,
                Activations::Int16,
                Activations::Int8,
                Activations::F32,
            ] {
                let numerics = Numerics { isa, activations, prompts: batch >= MANY_ROWS };
                let limit = limit(numerics, encoding);
                let mut backend = backend(isa, 2, activations);
                let w = backend.matrix(&[stored.source(Some(bias.clone()))]).unwrap();
                let x = filled(&mut backend, &x, cols);
                let mut out = backend.buffer(batch, rows).unwrap();
                backend.linear(Plain(&x), 0..batch, &w, &mut out).unwrap();
                let error = distance(&read(&mut backend, &out), &expected);
                assert!(error < limit, "{encoding:?} on {}: {activations:?} is off by {error}", isa.name());
            }
        }
    }
}

/// Every output exists twice. The first one must be found, whichever threads compute the two.
#[test]
fn the_first_of_the_largest_outputs_is_found() {
    let mut numbers = Random::new(21);
    // Many claims; any thread may make the last ones.
    let (rows, cols, batch) = (1205, 64, 5);
    for encoding in [Encoding::Float(Float::F32), Encoding::Affine { bits: 4, group: 64, scales: Float::F16 }]
    {
        let stored = Stored::random(rows, cols, encoding, &mut numbers);
        let values = numbers.floats(batch * cols);
        for (isa, threads) in Isa::available().into_iter().flat_map(|isa| [1, 2, 5].map(|count| (isa, count)))
        {
            let mut backend = backend(isa, threads, Activations::Int16);
            let w = backend.matrix(&[stored.source(None), stored.source(None)]).unwrap();
            for batch in [batch, 1] {
                let x = filled(&mut backend, &values[..batch * cols], cols);
                let mut out = backend.buffer(batch, 2 * rows).unwrap();
                // Earlier contents of `largest` must not matter.
                let mut largest = vec![Largest { column: 7, value: 1e30 }; batch];
                let stale = filled(&mut backend, &vec![1e9; batch * cols], cols);
                backend.linear_largest(Plain(&stale), batch, &w, &mut out).unwrap();
                backend.linear_largest(Plain(&x), batch, &w, &mut out).unwrap();
                backend.read_largest(&out, &mut largest).unwrap();
                for (outputs, largest) in read(&mut backend, &out).chunks(2 * rows).zip(largest) {
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
fn the_first_of_the_largest_does_not_depend_on_the_search_order() {
    let outputs: Vec<f32> = (0..100).map(|i| [0.5, 2.0, -1.0, 2.0][i % 4]).collect();
    for isa in Isa::available() {
        let mut best = Largest::NONE;
        for first in [60, 20, 0, 40, 80] {
            // SAFETY: the instruction set was detected.
            unsafe { rows::largest_on(isa, &outputs[first..first + 20], first as u32, &mut best) };
        }
        assert_eq!(best, Largest { column: 1, value: 2.0 }, "on {}", isa.name());
    }
    let (first, second) = (Largest { column: 3, value: 2.0 }, Largest { column: 8, value: 2.0 });
    assert_eq!((first.or(second), second.or(first)), (first, first));
    assert_eq!((first.or(Largest::NONE), Largest::NONE.or(first)), (first, first));
}

#[test]
fn an_output_that_is_not_finite_is_the_largest() {
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        for (isa, at) in Isa::available().into_iter().flat_map(|isa| [0, 17, 39].map(|at| (isa, at))) {
            let mut outputs: Vec<f32> = (0..40).map(|i| i as f32).collect();
            outputs[at] = bad;
            let mut best = Largest { column: 7, value: 1e30 };
            // SAFETY: the instruction set was detected.
            unsafe { rows::largest_on(isa, &outputs, 100, &mut best) };
            assert!(best.value.is_nan(), "{bad} at {at} on {}: {best:?}", isa.name());
            // Later outputs do not hide it.
            // SAFETY: as above.
            unsafe { rows::largest_on(isa, &[3e30; 20], 0, &mut best) };
            assert!(best.value.is_nan(), "{bad} at {at} on {}: {best:?}", isa.name());
        }
    }
    let (nan, one) = (Largest { column: 3, value: f32::NAN }, Largest { column: 0, value: 1.0 });
    assert!(nan.or(one).value.is_nan() && one.or(nan).value.is_nan());
}

/// Damaged weights must not become plausible numbers when they are converted to integers.
#[test]
fn an_input_that_is_not_finite_shows_in_every_output() {
    let mut numbers = Random::new(33);
    let (rows, cols) = (48, 192);
    for encoding in [
        Encoding::Float(Float::BF16),
        Encoding::Affine { bits: 4, group: 64, scales: Float::F16 },
        Encoding::Affine { bits: 8, group: 32, scales: Float::BF16 },
    ] {
        let stored = Stored::random(rows, cols, encoding, &mut numbers);
        let good = numbers.floats(2 * cols);
        let settings =
            [Activations::Auto, Activations::Int8, Activations::Bf16, Activations::Int16, Activations::F32];
        for (isa, activations) in
            Isa::available().into_iter().flat_map(|isa| settings.map(|activations| (isa, activations)))
        {
            let mut backend = backend(isa, 2, activations);
            let w = backend.matrix(&[stored.source(None)]).unwrap();
            for bad in [f32::NAN, f32::INFINITY] {
                let mut values = good.clone();
                values[cols + 70] = bad;
                let x = filled(&mut backend, &values, cols);
                let mut out = backend.buffer(2, rows).unwrap();
                backend.linear(Plain(&x), 0..2, &w, &mut out).unwrap();
                let out = read(&mut backend, &out);
                let what = format!("{bad}, {encoding:?}, {activations:?} on {}", isa.name());
                assert!(out[..rows].iter().all(|output| output.is_finite()), "{what}: the other row");
                assert!(out[rows..].iter().all(|output| !output.is_finite()), "{what}: {:?}", &out[rows..]);
            }
        }
    }
}

#[test]
fn a_row_does_not_depend_on_the_batch() {
    let mut numbers = Random::new(2);
    let (rows, cols, batch) = (48, 192, 13);
    for encoding in [
        Encoding::Float(Float::BF16),
        Encoding::Affine { bits: 4, group: 64, scales: Float::F16 },
        Encoding::Affine { bits: 6, group: 32, scales: Float::BF16 },
    ] {
        let stored = Stored::random(rows, cols, encoding, &mut numbers);
        let values = numbers.floats(batch * cols);
        for (isa, activations) in Isa::available()
            .into_iter()
            .flat_map(|isa| [Activations::Int16, Activations::F32].map(|activations| (isa, activations)))
        {
            let mut backend = backend(isa, 3, activations);
            let w = backend.matrix(&[stored.source(None)]).unwrap();
            let all = filled(&mut backend, &values, cols);
            let mut together = backend.buffer(batch, rows).unwrap();
            backend.linear(Plain(&all), 0..batch, &w, &mut together).unwrap();
            for (x, expected) in values.chunks(cols).zip(read(&mut backend, &together).chunks(rows)) {
                let x = filled(&mut backend, x, cols);
                let mut alone = backend.buffer(1, rows).unwrap();
                backend.linear(Plain(&x), 0..1, &w, &mut alone).unwrap();
                assert_eq!(
                    read(&mut backend, &alone),
                    expected,
                    "{encoding:?}, {activations:?} on {}",
                    isa.name()
                );
            }
        }
    }
}

/// Sums within groups are exact and groups are added in a fixed order, so the bits must be equal.
#[test]
fn quantized_products_have_the_same_bits_in_any_batch_on_every_instruction_set() {
    let mut numbers = Random::new(7);
    let (rows, batch) = (37, 70);
    for encoding in encodings() {
        let PackedFormat::Affine { group, .. } = encoding.packed() else { continue };
        // More columns than a chunk of tiles; with groups of 32, the last line is half empty.
        let cols = (1088_usize.next_multiple_of(group) + group % 64).next_multiple_of(encoding.column_unit());
        let stored = Stored::random(rows, cols, encoding, &mut numbers);
        let values = numbers.floats(batch * cols);
        for activations in [Activations::Int16, Activations::Int8] {
            let mut expected = Vec::new();
            for isa in Isa::available() {
                let mut backend = backend(isa, 2, activations);
                let w = backend.matrix(&[stored.source(None)]).unwrap();
                for batch in [batch, 1, 2, 3, 4, 7, 8, 9, 12, 13, 15, 16, 33] {
                    // A step of generated tokens, because prompts may be bf16.
                    let mut step = Step::default();
                    (0..batch).for_each(|_| step.push(&[0], 0, &[0], 0, false));
                    backend.begin(&step, &[]).unwrap();
                    let x = filled(&mut backend, &values[..batch * cols], cols);
                    let mut out = backend.buffer(batch, rows).unwrap();
                    backend.linear(Plain(&x), 0..batch, &w, &mut out).unwrap();
                    let out = read(&mut backend, &out);
                    if expected.is_empty() {
                        expected = out.to_vec();
                    }
                    assert!(
                        out == expected[..batch * rows],
                        "{encoding:?}, {activations:?}, {batch} rows on {}",
                        isa.name()
                    );
                }
            }
        }
    }
}

/// Trained models have a few channels that are a hundred times as large as the rest.
#[test]
fn a_large_activation_reduces_int8_precision_in_its_own_group_only() {
    let mut numbers = Random::new(31);
    let (rows, cols, group) = (32, 512, 64);
    let stored =
        Stored::random(rows, cols, Encoding::Affine { bits: 4, group, scales: Float::F16 }, &mut numbers);
    let mut all = numbers.floats(cols);
    all[group] = 100.0;
    let (mut large, mut others) = (vec![0.0; cols], all.clone());
    large[group..2 * group].swap_with_slice(&mut others[group..2 * group]);
    for isa in Isa::available() {
        let product = |activations, x: &[f32]| {
            let mut backend = backend(isa, 1, activations);
            let w = backend.matrix(&[stored.source(None)]).unwrap();
            let x = filled(&mut backend, x, cols);
            let mut out = backend.buffer(1, rows).unwrap();
            backend.linear(Plain(&x), 0..1, &w, &mut out).unwrap();
            read(&mut backend, &out)
        };
        let (all, large) = (product(Activations::Int8, &all), product(Activations::Int8, &large));
        let rest: Vec<f32> = all.iter().zip(large).map(|(all, large)| all - large).collect();
        let error = distance(&rest, &product(Activations::F32, &others));
        assert!(error < 1e-2, "off by {error} on {}", isa.name());
    }
}

/// A few gated activations are far larger than the rest.
#[test]
fn auto_uses_two_bytes_for_gated_activations_and_one_for_the_rest() {
    let mut numbers = Random::new(33);
    let (rows, cols, batch) = (32, 256, 3);
    let stored =
        Stored::random(rows, cols, Encoding::Affine { bits: 4, group: 64, scales: Float::F16 }, &mut numbers);
    let values = numbers.floats(batch * cols);
    for isa in Isa::available() {
        let product = |activations, gated: bool| {
            let mut backend = backend(isa, 1, activations);
            let w = backend.matrix(&[stored.source(None)]).unwrap();
            let x = filled(&mut backend, &values, cols);
            let mut out = backend.buffer(batch, rows).unwrap();
            backend.linear(if gated { Gated(&x) } else { Plain(&x) }, 0..batch, &w, &mut out).unwrap();
            read(&mut backend, &out)
        };
        let [bytes, doubled] = [Activations::Int8, Activations::Int16].map(|bits| product(bits, true));
        assert_ne!(bytes, doubled, "on {}", isa.name());
        assert_eq!(product(Activations::Auto, true), doubled, "gated on {}", isa.name());
        assert_eq!(product(Activations::Auto, false), bytes, "others on {}", isa.name());
    }
}

/// Odd shapes on matrix units: unpaired rows and panels, short chunks, odd numbers of columns.
#[test]
fn bf16_products_are_right_in_any_shape() {
    let mut numbers = Random::new(8);
    let quantized = |bits, group| Encoding::Affine { bits, group, scales: Float::F16 };
    for (encoding, rows, cols) in [
        (quantized(4, 64), 300, 1088),
        (quantized(8, 32), 17, 544),
        (quantized(6, 128), 16, 128),
        (Encoding::Blocks(Block::Q6K), 300, 1280),
        (Encoding::Blocks(Block::Q3K), 17, 768),
        (Encoding::Blocks(Block::Q2K), 33, 256),
        (Encoding::Float(Float::BF16), 33, 515),
        (Encoding::Float(Float::F16), 50, 37),
    ] {
        let stored = Stored::random(rows, cols, encoding, &mut numbers);
        let values = numbers.floats(530 * cols);
        for isa in Isa::available() {
            let mut exact = backend(isa, 1, Activations::F32);
            let mut rounded = backend(isa, 3, Activations::Bf16);
            let (w, w_rounded) = (
                exact.matrix(&[stored.source(None)]).unwrap(),
                rounded.matrix(&[stored.source(None)]).unwrap(),
            );
            for batch in [9, 16, 17, 32, 33, 48, 530] {
                let x = filled(&mut exact, &values[..batch * cols], cols);
                let mut expected = exact.buffer(batch, rows).unwrap();
                exact.linear(Plain(&x), 0..batch, &w, &mut expected).unwrap();
                let mut out = rounded.buffer(batch, rows).unwrap();
                rounded.linear(Plain(&x), 0..batch, &w_rounded, &mut out).unwrap();
                let error = distance(&read(&mut rounded, &out), &read(&mut exact, &expected));
                assert!(error < 4e-3, "{encoding:?}, {batch} rows on {}: off by {error}", isa.name());
            }
        }
    }
}

/// A kernel whose operations the compiler turns into calls, as it does in closures, takes at least
/// ten times as long.
#[test]
fn no_bit_width_is_much_slower_than_four_bits() {
    let (rows, cols) = (1024, 1024);
    let mut numbers = Random::new(5);
    for isa in Isa::available() {
        for activations in [Activations::Int8, Activations::Int16, Activations::F32] {
            let mut fastest = |bits| {
                let encoding = Encoding::Affine { bits, group: 64, scales: Float::F16 };
                let mut backend = backend(isa, 1, activations);
                let w = backend
                    .matrix(&[Stored::random(rows, cols, encoding, &mut numbers).source(None)])
                    .unwrap();
                let x = filled(&mut backend, &numbers.floats(cols), cols);
                let mut out = backend.buffer(1, rows).unwrap();
                let mut once = || {
                    let start = std::time::Instant::now();
                    backend.linear(Plain(&x), 0..1, &w, &mut out).unwrap();
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

/// With more ranks than heads or channels, some ranks have no columns of a matrix.
#[test]
fn a_product_without_columns_overwrites_the_output_with_its_bias() {
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
                [1, 4, 40, 530].into_iter().zip([Activations::Bf16, Activations::Int8].into_iter().cycle())
            {
                let mut backend = backend(isa, 3, activations);
                let bias: Vec<f32> = (0..50).map(|i| i as f32).collect();
                let w = backend.matrix(&[stored(encoding).source(Some(bias.clone()))]).unwrap();
                let mut x = backend.buffer(batch, 0).unwrap();
                x.shape(batch);
                let mut out = filled(&mut backend, &vec![7.0; batch * 50], 50);
                backend.linear(Plain(&x), 0..batch, &w, &mut out).unwrap();
                assert!(
                    read(&mut backend, &out).chunks(50).all(|row| row == bias),
                    "{encoding:?}, {batch} on {}",
                    isa.name()
                );
            }
        }
    }
}

#[test]
fn several_matrices_of_different_encodings_share_one_product() {
    let mut numbers = Random::new(4);
    let kinds = [
        Encoding::Affine { bits: 4, group: 64, scales: Float::F16 },
        Encoding::Affine { bits: 6, group: 32, scales: Float::F16 },
        Encoding::Float(Float::BF16),
    ];
    let parts: Vec<_> = kinds.map(|kind| Stored::random(20, 64, kind, &mut numbers)).into();
    let values = numbers.floats(2 * 64);
    let mut backend = backend(Isa::detect().unwrap(), 2, Activations::Int16);
    let x = filled(&mut backend, &values, 64);
    let sources: Vec<_> = parts.iter().map(|part| part.source(None)).collect();
    let fused = backend.matrix(&sources).unwrap();
    let mut out = backend.buffer(2, 60).unwrap();
    backend.linear(Plain(&x), 0..2, &fused, &mut out).unwrap();
    let out = read(&mut backend, &out);
    for (i, source) in sources.iter().enumerate() {
        let alone = backend.matrix(std::slice::from_ref(source)).unwrap();
        let mut expected = backend.buffer(2, 20).unwrap();
        backend.linear(Plain(&x), 0..2, &alone, &mut expected).unwrap();
        for row in 0..2 {
            assert_eq!(out[row * 60 + i * 20..][..20], read(&mut backend, &expected)[row * 20..][..20]);
        }
    }
}
