//! Packed matrices against their sources.

use super::*;

/// Repeatable bytes.
fn bytes(len: usize, seed: u64) -> Vec<u8> {
    let mut state = seed;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 56) as u8
    };
    (0..len).map(|_| next()).collect()
}

/// f16 numbers of either sign, from 0.5 to 2.
fn f16_numbers(count: usize, seed: u64) -> Vec<u8> {
    let pairs = bytes(2 * count, seed);
    pairs.as_chunks::<2>().0.iter().flat_map(|[low, high]| [*low, (high & 0x87) | 0x38]).collect()
}

fn rows_of(bytes: &[u8], rows: usize) -> Strided<'_> {
    let row_bytes = bytes.len() / rows;
    Strided { bytes, stride: row_bytes, row_bytes }
}

fn packed(source: &MatrixSource<'_>, threads: usize) -> Matrix {
    Matrix::pack(source, &mut Arena::default(), &mut Pool::new(threads, None)).expect("memory")
}

#[test]
fn the_general_path_packs_the_bytes_of_the_fast_path() {
    for bits in [2, 3, 4, 5, 6, 8] {
        for group in [32, 64, 128] {
            let (rows, cols) = (37, 256);
            let weight = bytes(rows * cols * bits as usize / 8, u64::from(bits));
            let [scales, offsets] = [1, 2].map(|seed| f16_numbers(rows * cols / group, seed));
            let source = MatrixSource {
                rows,
                cols,
                encoding: Encoding::Affine { bits, group, scales: Float::F16 },
                weight: rows_of(&weight, rows),
                scales: Some(rows_of(&scales, rows)),
                offsets: Some(rows_of(&offsets, rows)),
                bias: None,
                pages: None,
            };
            let fast = packed(&source, 1);
            let mut general = GroupPacker::new(&source).expect("groups");
            for (panel, expected) in fast.panels.chunks_exact(fast.panel_bytes()).enumerate() {
                let (mut out, mut units) = (vec![0xff; expected.len()], [0.0; LANES]);
                general.panel(panel, &mut units, &mut out);
                assert!(out == expected, "{bits} bits in groups of {group}: panel {panel}");
                assert_eq!(units, fast.units[panel * LANES..][..LANES]);
            }
        }
    }
}

/// Packed weights are as near to their values as fixed_point.rs promises.
fn check(source: &MatrixSource<'_>) {
    let matrix = packed(source, 2);
    let (mut expected, mut values) = (vec![0.0; source.cols], vec![0.0; source.cols]);
    for row in 0..source.rows {
        source.dequantize_row(row, &mut expected);
        matrix.row(row, &mut values);
        let largest = expected.iter().fold(0.0f32, |largest, x| largest.max(x.abs()));
        assert!(largest > 0.0, "the row is not empty");
        for (col, (value, expected)) in values.iter().zip(&expected).enumerate() {
            let error = (value - expected).abs() / largest;
            assert!(error < 2e-4, "{:?}, {row}, {col}: {value} for {expected}", source.encoding);
        }
    }
}

#[test]
fn mxfp4_weights_survive_packing() {
    let (rows, cols) = (21, 96);
    let weight = bytes(rows * cols / 2, 1);
    // Scales from 2^-8 to 2^-1.
    let scales: Vec<u8> = bytes(rows * cols / 32, 2).iter().map(|byte| 119 + byte % 8).collect();
    check(&MatrixSource {
        rows,
        cols,
        encoding: Encoding::Mxfp4,
        weight: rows_of(&weight, rows),
        scales: Some(rows_of(&scales, rows)),
        offsets: None,
        bias: None,
        pages: None,
    });
}

#[test]
fn q4_0_weights_survive_packing() {
    let (rows, cols) = (35, 160);
    let nibbles = bytes(rows * cols / 2, 3);
    let scales = f16_numbers(rows * cols / 32, 4);
    let blocks = scales.as_chunks::<2>().0.iter().zip(nibbles.as_chunks::<16>().0);
    let weight: Vec<u8> = blocks.flat_map(|(scale, nibbles)| scale.iter().chain(nibbles)).copied().collect();
    check(&MatrixSource {
        rows,
        cols,
        encoding: Encoding::Q4_0,
        weight: rows_of(&weight, rows),
        scales: None,
        offsets: None,
        bias: None,
        pages: None,
    });
}
