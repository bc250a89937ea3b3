//! Tables as text.

use comfy_table::{CellAlignment, Table, presets};

/// A table with these headings. From the second column on, cells are right-aligned.
pub fn new(headings: &[&str]) -> Table {
    let mut table = Table::new();
    table.load_style(presets::UTF8_BORDERS_ONLY).set_header(headings);
    for column in table.column_iter_mut().skip(1) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table
}
