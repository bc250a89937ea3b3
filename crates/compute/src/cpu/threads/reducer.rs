//! Sums over the tensor-parallel group: while nothing else goes on, or by a thread that does only this, while other rows are computed.

use std::ops::Range;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use thunder_collectives::{CommError, DType, Group, Op, Stats};

use crate::cpu::buffer::Buffer;

/// What a thread unpacks of weights for a matrix unit in a µs: 576 bytes in 85 ns. Two halves of a step unpack them twice.
const REREAD_BYTES_PER_US: f64 = 6000.0;

/// Whether a prompt's rows are summed in two halves, the one while the other is computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Overlap {
    /// Where a sum is thought to take longer than to read a layer's weights twice.
    #[default]
    Auto,
    /// For every prompt.
    Always,
    /// Never.
    Never,
}

/// The group, wherever it is at work.
#[derive(Debug)]
pub(in crate::cpu) struct Reducer {
    /// Away while a sum is under way.
    group: Option<Box<Group>>,
    background: Option<Background>,
    overlap: Overlap,
    row_bytes: usize,
    /// µs that two parts of a step cost more than one; the same on all ranks.
    parts_cost_us: f64,
    /// Time inside of operations in which this rank did not wait for them.
    hidden: Duration,
}

/// Rows of a buffer to sum, and the group to do it with.
type Job = (Box<Group>, Buffer, Range<usize>);

#[derive(Debug)]
struct Background {
    jobs: Option<SyncSender<Job>>,
    done: Receiver<(Job, Result<(), CommError>, Duration)>,
    thread: Option<JoinHandle<()>>,
}

impl Reducer {
    pub fn new(group: Group, overlap: Overlap) -> Self {
        Self {
            group: Some(Box::new(group)),
            background: None,
            overlap,
            row_bytes: 0,
            parts_cost_us: f64::INFINITY,
            hidden: Duration::ZERO,
        }
    }

    pub fn group(&mut self) -> &mut Group {
        match &mut self.group {
            Some(group) => group,
            None => unreachable!("a step ends with all sums"),
        }
    }

    /// Whether this rank is the group.
    pub fn is_alone(&self) -> bool {
        self.group.as_ref().is_some_and(|group| group.size() == 1)
    }

    /// Measures the group. Sums will have so many bytes a row, and each thread reads `reread_bytes` of weights for one. All ranks
    /// call it.
    pub fn tune(&mut self, row_bytes: usize, reread_bytes: usize) -> Result<(), CommError> {
        let group = self.group();
        group.tune()?;
        let mut cost = [reread_bytes as f64 / REREAD_BYTES_PER_US];
        group.all_reduce(&mut cost, Op::Max)?;
        (self.row_bytes, self.parts_cost_us) = (row_bytes, cost[0]);
        Ok(())
    }

    /// Whether a step of so many rows, prompts among them, should have two parts. All ranks find the same.
    pub fn overlaps(&mut self, rows: usize) -> bool {
        let cost_us = self.parts_cost_us;
        match self.overlap {
            _ if self.is_alone() => false,
            Overlap::Never => false,
            Overlap::Always => true,
            Overlap::Auto => {
                let (half, group) = (rows / 2 * self.row_bytes, self.group());
                let algorithm = group.algorithm(half, DType::F32, Op::Sum);
                let cost = group.costs().into_iter().find(|cost| cost.algorithm == algorithm);
                cost.is_some_and(|cost| cost.predict_us(half) > cost_us)
            }
        }
    }

    /// Sums rows of `x`, which [`Reducer::end`] returns.
    pub fn begin(&mut self, x: Buffer, rows: Range<usize>) {
        let Some(group) = self.group.take() else { unreachable!("one sum at a time") };
        let background = self.background.get_or_insert_with(Background::start);
        let sent = background.jobs.as_ref().map(|jobs| jobs.send((group, x, rows)));
        assert!(matches!(sent, Some(Ok(()))), "the thread that sums could not be started, or panicked");
    }

    /// Waits for what was begun, if anything was.
    pub fn end(&mut self) -> Result<Option<(Buffer, Range<usize>)>, CommError> {
        if self.group.is_some() {
            return Ok(None);
        }
        let Some(background) = &self.background else { unreachable!("someone has the group") };
        let began = Instant::now();
        let Ok(((group, x, rows), result, taken)) = background.done.recv() else {
            panic!("the thread that sums has ended: it panicked");
        };
        self.hidden += taken.saturating_sub(began.elapsed());
        self.group = Some(group);
        result.map(|()| Some((x, rows)))
    }

    /// What was summed since the last call, and how long this rank waited for it.
    pub fn take_stats(&mut self) -> Stats {
        let mut stats = self.group().reset_stats();
        stats.time = stats.time.saturating_sub(std::mem::take(&mut self.hidden));
        stats
    }
}

impl Background {
    fn start() -> Self {
        let (jobs, incoming) = sync_channel::<Job>(1);
        let (outgoing, done) = sync_channel(1);
        let work = move || {
            while let Ok((mut group, mut x, rows)) = incoming.recv() {
                // The core is that of a thread that computes.
                let crowded = group.set_crowded(true);
                let (width, began) = (x.width, Instant::now());
                let result = group.all_reduce(&mut x.data[rows.start * width..rows.end * width], Op::Sum);
                let taken = began.elapsed();
                group.set_crowded(crowded);
                if outgoing.send(((group, x, rows), result, taken)).is_err() {
                    return;
                }
            }
        };
        let thread = std::thread::Builder::new().name("reduce".to_owned()).spawn(work);
        Self { jobs: Some(jobs), done, thread: thread.ok() }
    }
}

impl Drop for Background {
    fn drop(&mut self) {
        // A sum under way ends within the group's limits.
        self.jobs = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use thunder_collectives::{TransportChoice, local};

    use super::*;

    const ROWS: usize = 6;
    const WIDTH: usize = 40;

    fn filled(rank: usize) -> Buffer {
        let mut x = Buffer::new(ROWS, WIDTH);
        x.data.fill(1.0 + rank as f32);
        x
    }

    #[test]
    fn a_part_is_summed_in_the_background_and_nothing_else() {
        let sums = local::run(3, TransportChoice::Shm, |group| {
            let rank = group.rank();
            let mut reducer = Reducer::new(group, Overlap::Always);
            assert!(reducer.end().unwrap().is_none(), "nothing was begun");
            for _ in 0..3 {
                reducer.begin(filled(rank), 2..5);
                let (x, rows) = reducer.end().unwrap().unwrap();
                for (row, numbers) in x.data.chunks(WIDTH).take(ROWS).enumerate() {
                    let expected = if rows.contains(&row) { 6.0 } else { 1.0 + rank as f32 };
                    assert!(numbers.iter().all(|x| *x == expected), "row {row} of rank {rank}");
                }
            }
            reducer.take_stats()
        });
        let bytes = 3 * 3 * WIDTH as u64 * 4;
        assert!(sums.unwrap().iter().all(|stats| (stats.operations, stats.bytes) == (3, bytes)));
    }

    #[test]
    fn a_lost_peer_ends_a_sum_in_the_background() {
        let errors = local::run(2, TransportChoice::Shm, |group| {
            let rank = group.rank();
            let mut reducer = Reducer::new(group, Overlap::Always);
            (rank == 0).then(|| {
                reducer.begin(filled(rank), 0..ROWS);
                reducer.end().unwrap_err()
            })
        });
        let error = errors.unwrap().swap_remove(0).unwrap();
        assert!(matches!(error, CommError::PeerLost { rank: 1, .. }), "{error}");
    }

    #[test]
    fn parts_pay_where_sums_take_longer_than_reading_weights_again() {
        for (reread_bytes, overlap, expected) in [
            (1, Overlap::Auto, true),
            (1 << 40, Overlap::Auto, false),
            (1, Overlap::Never, false),
            (1 << 40, Overlap::Always, true),
        ] {
            let found = local::run(2, TransportChoice::Shm, |group| {
                let mut reducer = Reducer::new(group, overlap);
                reducer.tune(4096, reread_bytes).unwrap();
                reducer.overlaps(256)
            });
            assert_eq!(found.unwrap(), [expected; 2], "{reread_bytes} bytes, {overlap:?}");
        }
        assert!(!Reducer::new(Group::solo(), Overlap::Always).overlaps(256), "nobody to sum with");
    }
}
