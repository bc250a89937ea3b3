//! A thread that copies what other ranks' devices store to this rank's device.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::Receiver;

use super::{HEADER_VECTORS, Host, SLOT_VECTORS};
use crate::device::shared::checked;
use crate::wait::Waits;

/// Vectors that are copied at once: a cache line of the host.
const LINE_VECTORS: usize = 4;
/// Minimum vectors of a thread, if an exchange has as many.
const FEWEST_VECTORS: usize = 256;

/// Vectors of an exchange.
#[derive(Debug, Clone, Copy)]
pub(super) struct Copies {
    pub number: u32,
    pub vectors: usize,
}

pub(super) struct Copier {
    host: Arc<Host>,
    /// This thread's index, and the number of threads.
    part: (usize, usize),
    waits: Waits,
}

impl Copier {
    pub fn new(host: Arc<Host>, part: (usize, usize), waits: Waits) -> Self {
        Self { host, part, waits }
    }

    pub fn run(&self, orders: &Receiver<Copies>) {
        while let Some(copies) = self.waits.next(orders) {
            if !self.copy(copies) {
                return;
            }
        }
    }

    /// Copies this thread's part of an exchange. Returns false if exchanges have ended.
    fn copy(&self, Copies { number, vectors }: Copies) -> bool {
        let (index, count) = self.part;
        let each = vectors.div_ceil(count).max(FEWEST_VECTORS).next_multiple_of(LINE_VECTORS);
        let own = vectors.min(index * each)..vectors.min((index + 1) * each);
        for rank in (0..self.host.ranks).filter(|rank| *rank != self.host.rank) {
            let slot = HEADER_VECTORS + (2 * rank + number as usize % 2) * SLOT_VECTORS;
            for first in own.clone().step_by(LINE_VECTORS) {
                let count = LINE_VECTORS.min(own.end - first);
                let Some(line) = self.await_line(slot + first, count, number) else { return false };
                self.host.inbox.write_pairs(2 * (slot + first), &line[..2 * count]);
            }
        }
        self.host.inbox.write_through();
        true
    }

    /// Waits for vectors of an exchange: two pairs of words each. `None` if exchanges have ended.
    fn await_line(&self, first: usize, count: usize, number: u32) -> Option<[u64; 2 * LINE_VECTORS]> {
        let places = &self.host.shared.pairs()[2 * first..2 * (first + count)];
        let mut line = [0; 2 * LINE_VECTORS];
        if read(places, number, &mut line) {
            return Some(line);
        }
        let mut wait = self.waits.begin();
        while !read(places, number, &mut line) {
            if wait.pause().is_some() && self.host.is_over() {
                return None;
            }
        }
        Some(line)
    }
}

/// Reads vectors. Returns whether all of them are complete and belong to the exchange.
fn read(places: &[AtomicU64], number: u32, line: &mut [u64; 2 * LINE_VECTORS]) -> bool {
    for (pair, place) in line.iter_mut().zip(places) {
        *pair = place.load(Ordering::Relaxed);
    }
    line[..places.len()].as_chunks::<2>().0.iter().all(|vector| checked(*vector, number).is_some())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::shared::check;

    #[test]
    fn a_line_is_whole_when_all_its_vectors_are_of_the_exchange() {
        let vector = |numbers: [u32; 3], number| {
            let [a, b, c] = numbers.map(u64::from);
            [b << 32 | a, u64::from(check(numbers, number)) << 32 | c]
        };
        let ([a, b], [c, d]) = (vector([1, 2, 3], 9), vector([4, 5, 6], 9));
        let places = [a, b, c, d].map(AtomicU64::new);
        let mut line = [0; 2 * LINE_VECTORS];
        assert!(read(&places, 9, &mut line));
        assert_eq!(line[..4], places.each_ref().map(|pair| pair.load(Ordering::Relaxed)));
        assert!(!read(&places, 8, &mut line));
        for (at, pair) in places.iter().enumerate() {
            for half in [0, 32] {
                let was = pair.fetch_xor(1 << half, Ordering::Relaxed);
                assert!(!read(&places, 9, &mut line), "pair {at}, bit {half}");
                pair.store(was, Ordering::Relaxed);
            }
        }
    }
}
