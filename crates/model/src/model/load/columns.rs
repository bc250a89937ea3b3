//! Matrices whose columns on a rank come from several parts of the stored matrix.

use thunder_compute::{Backend, MatrixSource, RowOrder, Strided};

use super::upload::Upload;
use crate::error::ModelError;

/// Packs windows of one matrix, with the same rows, as one matrix with the columns of all.
pub(super) fn upload_side_by_side<B: Backend>(
    windows: &[MatrixSource<'_>],
    upload: &mut Upload<'_, B>,
) -> Result<B::Matrix, ModelError> {
    let [first, ..] = windows else { return upload.matrix(windows) };
    if windows.len() == 1 {
        return upload.matrix(windows);
    }
    if first.scales.is_some() || first.offsets.is_some() {
        return Err(ModelError::Unsupported {
            field: "the order of value heads",
            value: format!("tiled, in {:?}", first.encoding),
            supported: "encodings with scales next to the elements are, as GGUF has them".into(),
        });
    }
    for window in windows {
        window.pages.into_iter().for_each(|pages| pages.need(window.weight.bytes));
    }
    let row_bytes: usize = windows.iter().map(|window| window.weight.row_bytes).sum();
    let mut bytes = Vec::with_capacity(row_bytes * first.rows);
    for row in 0..first.rows {
        windows.iter().for_each(|window| bytes.extend_from_slice(window.weight.row(row)));
    }
    for window in windows {
        window.pages.into_iter().for_each(|pages| pages.release(window.weight.bytes));
    }
    let matrix = MatrixSource {
        rows: first.rows,
        cols: windows.iter().map(|window| window.cols).sum(),
        encoding: first.encoding,
        weight: Strided { bytes: &bytes, stride: row_bytes, row_bytes },
        scales: None,
        offsets: None,
        row_order: RowOrder::AsStored,
        first_row: 0,
        bias: None,
        pages: None,
    };
    upload.converted(matrix, windows.iter().map(MatrixSource::bytes).sum())
}
