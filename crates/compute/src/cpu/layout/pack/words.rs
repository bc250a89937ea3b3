//! Files whose words hold levels or codes of 4 or 8 bits: the words become lines of a panel,
//! without a byte for each level in between.

use super::affine::{pack_block32, two_steps};
use super::transpose::Rows;
use crate::cpu::layout::matrix::{BLOCK32, E2M1, STEP_BYTES, block_lines};
use crate::cpu::layout::region::grown;
use crate::cpu::simd::LANES;
use crate::cpu::simd::widest::{Work, widest};
use crate::source::{Encoding, IntegerLayout, MatrixSource, RowOrder, Strided};

/// Panels whose lines are read together where the file stores columns: a cache line of AWQ's words,
/// and neighbouring cache lines of GPTQ's.
pub(super) const PANELS: usize = 8;
/// Rows in a word of AWQ.
const WORD_ROWS: usize = 8;
/// Bytes of a word.
const WORD_BYTES: usize = 4;

/// A line of a panel.
pub(in crate::cpu) type Line = [u8; STEP_BYTES];

/// The words of a matrix.
pub(super) struct Words<'a> {
    weight: Strided<'a>,
    layout: Layout,
    cols: usize,
    bits: usize,
    /// Replaces rows that a panel lacks.
    zeros: Vec<u8>,
    /// Lines of [`PANELS`] panels, where the file stores columns.
    lines: &'a mut Vec<Line>,
    /// Which panels: this many times [`PANELS`] come before.
    turned: Option<usize>,
}

/// What a word holds.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Layout {
    /// Columns of a row; a row's words follow each other.
    Rows,
    /// Columns of a row; words of the same columns follow each other.
    Columns,
    /// Rows of a column, in AWQ's order.
    Across,
}

/// True if a matrix of this encoding is read [`PANELS`] panels at a time.
pub(super) const fn takes_panels(encoding: Encoding) -> bool {
    matches!(encoding, Encoding::Integers { layout: IntegerLayout::Gptq { .. } | IntegerLayout::Awq, .. })
}

impl<'a> Words<'a> {
    /// `None` if levels must be read one by one. `lines` is memory.
    pub fn new(source: &MatrixSource<'a>, lines: &'a mut Vec<Line>) -> Option<Self> {
        let (layout, bits) = match source.encoding {
            Encoding::Mxfp4 | Encoding::Nvfp4 => (Layout::Rows, 4),
            Encoding::Integers { layout, bits, .. } => match layout {
                IntegerLayout::Rows | IntegerLayout::RowsWithZeros => (Layout::Rows, bits as usize),
                IntegerLayout::Gptq { .. } => (Layout::Columns, bits as usize),
                IntegerLayout::Awq => (Layout::Across, bits as usize),
            },
            _ => return None,
        };
        let fits = match layout {
            Layout::Rows => true,
            Layout::Columns => source.row_order == RowOrder::AsStored,
            // Words begin and end with the window.
            Layout::Across => {
                let whole =
                    source.first_row.is_multiple_of(WORD_ROWS) && source.rows.is_multiple_of(WORD_ROWS);
                whole && source.row_order == RowOrder::AsStored
            }
        };
        let zeros = match layout {
            Layout::Rows if !source.rows.is_multiple_of(LANES) => vec![0; source.weight.row_bytes],
            _ => Vec::new(),
        };
        let (weight, cols) = (source.weight, source.cols);
        fits.then_some(Self { weight, layout, cols, bits, zeros, lines, turned: None })
    }

    /// A panel whose lanes have these stored rows.
    pub fn panel(&mut self, panel: usize, lanes: [Option<usize>; LANES]) -> Panel<'_> {
        match self.layout {
            Layout::Rows => {
                let row =
                    |lane: Option<usize>| lane.map_or(&*self.zeros, |row| self.weight.row(row)).as_ptr();
                Panel::Rows(lanes.map(row))
            }
            Layout::Columns | Layout::Across => {
                let block = panel / PANELS;
                if self.turned != Some(block) {
                    widest(Turn(self, block));
                    self.turned = Some(block);
                }
                let lines = self.lines_of_panel();
                Panel::Lines(&self.lines[panel % PANELS * lines..][..lines])
            }
        }
    }

    const fn lines_of_panel(&self) -> usize {
        self.cols * self.bits * LANES / 8 / STEP_BYTES
    }
}

/// The words of one panel.
pub(super) enum Panel<'a> {
    Rows(Rows),
    Lines(&'a [Line]),
}

impl Panel<'_> {
    /// Writes the lines of 32 columns from `column`.
    ///
    /// # Safety
    /// The matrix has these columns, with levels or codes of `BITS`; the CPU has AVX-512 if `WIDE`.
    #[inline(always)]
    pub unsafe fn block<const WIDE: bool, const BITS: u32>(&self, column: usize, lines: &mut [Line]) {
        let bits = if BITS == E2M1 { 4 } else { BITS };
        match self {
            // SAFETY: the caller's.
            Self::Rows(rows) => unsafe {
                let at = column * bits as usize / 8;
                match bits {
                    4 => pack_block32::<WIDE, 4>(rows, at, lines),
                    _ => pack_block32::<WIDE, 8>(rows, at, lines),
                }
            },
            Self::Lines(all) => {
                lines.copy_from_slice(&all[column / BLOCK32 * block_lines(bits)..][..block_lines(bits)]);
            }
        }
        if BITS == E2M1 {
            lines.iter_mut().for_each(without_negative_zeros);
        }
    }
}

/// Code 8, which is zero with a sign, becomes code 0.
#[inline(always)]
fn without_negative_zeros(line: &mut Line) {
    const SIZES: u32 = 0x7777_7777;
    for word in line.as_chunks_mut::<WORD_BYTES>().0 {
        let codes = u32::from_le_bytes(*word);
        // The sum has bit 3 of codes whose size is not 0.
        *word = (codes & (SIZES | ((codes & SIZES) + SIZES))).to_le_bytes();
    }
}

/// Reads the lines of a block of panels.
struct Turn<'a, 'b>(&'a mut Words<'b>, usize);

impl Work for Turn<'_, '_> {
    #[inline(always)]
    fn run(self) {
        let Self(words, block) = self;
        let of_panel = words.lines_of_panel();
        let lines = grown(words.lines, PANELS * of_panel, [0; STEP_BYTES]);
        match words.layout {
            Layout::Rows => unreachable!("rows need not be turned"),
            Layout::Columns => {
                for index in 0..of_panel {
                    let stored = words.weight.row(index).get(block * PANELS * STEP_BYTES..);
                    let stored = stored.unwrap_or_default();
                    for (panel, line) in stored.chunks(STEP_BYTES).take(PANELS).enumerate() {
                        let to = &mut lines[panel * of_panel + index];
                        match line.first_chunk() {
                            Some(line) => *to = *line,
                            // Lanes beyond the matrix are 0.
                            None => {
                                *to = [0; STEP_BYTES];
                                to[..line.len()].copy_from_slice(line);
                            }
                        }
                        if words.bits == 4 {
                            for word in to.as_chunks_mut::<WORD_BYTES>().0 {
                                *word = two_steps(u32::from_le_bytes(*word)).to_le_bytes();
                            }
                        }
                    }
                }
            }
            Layout::Across => {
                for index in 0..of_panel {
                    let columns: [[u64; PANELS]; 8] = std::array::from_fn(|column| {
                        let stored = words.weight.row(8 * index + column).get(block * STEP_BYTES..);
                        eight_words(stored.unwrap_or_default())
                    });
                    turn_across(&columns, |panel, line| lines[panel * of_panel + index] = line);
                }
            }
        }
    }
}

/// A cache line as words of 64 bits; what the window lacks is 0.
#[inline(always)]
fn eight_words(stored: &[u8]) -> [u64; PANELS] {
    let words = |line: &Line| -> [u64; PANELS] {
        std::array::from_fn(|word| u64::from_le_bytes(std::array::from_fn(|byte| line[8 * word + byte])))
    };
    match stored.first_chunk() {
        // Without a copy of any length, which would be a call.
        Some(whole) => words(whole),
        None => {
            let mut line = [0; STEP_BYTES];
            line[..stored.len()].copy_from_slice(stored);
            words(&line)
        }
    }
}

/// Lines of 8 columns of AWQ. A column has 64 bits of each panel. Byte `b` of each half has rows
/// `2 * b` and `2 * b + 1` in AWQ's order: 0, 2, 4, 6, 1, 3, 5, 7.
#[inline(always)]
fn turn_across(columns: &[[u64; PANELS]; 8], mut put: impl FnMut(usize, Line)) {
    /// The lower nibble of each byte.
    const LOW: u64 = 0x0f0f_0f0f_0f0f_0f0f;
    // The first and second row of each byte; a byte has a column and the fourth after it.
    let mut pairs = [[[0; PANELS]; 4]; 2];
    for column in 0..4 {
        for panel in 0..PANELS {
            let (first, second) = (columns[column][panel], columns[column + 4][panel]);
            pairs[0][column][panel] = (first & LOW) | (second & LOW) << 4;
            pairs[1][column][panel] = (first >> 4 & LOW) | (second & !LOW);
        }
    }
    // Four bytes by four: columns become the bytes of a word, rows the words.
    for rows in &mut pairs {
        for (distance, mask) in [(2, 0x0000_ffff_0000_ffff), (1, 0x00ff_00ff_00ff_00ff)] {
            for row in (0..4).filter(|row| row & distance == 0) {
                let (firsts, seconds) = rows.split_at_mut(row + distance);
                for (first, second) in firsts[row].iter_mut().zip(&mut seconds[0]) {
                    let exchanged = ((*first >> (8 * distance)) ^ *second) & mask;
                    *second ^= exchanged;
                    *first ^= exchanged << (8 * distance);
                }
            }
        }
    }
    for panel in 0..PANELS {
        let mut line = [[0; WORD_BYTES]; LANES];
        for (odd, rows) in pairs.iter().enumerate() {
            for (byte, words) in rows.iter().enumerate() {
                let lane = across_row(2 * byte + odd);
                let [lower, upper] = [words[panel] as u32, (words[panel] >> 32) as u32];
                (line[lane], line[lane + WORD_ROWS]) = (lower.to_le_bytes(), upper.to_le_bytes());
            }
        }
        let mut bytes = [0; STEP_BYTES];
        bytes.copy_from_slice(line.as_flattened());
        put(panel, bytes);
    }
}

/// The row at a place of AWQ's order.
const fn across_row(place: usize) -> usize {
    2 * (place % 4) + place / 4
}
