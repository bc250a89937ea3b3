//! Packed matrices against their sources.

use half::f16;

use super::*;
use crate::conformance::data::{Random, Stored, random_blocks};
use crate::conformance::products::encodings;
use crate::source::{Block, FilePages, GroupScale, RowOrder};

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
    packed_with(source, threads, true)
}

/// `short`: headers may be other than whole.
fn packed_with(source: &MatrixSource<'_>, threads: usize, short: bool) -> Matrix {
    let mut pool = Pool::new(threads, None);
    let mut all = Matrix::pack(&[source], short, &mut Arena::default(), &mut pool).expect("memory");
    all.remove(0)
}

/// A file's blocks.
fn of_blocks(block: Block, weight: &[u8], [rows, cols]: [usize; 2], row_order: RowOrder) -> MatrixSource<'_> {
    MatrixSource {
        rows,
        cols,
        encoding: Encoding::Blocks(block),
        weight: rows_of(weight, rows),
        scales: None,
        offsets: None,
        row_order,
        first_row: 0,
        bias: None,
        pages: None,
    }
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
                row_order: RowOrder::AsStored,
                first_row: 0,
                bias: None,
                pages: None,
            };
            let fast = packed(&source, 1);
            let mut general = GroupPacker::new(&source, 0, Headers::default(), None).expect("groups");
            for (panel, expected) in fast.panels.chunks_exact(fast.panel_bytes()).enumerate() {
                let (mut out, mut units) = (vec![0xff; expected.len()], [0.0; LANES]);
                general.panel::<false>(panel, &mut units, &mut out);
                assert!(out == expected, "{bits} bits in groups of {group}: panel {panel}");
                assert_eq!(units, fast.units[panel * LANES..][..LANES]);
            }
        }
    }
}

/// Words that become lines give the bytes that levels give, in whole matrices, and in windows that
/// begin and end within words and panels.
#[test]
fn words_are_packed_as_their_levels() {
    let mut with_words = 0;
    for encoding in encodings() {
        if matches!(encoding.packed(), PackedFormat::Float(_)) {
            continue;
        }
        let stored = Stored::random([300, 512], encoding, false, &mut Random(11));
        let paired =
            MatrixSource { row_order: RowOrder::Paired { width: 20 }, ..stored.part(0..300, 0..512) };
        let windows = [0..300, 0..288, 8..296, 64..192, 5..163, 299..300];
        let windows = windows.into_iter().map(|rows| stored.part(rows, 0..512));
        for source in windows.chain([stored.part(16..160, 256..512), paired]) {
            let headers = Headers::of(encoding, source.cols);
            let found = packed(&source, 2);
            let mut lines = Vec::new();
            with_words += usize::from(words::Words::new(&source, &mut lines).is_some());
            let mut levels = GroupPacker::new(&source, 0, headers, None).expect("groups");
            for (panel, found_bytes) in found.panels.chunks_exact(found.panel_bytes()).enumerate() {
                let (mut out, mut units) = (vec![0xff; found_bytes.len()], [0.0; LANES]);
                levels.panel::<false>(panel, &mut units, &mut out);
                assert!(out == found_bytes, "{encoding:?}, {} rows: panel {panel}", source.rows);
                assert_eq!(units, found.units[panel * LANES..][..LANES], "{encoding:?}");
            }
        }
    }
    assert!(with_words > 40, "{with_words} sources are read by words");
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
        row_order: RowOrder::AsStored,
        first_row: 0,
        bias: None,
        pages: None,
    });
}

/// Rows of a window may begin inside of a block of scales, or of a word that rows share.
#[test]
fn windows_of_every_encoding_hold_the_values_of_the_whole() {
    for encoding in encodings() {
        let unit = encoding.column_unit();
        let cols = (3 * unit).next_multiple_of(128);
        let stored = Stored::random([72, cols], encoding, false, &mut Random(5));
        let (mut whole, mut part) = (vec![0.0; cols], vec![0.0; unit]);
        let window = stored.part(19..70, unit..2 * unit);
        for row in 0..window.rows {
            stored.source().dequantize_row(19 + row, &mut whole);
            window.dequantize_row(row, &mut part);
            assert_eq!(part, whole[unit..2 * unit], "{encoding:?}: row {row}");
        }
        check(&stored.part(19..70, 0..cols));
    }
}

/// Biases that are implied are those that would be stored, and take no memory.
#[test]
fn implied_biases_are_those_that_are_stored() {
    let has_implied = |encoding: &Encoding| encoding.is_symmetric() && !encoding.has_factors();
    for encoding in encodings().into_iter().filter(has_implied) {
        let cols = (2 * encoding.column_unit()).next_multiple_of(256);
        let stored = Stored::random([21, cols], encoding, false, &mut Random(8));
        let (source, mut levels) = (stored.source(), vec![0; cols]);
        let PackedFormat::Affine { bits, group } = encoding.packed() else { panic!("levels") };
        let mut scales = vec![GroupScale::default(); cols / group];
        source.groups().expect("groups").row(0, &mut levels, &mut scales);
        let zero = (1u32 << (bits - 1)) as f32;
        assert!(scales.iter().all(|scale| scale.offset == -zero * scale.scale), "{encoding:?}");
        let (implied, whole) = (packed_with(&source, 1, true), packed_with(&source, 1, false));
        assert!(implied.headers.implied, "{encoding:?}");
        assert!(!whole.headers.implied && whole.units == implied.units, "{encoding:?}");
        let spared = implied.panel_count() * cols / group * LANES * 2;
        assert_eq!(implied.bytes() + spared, whole.bytes(), "{encoding:?}");
        let (mut expected, mut found) = (vec![0.0; cols], vec![0.0; cols]);
        for row in 0..21 {
            implied.row(row, &mut found);
            whole.row(row, &mut expected);
            assert_eq!(found, expected, "{encoding:?}: row {row}");
        }
    }
}

/// Headers with factors take less memory, and weights have the bits that a file means.
#[test]
fn factors_keep_the_weights_of_files() {
    let (rows, cols) = (21, 512);
    for (block, bits) in [
        (Block::Q2K, 3.125),
        (Block::Q3K, 3.625),
        (Block::Q4K, 4.625),
        (Block::Q5K, 5.625),
        (Block::Q6K, 6.625),
    ] {
        let mut weight = random_blocks(block, rows * cols, &mut Random(3));
        // A block whose factors no number uses, and one whose factors are a ten-thousandth.
        let (unused, least) = weight.split_at_mut(block.bytes());
        match block {
            Block::Q4K => unused[4..16].fill(0),
            Block::Q6K => unused[192..208].fill(0),
            _ => {}
        }
        if matches!(block, Block::Q4K | Block::Q6K) {
            let at = if block == Block::Q4K { 0 } else { 208 };
            unused[at..][..2].copy_from_slice(&f16::MAX.to_le_bytes());
            least[at..][..2].copy_from_slice(&f16::from_f32(1e-6).to_le_bytes());
        }
        let source = of_blocks(block, &weight, [rows, cols], RowOrder::AsStored);
        let (matrix, whole) = (packed(&source, 1), packed_with(&source, 1, false));
        assert!(matrix.headers.factored && !whole.headers.factored, "{block:?}");
        let panels = matrix.panel_count() * LANES * cols;
        assert_eq!(matrix.panels.len() as f64 * 8.0 / panels as f64, bits, "{block:?}");
        let (mut expected, mut found) = (vec![0.0; cols], vec![0.0; cols]);
        for row in 0..rows {
            source.dequantize_row(row, &mut expected);
            matrix.row(row, &mut found);
            assert_eq!(found, expected, "{block:?}: row {row}");
        }
    }
}

/// A file that is copied, not mapped.
struct Copied;

impl FilePages for Copied {
    fn read(&self, bytes: &[u8], to: &mut [u8]) {
        to.copy_from_slice(bytes);
    }
    fn need(&self, _bytes: &[u8]) {}
    fn release(&self, _bytes: &[u8]) {}
}

/// Rows are so long that a piece is one panel. Windows of few columns are read row by row.
#[test]
fn pieces_of_a_file_are_packed_as_the_whole() {
    const COLS: usize = 16_384;
    for encoding in encodings() {
        let stored = Stored::random([40, COLS], encoding, false, &mut Random(9));
        let unit = encoding.column_unit();
        let paired =
            MatrixSource { row_order: RowOrder::Paired { width: 20 }, ..stored.part(0..40, 0..COLS) };
        for mapped in [stored.part(5..40, 0..COLS), stored.part(5..40, unit..2 * unit), paired] {
            let copied = MatrixSource { pages: Some(&Copied), ..mapped.clone() };
            let (whole, pieces) = (packed(&mapped, 1), packed(&copied, 2));
            assert!(whole.panels[..] == pieces.panels[..], "{encoding:?}");
            assert_eq!(whole.units, pieces.units, "{encoding:?}");
        }
    }
}

#[test]
fn blocks_of_every_type_survive_packing_in_both_row_orders() {
    let (rows, cols) = (36, 512);
    for block in Block::ALL {
        let weight = random_blocks(block, rows * cols, &mut Random(3));
        for row_order in [RowOrder::AsStored, RowOrder::Paired { width: 12 }] {
            check(&of_blocks(block, &weight, [rows, cols], row_order));
        }
    }
}

#[test]
fn rows_in_pairs_are_packed_in_order() {
    let (rows, cols) = (32, 5);
    let numbers: Vec<f32> = (0..rows * cols).map(|index| index as f32).collect();
    let weight: Vec<u8> = numbers.iter().flat_map(|x| x.to_le_bytes()).collect();
    let affine = f16_numbers(rows * 2, 7);
    let levels = bytes(rows * 32, 8);
    for (encoding, cols, weight, scales) in [
        (Encoding::Float(Float::F32), cols, &weight, None),
        (Encoding::Affine { bits: 4, group: 32, scales: Float::F16 }, 64, &levels, Some(&affine)),
    ] {
        let source = |row_order| MatrixSource {
            rows,
            cols,
            encoding,
            weight: rows_of(weight, rows),
            scales: scales.map(|scales| rows_of(scales, rows)),
            offsets: scales.map(|scales| rows_of(scales, rows)),
            row_order,
            first_row: 0,
            bias: None,
            pages: None,
        };
        let plain = packed(&source(RowOrder::AsStored), 1);
        let ordered = packed(&source(RowOrder::Paired { width: 8 }), 2);
        let (mut expected, mut found) = (vec![0.0; cols], vec![0.0; cols]);
        for head in 0..4 {
            for (output, stored) in [0, 2, 4, 6, 1, 3, 5, 7].into_iter().enumerate() {
                plain.row(8 * head + stored, &mut expected);
                ordered.row(8 * head + output, &mut found);
                assert_eq!(found, expected, "{encoding:?}: output {output} of head {head}");
            }
        }
        let runs = RowOrder::Runs { run: 3, stride: 8, skip: 1 };
        let ordered = packed(&MatrixSource { rows: 11, ..source(runs) }, 2);
        // The window begins with the second row of the first run.
        for (output, stored) in [0, 1, 7, 8, 9, 15, 16, 17, 23, 24, 25].into_iter().enumerate() {
            plain.row(stored, &mut expected);
            ordered.row(output, &mut found);
            assert_eq!(found, expected, "{encoding:?}: output {output} of runs");
        }
    }
}
