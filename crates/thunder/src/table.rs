//! Tables for people.

use comfy_table::{CellAlignment, Table, presets};

/// A table with these headings; numbers stand to the right from the second column on.
pub fn new(headings: &[&str]) -> Table {
    let mut table = Table::new();
    table.load_style(presets::UTF8_BORDERS_ONLY).set_header(headings);
    for column in table.column_iter_mut().skip(1) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table
}
