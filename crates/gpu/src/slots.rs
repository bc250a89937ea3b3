//! Where the states of sequences are.
//!
//! A decode step may be computed ahead and in vain. Then the device computes the step before again,
//! if more of it is read. So a step reads a state in one place, writes it in another, and leaves
//! the place that the step before has read. A few sequences at a time have these three places.

/// Maximum sequences of a step that is computed ahead, if they have states.
pub(crate) const MOST_ALTERNATING: usize = 2;
/// States that a device keeps in addition to those of slots, if a model has states.
pub const OTHER_STATES: usize = 2 * MOST_ALTERNATING;

/// Places of the states in the caches of a model. Slots are numbered as the caller does.
#[derive(Debug)]
pub(crate) struct Slots {
    /// The place of each slot's state.
    places: Vec<usize>,
    /// The least recently used comes first.
    others: Vec<Others>,
    /// Slots whose states the step writes elsewhere, until it does.
    alternating: Vec<usize>,
}

/// Two free places: that of the next state, and of the one after it.
#[derive(Debug)]
struct Others {
    /// The slot that last had them.
    slot: Option<usize>,
    places: [usize; 2],
}

impl Slots {
    /// The other places come after those of the slots.
    pub fn new(slots: usize) -> Self {
        let pair = |index| [slots + 2 * index, slots + 2 * index + 1];
        let others = (0..MOST_ALTERNATING).map(|index| Others { slot: None, places: pair(index) });
        Self {
            places: (0..slots).collect(),
            others: others.collect(),
            alternating: Vec::with_capacity(MOST_ALTERNATING),
        }
    }

    /// The place of a slot's state.
    pub fn place(&self, slot: usize) -> usize {
        self.places.get(slot).copied().unwrap_or(slot)
    }

    /// Begins a step.
    pub fn begin(&mut self) {
        self.alternating.clear();
    }

    /// The step will write a slot's state elsewhere. Returns its place, the new one, and that of
    /// the step after.
    pub fn alternate(&mut self, slot: usize) -> [usize; 3] {
        let index = self.others.iter().position(|others| others.slot == Some(slot)).unwrap_or(0);
        let Others { places, .. } = self.others.remove(index);
        self.others.push(Others { slot: Some(slot), places });
        self.alternating.push(slot);
        [self.place(slot), places[0], places[1]]
    }

    /// The step has written states. Further calls in the same step change nothing.
    pub fn written(&mut self) {
        for slot in self.alternating.drain(..) {
            let others = self.others.iter_mut().find(|others| others.slot == Some(slot));
            if let (Some(Others { places: [next, after], .. }), Some(place)) =
                (others, self.places.get_mut(slot))
            {
                (*place, *next, *after) = (*next, *after, *place);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_are_never_shared_and_take_turns() {
        let mut random = thunder_testing::Random::new(3);
        let mut slots = Slots::new(4);
        for _ in 0..1000 {
            let first = random.below(4) as usize;
            let all = [first, (first + 1 + random.below(3) as usize) % 4];
            slots.begin();
            let found = all.map(|slot| slots.alternate(slot));
            let others = found.iter().flat_map(|[_, next, after]| [*next, *after]);
            let mut used: Vec<usize> = (0..4).map(|slot| slots.place(slot)).chain(others).collect();
            used.sort_unstable();
            assert_eq!(used, [0, 1, 2, 3, 4, 5, 6, 7]);
            if random.below(5) == 0 {
                // A step that does not compute these states.
                continue;
            }
            slots.written();
            slots.written();
            slots.begin();
            let turned = found.map(|[place, next, after]| [next, after, place]);
            assert_eq!(all.map(|slot| slots.alternate(slot)), turned);
        }
    }
}
