//! Weights where they lie in a file, described so that a backend can read a rank's rows and
//! columns.
//!
//! A file format is an [`Encoding`] with a [`GroupReader`] of its own: see `source/mxfp4.rs`. A
//! type of GGUF is a few lines in `source/blocks`.

mod affine;
pub(crate) mod blocks;
pub(crate) mod e4m3;
mod encoding;
mod extent;
mod float;
mod groups;
mod integers;
pub(crate) mod mxfp4;
mod nvfp4;

pub use blocks::Block;
pub(crate) use encoding::Table;
pub use encoding::{Encoding, Fp8Scales, PackedFormat};
pub use extent::{Extent, MatrixWindow};
pub use float::Float;
pub use groups::{GroupReader, GroupScale};
pub use integers::IntegerLayout;

/// Rows that are further apart are read one by one: a call takes as long as copying this much.
const GAP_BYTES: usize = 4 << 10;

/// Rows of bytes at a constant distance: a window of a row-major tensor in a file.
#[derive(Debug, Clone, Copy)]
pub struct Strided<'a> {
    /// From the first row of the window to its last.
    pub bytes: &'a [u8],
    /// Bytes from the start of one row to the start of the next.
    pub stride: usize,
    /// Bytes of a row in the window.
    pub row_bytes: usize,
}

impl<'a> Strided<'a> {
    /// All bytes from the first of these rows to the last, with the columns outside of the window
    /// between them.
    pub fn span(&self, rows: std::ops::Range<usize>) -> &'a [u8] {
        if rows.is_empty() || self.row_bytes == 0 {
            return &[];
        }
        &self.bytes[rows.start * self.stride..(rows.end - 1) * self.stride + self.row_bytes]
    }

    /// Copies rows of a mapped file to `buffer`, which grows if it is too short: a view whose first
    /// row is `rows.start`.
    pub fn read<'b>(
        &self,
        rows: std::ops::Range<usize>,
        pages: &dyn FilePages,
        buffer: &'b mut Vec<u8>,
    ) -> Strided<'b> {
        let row_bytes = self.row_bytes;
        let span = self.span(rows.clone());
        let is_apart = self.stride.saturating_sub(row_bytes) > GAP_BYTES;
        let (stride, len) =
            if is_apart { (row_bytes, rows.len() * row_bytes) } else { (self.stride, span.len()) };
        if buffer.len() < len {
            buffer.resize(len, 0);
        }
        let bytes = &mut buffer[..len];
        if is_apart {
            let rows = rows.zip(bytes.chunks_exact_mut(row_bytes.max(1)));
            rows.for_each(|(row, to)| pages.read(self.row(row), to));
        } else if len > 0 {
            pages.read(span, bytes);
        }
        Strided { bytes, stride, row_bytes }
    }

    /// The bytes of a row.
    ///
    /// # Panics
    /// When the row lies outside of `bytes`.
    pub fn row(&self, row: usize) -> &'a [u8] {
        &self.bytes[row * self.stride..][..self.row_bytes]
    }
}

/// The window of one stored matrix that a rank takes, `[rows, cols]`.
#[derive(Clone)]
pub struct MatrixSource<'a> {
    /// Output features.
    pub rows: usize,
    /// Input features; a multiple of the encoding's column unit.
    pub cols: usize,
    /// How the elements are stored.
    pub encoding: Encoding,
    /// The elements.
    pub weight: Strided<'a>,
    /// Scales of the groups, for encodings that store them apart.
    pub scales: Option<Strided<'a>>,
    /// Offsets of the groups, for encodings that store them apart.
    pub offsets: Option<Strided<'a>>,
    /// The order of the rows in `weight`, `scales` and `offsets`.
    pub row_order: RowOrder,
    /// Rows of the whole matrix before the window. Counts for encodings in which rows share scales
    /// or words.
    pub first_row: usize,
    /// Added to the output, one for each row, in the order of the outputs.
    pub bias: Option<Vec<f32>>,
    /// The file's pages, if the bytes are a mapped file's.
    pub pages: Option<&'a dyn FilePages>,
}

/// The order of a matrix's rows in a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum RowOrder {
    /// As the outputs are.
    #[default]
    AsStored,
    /// In each `width` rows, the two halves take turns: output `i` is row `2 * i`, output
    /// `width / 2 + i` is row `2 * i + 1`. GGUF files store the heads of some architectures so.
    Paired {
        /// Even; divides the rows.
        width: usize,
    },
    /// In runs of `run` rows, one run in each `stride` rows: a tensor that holds several matrices,
    /// a part of each for one head after the other. The first output is row 0, `skip` rows after
    /// the start of its run.
    Runs {
        /// Rows that follow each other.
        run: usize,
        /// From the start of a run to the start of the next.
        stride: usize,
        /// Rows of the first run that come before the first output.
        skip: usize,
    },
}

impl RowOrder {
    /// Where the row of an output is stored.
    #[inline]
    pub const fn stored(self, output: usize) -> usize {
        match self {
            Self::AsStored => output,
            Self::Paired { width } => {
                let within = output % width;
                let (half, index) = (within / (width / 2), within % (width / 2));
                output - within + 2 * index + half
            }
            Self::Runs { run, stride, skip } => {
                let from_run = output + skip;
                from_run / run * stride + from_run % run - skip
            }
        }
    }

    /// The stored rows that hold these outputs, and perhaps some of their neighbours.
    pub const fn stored_range(self, outputs: &std::ops::Range<usize>) -> std::ops::Range<usize> {
        match self {
            Self::AsStored => outputs.start..outputs.end,
            Self::Paired { width } => outputs.start / width * width..outputs.end.next_multiple_of(width),
            Self::Runs { .. } if outputs.start >= outputs.end => 0..0,
            Self::Runs { .. } => self.stored(outputs.start)..self.stored(outputs.end - 1) + 1,
        }
    }
}

impl MatrixSource<'_> {
    /// Where the row of an output is stored, in `weight`, `scales` and `offsets`.
    pub const fn stored_row(&self, output: usize) -> usize {
        self.row_order.stored(output)
    }

    /// Copies stored rows of a mapped file to `buffers`, one for each tensor: a source without bias
    /// whose tensors begin with the first of these rows. For encodings whose elements have rows.
    pub(crate) fn read<'b>(
        &'b self,
        rows: &std::ops::Range<usize>,
        pages: &dyn FilePages,
        buffers: &'b mut [Vec<u8>; 3],
    ) -> MatrixSource<'b> {
        let [weight, scales, offsets] = buffers;
        let [scale_rows, offset_rows] = self.encoding.rows_together();
        let read = |part: Strided<'b>, together: usize, buffer| match together {
            1 => part.read(rows.clone(), pages, buffer),
            // Few bytes, which other threads read too.
            _ => {
                let above = (self.first_row % together + rows.start) / together;
                Strided { bytes: part.bytes.get(above * part.stride..).unwrap_or_default(), ..part }
            }
        };
        MatrixSource {
            rows: self.rows,
            cols: self.cols,
            encoding: self.encoding,
            weight: self.weight.read(rows.clone(), pages, weight),
            scales: self.scales.map(|part| read(part, scale_rows, scales)),
            offsets: self.offsets.map(|part| read(part, offset_rows, offsets)),
            row_order: self.row_order,
            first_row: self.first_row + rows.start,
            bias: None,
            pages: None,
        }
    }

    /// Bytes that are read from the file.
    pub fn bytes(&self) -> usize {
        self.encoding.bytes(self.rows, self.cols)
    }
}

/// Pages of mapped files. `bytes` is always a part of one file.
pub trait FilePages: Sync {
    /// Copies `bytes` to `to`, which is as long, without mapping their pages. For large reads by
    /// several threads: mapping and unmapping interrupts all of them.
    fn read(&self, bytes: &[u8], to: &mut [u8]);
    /// All of `bytes` will be read now.
    fn need(&self, bytes: &[u8]);
    /// `bytes` have been read and may leave memory.
    fn release(&self, bytes: &[u8]);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paired_rows_are_found() {
        let order = RowOrder::Paired { width: 6 };
        let stored: Vec<usize> = (0..12).map(|row| order.stored(row)).collect();
        assert_eq!(stored, [0, 2, 4, 1, 3, 5, 6, 8, 10, 7, 9, 11]);
        assert_eq!(order.stored_range(&(7..8)), 6..12);
        assert_eq!(RowOrder::AsStored.stored_range(&(7..8)), 7..8);
    }

    #[test]
    fn runs_of_rows_are_found() {
        let order = RowOrder::Runs { run: 3, stride: 7, skip: 0 };
        let stored: Vec<usize> = (0..8).map(|row| order.stored(row)).collect();
        assert_eq!(stored, [0, 1, 2, 7, 8, 9, 14, 15]);
        assert_eq!(order.stored_range(&(2..5)), 2..9);
        assert_eq!(order.stored_range(&(2..2)), 0..0);
        let from_the_last_of_a_run = RowOrder::Runs { run: 3, stride: 7, skip: 2 };
        let stored: Vec<usize> = (0..5).map(|row| from_the_last_of_a_run.stored(row)).collect();
        assert_eq!(stored, [0, 5, 6, 7, 12]);
    }
}
