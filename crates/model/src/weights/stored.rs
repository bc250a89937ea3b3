//! A stored matrix and the windows that ranks take of it.

use std::fmt;
use std::ops::Range;

use thunder_compute::{Encoding, FilePages, MatrixSource, RowOrder, Strided};

/// A whole matrix `[rows, cols]` where it lies in a file, row-major.
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
        let window = |bytes: &'a [u8], bytes_of: &dyn Fn(usize) -> usize| {
            let stride = bytes_of(self.cols);
            let start = if rows.is_empty() { 0 } else { rows.start * stride + bytes_of(cols.start) };
            Strided { bytes: &bytes[start..], stride, row_bytes: bytes_of(cols.end) - bytes_of(cols.start) }
        };
        let numbers = |bytes| window(bytes, &|cols| self.encoding.scale_bytes(cols));
        MatrixSource {
            rows: rows.len(),
            cols: cols.len(),
            encoding: self.encoding,
            weight: window(self.weight, &|cols| self.encoding.weight_bytes(cols)),
            scales: self.scales.map(numbers),
            offsets: self.offsets.map(numbers),
            row_order: self.row_order,
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
