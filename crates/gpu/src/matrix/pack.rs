//! Packs rows of a file into the words of a [`Format`], on all cores.

use std::ops::Range;
use std::sync::{Mutex, PoisonError};

use half::{bf16, f16};
use thunder_compute::cpu::pool::Pool;
use thunder_compute::{Encoding, Float, GroupScale, MatrixSource, PackedFormat};

use crate::buffer::BLOCK_COLUMNS;
use crate::format::{Elements, Format, Scales};

/// Some rows of a matrix.
#[derive(Debug, Default)]
pub(super) struct Packed {
    /// `[rows][blocks][words]` for each element buffer.
    pub planes: Vec<Vec<u32>>,
    /// `[rows][groups]`.
    pub scales: Vec<GroupScale>,
    /// Upper bound of the magnitudes. Not finite if a weight is not finite.
    pub largest: f32,
}

/// Packs rows `rows` of `source` into a format with groups of this many columns.
pub(super) fn rows(
    source: &MatrixSource<'_>,
    rows: Range<usize>,
    (format, group): (Format, usize),
    pool: &mut Pool,
) -> Packed {
    if let Some(pages) = source.pages {
        spans(source, &rows).for_each(|span| pages.need(span));
    }
    let parts = Mutex::new(Vec::with_capacity(pool.threads()));
    pool.split(rows.len(), &|mine| {
        let first = rows.start + mine.start;
        let packed = some_rows(source, first..first + mine.len(), (format, group));
        parts.lock().unwrap_or_else(PoisonError::into_inner).push((first, packed));
    });
    let mut parts = parts.into_inner().unwrap_or_else(PoisonError::into_inner);
    parts.sort_by_key(|(first, _)| *first);
    if let Some(pages) = source.pages {
        // Memory that rows share is released with the last row.
        if !shares_rows(source.encoding) || rows.end == source.rows {
            spans(source, &rows).for_each(|span| pages.release(span));
        }
    }
    let mut all = Packed { planes: vec![Vec::new(); format.words().len()], ..Packed::default() };
    for (_, part) in parts {
        for (all, plane) in all.planes.iter_mut().zip(part.planes) {
            all.extend(plane);
        }
        all.scales.extend(part.scales);
        all.largest = larger(all.largest, part.largest);
    }
    all
}

/// The larger of two magnitudes. A NaN is larger than all numbers.
pub(crate) fn larger(a: f32, b: f32) -> f32 {
    f32::from_bits(a.to_bits().max(b.to_bits()))
}

/// True if rows share scales or words, so that a row has no bytes of its own.
fn shares_rows(encoding: Encoding) -> bool {
    matches!(encoding, Encoding::Integers { .. } | Encoding::Fp8 { .. })
}

/// The bytes from which rows are read.
fn spans<'a>(source: &MatrixSource<'a>, rows: &Range<usize>) -> impl Iterator<Item = &'a [u8]> {
    let stored = source.row_order.stored_range(rows);
    let shared = shares_rows(source.encoding);
    let parts = [Some(source.weight), source.scales, source.offsets];
    parts.into_iter().flatten().map(move |part| if shared { part.bytes } else { part.span(stored.clone()) })
}

fn some_rows(source: &MatrixSource<'_>, rows: Range<usize>, (format, group): (Format, usize)) -> Packed {
    match format.elements {
        Elements::Float(float) if source.encoding == Encoding::Float(float) => {
            float_rows(source, rows, format, float)
        }
        Elements::Float(_) => decoded_rows(source, rows),
        Elements::Levels(bits) => level_rows(source, rows, format, (bits, group)),
    }
}

/// Rows of any format as f32.
fn decoded_rows(source: &MatrixSource<'_>, rows: Range<usize>) -> Packed {
    let row_words = source.cols.next_multiple_of(BLOCK_COLUMNS);
    let mut row_values = vec![0.0; row_words];
    let mut words = Vec::with_capacity(rows.len() * row_words);
    for row in rows {
        source.dequantize_row(row, &mut row_values[..source.cols]);
        words.extend(row_values.iter().map(|value| value.to_bits()));
    }
    let largest = largest_of(&words, Float::F32);
    Packed { planes: vec![words], scales: Vec::new(), largest }
}

fn float_rows(source: &MatrixSource<'_>, rows: Range<usize>, format: Format, float: Float) -> Packed {
    let row_words = source.cols.div_ceil(BLOCK_COLUMNS) * format.words()[0];
    let mut words = Vec::with_capacity(rows.len() * row_words);
    for row in rows {
        let bytes = source.weight.row(source.stored_row(row));
        let (whole, rest) = bytes.as_chunks::<4>();
        let end = words.len() + row_words;
        words.extend(whole.iter().map(|word| u32::from_le_bytes(*word)));
        if let &[low, high] = rest {
            words.push(u32::from(u16::from_le_bytes([low, high])));
        }
        words.resize(end, 0);
    }
    let largest = largest_of(&words, float);
    Packed { planes: vec![words], scales: Vec::new(), largest }
}

/// The largest magnitude of packed floats.
fn largest_of(words: &[u32], float: Float) -> f32 {
    let of = |bits: fn(u32) -> u32| words.iter().fold(0, |most, word| most.max(bits(*word)));
    match float {
        Float::F32 => f32::from_bits(of(|word| word & 0x7fff_ffff)),
        Float::BF16 => f32::from_bits(of(|word| ((word << 16) & 0x7fff_0000).max(word & 0x7fff_0000))),
        Float::F16 => f16::from_bits(of(|word| (word & 0x7fff).max((word >> 16) & 0x7fff)) as u16).to_f32(),
    }
}

/// An upper bound of the magnitudes of levels with these scales.
fn largest_level(scales: &[GroupScale], bits: u32) -> f32 {
    let highest = ((1u32 << bits) - 1) as f32;
    let of = |s: &GroupScale| larger(s.offset.abs(), s.scale.mul_add(highest, s.offset).abs());
    scales.iter().map(of).fold(0.0, larger)
}

fn level_rows(
    source: &MatrixSource<'_>,
    rows: Range<usize>,
    format: Format,
    (bits, group): (u32, usize),
) -> Packed {
    let (PackedFormat::Affine { group: of_source, .. }, Some(mut reader)) =
        (source.encoding.packed(), source.groups())
    else {
        unreachable!("levels come in groups")
    };
    let blocks = source.cols.div_ceil(BLOCK_COLUMNS);
    let mut levels = vec![0u8; blocks * BLOCK_COLUMNS];
    let groups = source.cols / of_source;
    let padded_groups = (blocks * BLOCK_COLUMNS).div_ceil(group);
    let mut scales = vec![GroupScale::default(); groups];
    let mut packed = Packed {
        planes: format.words().iter().map(|words| Vec::with_capacity(rows.len() * blocks * words)).collect(),
        scales: Vec::with_capacity(rows.len() * padded_groups),
        largest: 0.0,
    };
    for row in rows {
        reader.row(source.stored_row(row), &mut levels[..source.cols], &mut scales);
        let end = packed.scales.len() + padded_groups;
        for scale in &scales {
            packed.scales.extend(std::iter::repeat_n(*scale, of_source / group));
        }
        packed.scales.resize(end, GroupScale::default());
        for block in levels.as_chunks::<BLOCK_COLUMNS>().0 {
            pack_block(block, bits, format.planes(), &mut packed.planes);
        }
    }
    packed.largest = largest_level(&packed.scales, bits);
    packed
}

/// The words of a block; [`crate::format`] has the layout.
fn pack_block(levels: &[u8; BLOCK_COLUMNS], bits: u32, planes: &[u32], out: &mut [Vec<u32>]) {
    // Signed bytes: the levels minus 128.
    let flip = if bits == 8 { 0x8080_8080 } else { 0 };
    let mut quads = [0u32; BLOCK_COLUMNS / 4];
    for (quad, levels) in quads.iter_mut().zip(levels.as_chunks::<4>().0) {
        *quad = u32::from_le_bytes(*levels) ^ flip;
    }
    let mut below = 0;
    for (&plane, out) in planes.iter().zip(out) {
        let mask = 0x0101_0101 * ((1u32 << plane) - 1);
        for quads in quads.chunks_exact(8 / plane as usize) {
            let bits_of = |(s, quad): (usize, &u32)| ((quad >> below) & mask) << (plane * s as u32);
            out.push(quads.iter().enumerate().map(bits_of).fold(0, |word, bits| word | bits));
        }
        below += plane;
    }
}

/// Scales and offsets as 16-bit floats if no number changes, otherwise as f32.
pub(super) fn scales(all: &[GroupScale]) -> (Scales, Vec<u32>) {
    let exact = |round: fn(f32) -> f32| {
        all.iter().all(|s| [s.scale, s.offset].iter().all(|x| round(*x).to_bits() == x.to_bits()))
    };
    let halves = |bits: fn(f32) -> u16| {
        all.iter().map(|s| u32::from(bits(s.scale)) | (u32::from(bits(s.offset)) << 16)).collect()
    };
    if exact(|x| bf16::from_f32(x).to_f32()) {
        return (Scales::BF16, halves(|x| bf16::from_f32(x).to_bits()));
    }
    if exact(|x| f16::from_f32(x).to_f32()) {
        return (Scales::F16, halves(|x| f16::from_f32(x).to_bits()));
    }
    (Scales::F32, all.iter().flat_map(|s| [s.scale.to_bits(), s.offset.to_bits()]).collect())
}

#[cfg(test)]
mod tests {
    use thunder_compute::{RowOrder, Strided};

    use super::*;

    /// The level that kernels read, by the definition in `kernel/decode.rs`.
    fn unpacked(planes: &[u32], packed: &[Vec<u32>], column: usize) -> u8 {
        let (quad, byte) = (column / 4, column % 4);
        let (mut level, mut below) = (0, 0);
        for (&bits, words) in planes.iter().zip(packed) {
            let per = 8 / bits as usize;
            let word = words[quad / per] >> (bits as usize * (quad % per));
            level |= (word.to_le_bytes()[byte] & ((1u32 << bits) - 1) as u8) << below;
            below += bits;
        }
        level
    }

    #[test]
    fn every_level_of_every_width_comes_back() {
        let mut random = thunder_testing::Random::new(5);
        for bits in [2, 3, 4, 5, 6, 8] {
            let format = Format { elements: Elements::Levels(bits), scales: Scales::F32, halves: false };
            let levels: [u8; 32] = std::array::from_fn(|_| random.below(1 << bits) as u8);
            let mut packed = vec![Vec::new(); format.planes().len()];
            pack_block(&levels, bits, format.planes(), &mut packed);
            let words: Vec<usize> = packed.iter().map(Vec::len).collect();
            assert_eq!(words, format.words(), "{bits} bits");
            for (column, &level) in levels.iter().enumerate() {
                let expected = if bits == 8 { level ^ 0x80 } else { level };
                assert_eq!(unpacked(format.planes(), &packed, column), expected, "{bits} bits, {column}");
            }
        }
    }

    #[test]
    fn no_weight_is_larger_than_the_bound() {
        let values = [0.5f32, -3.0, 2.0, 0.25];
        let halves = |of: fn(f32) -> u16| -> Vec<u32> {
            values.chunks(2).map(|two| u32::from(of(two[0])) | u32::from(of(two[1])) << 16).collect()
        };
        assert_eq!(largest_of(&values.map(f32::to_bits), Float::F32), 3.0);
        assert_eq!(largest_of(&halves(|x| f16::from_f32(x).to_bits()), Float::F16), 3.0);
        assert_eq!(largest_of(&halves(|x| bf16::from_f32(x).to_bits()), Float::BF16), 3.0);
        assert!(largest_of(&[f32::NEG_INFINITY.to_bits(), 0], Float::F32).is_infinite());
        let group = |scale, offset| GroupScale { scale, offset };
        assert_eq!(largest_level(&[group(0.5, -4.0), group(0.25, 1.0)], 4), 4.75);
        assert!(larger(f32::NAN, 1.0).is_nan());
    }

    #[test]
    fn scales_take_16_bits_only_if_none_changes() {
        let group = |scale, offset| GroupScale { scale, offset };
        assert_eq!(scales(&[group(0.5, -4.0)]), (Scales::BF16, vec![0xc080_3f00]));
        let of_f16 = f16::from_bits(0x1234).to_f32();
        assert_eq!(scales(&[group(of_f16, -4.0)]).0, Scales::F16);
        assert_eq!(scales(&[group(0.1, -4.0), group(0.5, 1.0)]).0, Scales::F32);
    }

    #[test]
    fn levels_and_groups_keep_their_values_in_a_wider_format() {
        let (rows, cols) = (3, 128);
        let mut random = thunder_testing::Random::new(6);
        let [weight, scales, offsets] =
            [rows * cols / 2, rows * 4, rows * 4].map(|count| random.bytes(count));
        // Exponents that are not those of infinities.
        let [scales, offsets] =
            [scales, offsets].map(|bytes| bytes.iter().map(|b| b & 0x3f).collect::<Vec<u8>>());
        let view = |bytes| -> Strided<'_> {
            let bytes: &[u8] = bytes;
            Strided { bytes, stride: bytes.len() / rows, row_bytes: bytes.len() / rows }
        };
        let source = MatrixSource {
            rows,
            cols,
            encoding: Encoding::Affine { bits: 4, group: 64, scales: Float::F16 },
            weight: view(&weight),
            scales: Some(view(&scales)),
            offsets: Some(view(&offsets)),
            row_order: RowOrder::AsStored,
            first_row: 0,
            bias: None,
            pages: None,
        };
        let mut expected = vec![0.0; cols];
        for (bits, group) in [(4, 64), (6, 32), (8, 16)] {
            let format = Format {
                elements: Elements::Levels(bits),
                scales: Scales::F32,
                halves: group < BLOCK_COLUMNS,
            };
            let packed = some_rows(&source, 0..rows, (format, group));
            assert_eq!(packed.scales.len(), rows * cols / group, "{bits} bits");
            for row in 0..rows {
                source.dequantize_row(row, &mut expected);
                for (column, expected) in expected.iter().enumerate() {
                    let block = row * cols / BLOCK_COLUMNS + column / BLOCK_COLUMNS;
                    let planes = packed.planes.iter().zip(format.words());
                    let words: Vec<Vec<u32>> =
                        planes.map(|(plane, words)| plane[block * words..][..words].to_vec()).collect();
                    let level = unpacked(format.planes(), &words, column % BLOCK_COLUMNS);
                    let level = if bits == 8 { level ^ 0x80 } else { level };
                    let scale = packed.scales[(row * cols + column) / group];
                    assert_eq!(scale.scale * f32::from(level) + scale.offset, *expected, "{bits} bits");
                }
            }
        }
        let f32s = Format { elements: Elements::Float(Float::F32), scales: Scales::None, halves: false };
        let decoded = some_rows(&source, 1..2, (f32s, BLOCK_COLUMNS));
        source.dequantize_row(1, &mut expected);
        assert_eq!(decoded.planes[0], expected.iter().map(|x| x.to_bits()).collect::<Vec<_>>());
    }
}
