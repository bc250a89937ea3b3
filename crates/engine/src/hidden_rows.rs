//! Hidden states that the layer which predicts further tokens has not read yet.

/// Number of states that are kept for a slot. If that layer is not used for this long, it reads
/// them in one pass before they are overwritten.
pub const KEPT_ROWS: usize = 64;

/// The hidden states at the last positions of each slot's sequence.
#[derive(Debug, Default)]
pub struct HiddenRows {
    width: usize,
    slots: Vec<Slot>,
}

/// States at the positions from `first` to `end`; that of a position is in row `position %
/// KEPT_ROWS`.
#[derive(Debug, Default)]
struct Slot {
    first: usize,
    end: usize,
    rows: Vec<f32>,
}

impl HiddenRows {
    /// For states of `width` numbers.
    pub fn new(width: usize) -> Self {
        Self { width, slots: Vec::new() }
    }

    /// Stores the state at a position. Those at later positions are dropped, because they were
    /// guesses.
    pub fn keep(&mut self, slot: usize, position: usize, row: &[f32]) {
        if slot >= self.slots.len() {
            self.slots.resize_with(slot + 1, Slot::default);
        }
        let slot = &mut self.slots[slot];
        if !(slot.first..=slot.end).contains(&position) {
            slot.first = position;
        }
        slot.end = position + 1;
        slot.first = slot.first.max(slot.end.saturating_sub(KEPT_ROWS));
        slot.rows.resize(KEPT_ROWS * self.width, 0.0);
        slot.rows[position % KEPT_ROWS * self.width..][..self.width].copy_from_slice(row);
    }

    /// Appends the states at `count` positions from `start` on. States that were not kept are zero.
    pub fn append_to(&self, out: &mut Vec<f32>, slot: usize, start: usize, count: usize) {
        let slot = self.slots.get(slot);
        for position in start..start + count {
            match slot.filter(|slot| (slot.first..slot.end).contains(&position)) {
                Some(slot) => {
                    out.extend_from_slice(&slot.rows[position % KEPT_ROWS * self.width..][..self.width]);
                }
                None => out.resize(out.len() + self.width, 0.0),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(rows: &HiddenRows, slot: usize, start: usize, count: usize) -> Vec<f32> {
        let mut out = Vec::new();
        rows.append_to(&mut out, slot, start, count);
        out
    }

    #[test]
    fn states_are_found_by_position_and_guesses_are_replaced() {
        let mut rows = HiddenRows::new(1);
        (10..14).for_each(|position| rows.keep(1, position, &[position as f32]));
        assert_eq!(read(&rows, 1, 11, 2), [11.0, 12.0]);
        rows.keep(1, 12, &[0.5]);
        assert_eq!(read(&rows, 1, 11, 3), [11.0, 0.5, 0.0], "what followed is forgotten");
        rows.keep(1, 40, &[40.0]);
        assert_eq!(read(&rows, 1, 12, 1), [0.0], "another sequence has the slot now");
        assert_eq!(read(&rows, 0, 0, 1), [0.0]);
        assert_eq!(read(&rows, 7, 0, 1), [0.0]);
    }

    #[test]
    fn only_the_newest_states_are_kept() {
        let mut rows = HiddenRows::new(2);
        let last = 3 * KEPT_ROWS;
        (0..=last).for_each(|position| rows.keep(0, position, &[position as f32; 2]));
        let first = last + 1 - KEPT_ROWS;
        assert_eq!(read(&rows, 0, first, 1), [first as f32; 2]);
        assert_eq!(read(&rows, 0, first - 1, 1), [0.0; 2]);
        assert_eq!(read(&rows, 0, last, 1), [last as f32; 2]);
    }
}
