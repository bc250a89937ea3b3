//! The kernel that changes logits before a token is chosen.

use thunder_compute::RowEdits;
use thunder_compute::choice::EXCLUDED;

/// Columns of a row that a workgroup changes.
pub(crate) const EDITED: usize = 1024;

/// Words of a row at the beginning of the table.
const HEAD: usize = 4;

pub(super) fn source() -> String {
    include_str!("edit.wgsl")
        .replace("$PART", &EDITED.to_string())
        .replace("$LIMIT", super::LIMIT)
        .replace("$EXCLUDED", &EXCLUDED.to_bits().to_string())
}

/// Fills the table of rows' changes.
pub(crate) fn table_of(edits: &[RowEdits], table: &mut Vec<u32>) {
    table.clear();
    table.resize(HEAD * edits.len(), 0);
    for (row, RowEdits { tokens, allowed }) in edits.iter().enumerate() {
        let (words, first) = (table.len(), table.len() + allowed.len());
        let head = [words, allowed.len(), first, tokens.len()].map(|number| number as u32);
        table[HEAD * row..][..HEAD].copy_from_slice(&head);
        table.extend_from_slice(allowed);
        table.extend(
            tokens.iter().flat_map(|edit| [edit.token, edit.repetition.to_bits(), edit.added.to_bits()]),
        );
    }
}
