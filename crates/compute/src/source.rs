//! Weights where they lie in a file, described so that a backend can read a rank's rows and
//! columns.
//!
//! A file format is an [`Encoding`] with a [`GroupReader`] of its own: see `source/q4_0.rs`.

mod affine;
mod encoding;
mod float;
mod groups;
mod mxfp4;
mod q4_0;

pub use encoding::{Encoding, PackedFormat};
pub use float::Float;
pub use groups::{GroupReader, GroupScale};

/// Rows of bytes at a constant distance: a window of a row-major matrix in a file.
#[derive(Debug, Clone, Copy)]
pub struct Strided<'a> {
    /// Starts with the first row of the window.
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
    /// Added to the output, one for each row.
    pub bias: Option<Vec<f32>>,
    /// The file's pages, if the bytes are a mapped file's.
    pub pages: Option<&'a dyn FilePages>,
}

impl MatrixSource<'_> {
    /// Bytes that are read from the file.
    pub fn bytes(&self) -> usize {
        self.encoding.bytes(self.rows, self.cols)
    }
}

/// Pages of mapped files. `bytes` is always a part of one file.
pub trait FilePages: Sync {
    /// All of `bytes` will be read now.
    fn need(&self, bytes: &[u8]);
    /// `bytes` have been read and may leave memory.
    fn release(&self, bytes: &[u8]);
}
