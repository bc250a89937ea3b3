//! A stored matrix, and the windows of it that ranks read.

use std::fmt;
use std::ops::Range;

use thunder_compute::{Encoding, Extent, FilePages, MatrixSource, MatrixWindow, RowOrder};

/// A whole matrix `[rows, cols]` in a file, row-major.
#[derive(Clone, Copy)]
pub struct StoredMatrix<'a> {
    /// Output features.
    pub rows: usize,
    /// Input features; a multiple of the encoding's column unit.
    pub cols: usize,
    /// How the elements are stored.
    pub encoding: Encoding,
    /// The elements.
    pub weight: &'a [u8],
    /// Scales of the groups, for encodings that store them apart.
    pub scales: Option<&'a [u8]>,
    /// Offsets of the groups, for encodings that store them apart.
    pub offsets: Option<&'a [u8]>,
    /// The order of the rows. Windows of rows hold whole units of it.
    pub row_order: RowOrder,
    /// 2 if the rows of two matrices alternate in the file, otherwise 1. Tensors begin with the
    /// first row of this matrix.
    pub rows_apart: usize,
    /// Told which pages are read, if the bytes are a mapped file's.
    pub pages: Option<&'a dyn FilePages>,
}

impl<'a> StoredMatrix<'a> {
    /// Bytes in the files, scales and offsets included.
    pub fn bytes(&self) -> u64 {
        self.encoding.bytes(self.rows, self.cols) as u64
    }

    /// These rows and columns; columns begin and end at whole column units.
    pub fn window(&self, rows: Range<usize>, cols: Range<usize>) -> MatrixSource<'a> {
        // A rank without rows may be past the last one.
        let rows = if rows.is_empty() { 0..0 } else { rows };
        let first_row = rows.start;
        let window = MatrixWindow { shape: [self.rows, self.cols], rows, cols };
        let of = |extent: Extent, tensor: &'a [u8]| {
            // Rows without columns are all at the start: a rank may have no columns of a matrix.
            let apart = if extent.bytes.is_empty() { 0 } else { self.rows_apart };
            Extent { stride: extent.stride * apart, ..extent }.of(tensor)
        };
        MatrixSource {
            rows: window.rows.len(),
            cols: window.cols.len(),
            encoding: self.encoding,
            weight: of(self.encoding.weight_extent(&window), self.weight),
            scales: self.scales.map(|scales| of(self.encoding.scale_extent(&window), scales)),
            offsets: self.offsets.map(|offsets| of(self.encoding.offset_extent(&window), offsets)),
            row_order: self.row_order,
            first_row,
            bias: None,
            pages: self.pages,
        }
    }
}

impl fmt::Debug for StoredMatrix<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { rows, cols, encoding, .. } = self;
        write!(f, "StoredMatrix {{ rows: {rows}, cols: {cols}, encoding: {encoding:?} }}")
    }
}
