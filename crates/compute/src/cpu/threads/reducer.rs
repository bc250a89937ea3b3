//! All-reduces over the tensor-parallel group, in the foreground, or in a separate thread while
//! other rows are computed.

use std::ops::Range;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use thunder_collectives::{CommError, DType, Group, Op, Stats};

use crate::cpu::buffer::Buffer;

/// Bytes of weights that a thread unpacks for a matrix unit in a µs: 576 bytes in 85 ns (measured).
/// A step in two parts unpacks them twice.
const REREAD_BYTES_PER_US: f64 = 6000.0;

/// Whether a prompt's rows are computed in two parts, so that one part's all-reduces overlap the
/// other's computing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Overlap {
    /// If the cost model predicts that an all-reduce takes longer than reading a layer's weights
    /// once more.
    #[default]
    Auto,
    /// For every prompt.
    Always,
    /// Never.
    Never,
}

/// The tensor-parallel group and its background thread.
#[derive(Debug)]
pub(in crate::cpu) struct Reducer {
    /// `None` while the background thread has it.
    group: Option<Box<Group>>,
    background: Option<Background>,
    /// A sum that has ended and was not asked for yet.
    summed: Option<(Buffer, Range<usize>)>,
    overlap: Overlap,
    row_bytes: usize,
    /// Additional cost of a step in two parts, in µs; the same on all ranks.
    parts_cost_us: f64,
    /// Time of background all-reduces during which this rank computed.
    hidden: Duration,
}

/// Rows of a buffer to all-reduce, and the group.
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
            summed: None,
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

    /// True for a group of one.
    pub fn is_alone(&self) -> bool {
        self.group.as_ref().is_some_and(|group| group.size() == 1)
    }

    /// Measures the group. An all-reduce will have `row_bytes` per row, and for each of them a
    /// thread reads `reread_bytes` of weights. All ranks call this together.
    pub fn tune(&mut self, row_bytes: usize, reread_bytes: usize) -> Result<(), CommError> {
        let group = self.group();
        group.tune()?;
        let mut cost = [reread_bytes as f64 / REREAD_BYTES_PER_US];
        group.all_reduce(&mut cost, Op::Max)?;
        (self.row_bytes, self.parts_cost_us) = (row_bytes, cost[0]);
        Ok(())
    }

    /// True if a step of `rows` rows with a prompt should have two parts. The same on all ranks.
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

    /// Begins the all-reduce of rows of `x`, which [`Reducer::end`] returns.
    pub fn begin(&mut self, x: Buffer, rows: Range<usize>) {
        let Some(group) = self.group.take() else { unreachable!("one sum at a time") };
        let background = self.background.get_or_insert_with(Background::start);
        let sent = background.jobs.as_ref().map(|jobs| jobs.send((group, x, rows)));
        assert!(matches!(sent, Some(Ok(()))), "the thread that sums could not be started, or panicked");
    }

    /// Waits for the pending all-reduce, if there is one, and keeps its result for
    /// [`Reducer::end`], so that the group can be used for another.
    pub fn finish(&mut self) -> Result<(), CommError> {
        self.summed = self.end()?;
        Ok(())
    }

    /// Waits for the all-reduce that was begun, if any.
    pub fn end(&mut self) -> Result<Option<(Buffer, Range<usize>)>, CommError> {
        if let Some(sum) = self.summed.take() {
            return Ok(Some(sum));
        }
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

    /// All-reduces since the last call, and how long this rank waited for them.
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
                // This thread shares a core with one that computes.
                let oversubscribed = group.set_oversubscribed(true);
                let (width, began) = (x.width, Instant::now());
                let result = group.all_reduce(&mut x.data[rows.start * width..rows.end * width], Op::Sum);
                let taken = began.elapsed();
                group.set_oversubscribed(oversubscribed);
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
        // An all-reduce in flight ends within the group's time limits.
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
                // Another operation of the group comes first.
                reducer.finish().unwrap();
                reducer.finish().unwrap();
                assert_eq!(reducer.group().size(), 3);
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
