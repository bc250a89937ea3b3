//! Worker threads that run one closure together, handed over in well under a microsecond while work is near.

use std::cell::UnsafeCell;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How long a worker spins for the next job before it sleeps. Between the operations of a step there are microseconds;
/// sleeping and waking would cost more than an operation of a small model.
const SPIN: Duration = Duration::from_micros(200);

/// A job: run by every thread, with the thread's index.
type Job = *const (dyn Fn(usize) + Sync);

/// What workers wait for lies together and apart from what they write with each job: one that is done must not take the line away from
/// those that have not begun.
#[repr(align(128))]
struct Shared {
    /// Counts jobs; a worker runs one each time this moves.
    epoch: AtomicUsize,
    /// Workers asleep or about to be.
    sleepers: AtomicUsize,
    stop: AtomicBool,
    panicked: AtomicBool,
    job: UnsafeCell<Option<Job>>,
    /// The last job that each worker has done.
    done: Box<[Padded]>,
}

// SAFETY: `job` is written only by the leader while all workers have done the last one, and read only between the epoch's release
// store and the worker's store to `done`.
unsafe impl Sync for Shared {}
// SAFETY: the pointer in `job` is dereferenced only while `Pool::run` holds the closure alive.
unsafe impl Send for Shared {}

/// Threads for the operations of one rank. The calling thread takes part as thread 0.
#[derive(Debug)]
pub struct Pool {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
    /// Where the calling thread belongs.
    core: Option<usize>,
}

impl std::fmt::Debug for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Shared").finish_non_exhaustive()
    }
}

impl Pool {
    /// A pool of `threads` threads, the caller's included. With `first_core`, thread `i` is pinned to the core
    /// `first_core + i` of [`allowed_cores`], if there are so many; thread 0 only by [`Pool::pin_caller`].
    pub fn new(threads: usize, first_core: Option<usize>) -> Self {
        let shared = Arc::new(Shared {
            epoch: AtomicUsize::new(0),
            done: (1..threads.max(1)).map(|_| Padded::default()).collect(),
            sleepers: AtomicUsize::new(0),
            stop: AtomicBool::new(false),
            panicked: AtomicBool::new(false),
            job: UnsafeCell::new(None),
        });
        let allowed = allowed_cores();
        let cores = first_core.and_then(|first| allowed.get(first..first + threads.max(1)));
        let workers = (1..threads.max(1))
            // Indices have no gaps, even if there are fewer threads than were asked for.
            .map_while(|index| {
                let shared = shared.clone();
                let core = cores.map(|cores| cores[index]);
                std::thread::Builder::new()
                    .name(format!("compute-{index}"))
                    .spawn(move || {
                        if let Some(core) = core {
                            pin(core);
                        }
                        work(&shared, index);
                    })
                    .ok()
            })
            .collect();
        Self { shared, workers, core: cores.map(|cores| cores[0]) }
    }

    /// Pins the calling thread to thread 0's core, if the pool is pinned. Threads that it starts afterwards inherit this, so
    /// it is for a thread that computes and does nothing else.
    pub fn pin_caller(&self) {
        if let Some(core) = self.core {
            pin(core);
        }
    }

    /// Threads that take part in a job.
    pub fn threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// Runs `job` on every thread and returns when all are done.
    ///
    /// # Panics
    /// When the job panicked on any thread.
    pub fn run(&mut self, job: &(dyn Fn(usize) + Sync)) {
        if self.workers.is_empty() {
            return job(0);
        }
        let shared = &*self.shared;
        // SAFETY: no worker is busy (run takes &mut self and returns only when all are done), so none reads `job`; the
        // lifetime is erased, but no worker uses the pointer after it has said that it is done.
        unsafe {
            *shared.job.get() = Some(std::mem::transmute::<&(dyn Fn(usize) + Sync), Job>(job));
        }
        let epoch = shared.epoch.fetch_add(1, Ordering::SeqCst) + 1;
        if shared.sleepers.load(Ordering::SeqCst) > 0 {
            self.workers.iter().for_each(|worker| worker.thread().unpark());
        }
        // The workers must be waited for even when our own part panics: they hold a reference to the job.
        let mine = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| job(0)));
        let mut spins = 0u32;
        for done in &shared.done[..self.workers.len()] {
            while done.0.load(Ordering::Acquire) != epoch {
                relax(&mut spins);
            }
        }
        if let Err(panic) = mine {
            std::panic::resume_unwind(panic);
        }
        assert!(!shared.panicked.load(Ordering::Relaxed), "a compute thread panicked: see its message above");
    }

    /// Runs `job` for each range of an even split of `0..items` over the threads.
    pub fn split(&mut self, items: usize, job: &(dyn Fn(Range<usize>) + Sync)) {
        let threads = self.threads();
        self.run(&|thread| {
            let range = share(items, thread, threads);
            if !range.is_empty() {
                job(range);
            }
        });
    }
}

/// Runs `job` for ranges of rows, on all threads unless the rows are too few to be worth waking the threads.
pub(in crate::cpu) fn for_rows(pool: &mut Pool, rows: usize, job: &(dyn Fn(Range<usize>) + Sync)) {
    if rows < 4 { job(0..rows) } else { pool.split(rows, job) }
}

/// The part of `0..items` that is a thread's.
pub(in crate::cpu) fn share(items: usize, thread: usize, threads: usize) -> Range<usize> {
    items * thread / threads..items * (thread + 1) / threads
}

/// Items that threads take in pieces: each thread those of its own part, and then what is left of others', as cores are not always
/// equally fast.
#[derive(Debug, Default)]
pub(in crate::cpu) struct Pieces {
    /// Where the rest of each thread's part begins.
    rest: Vec<Padded>,
    items: usize,
    /// The least that is taken at a time.
    least: usize,
}

/// A counter in cache lines of its own, of which CPUs fetch pairs.
#[derive(Debug, Default)]
#[repr(align(128))]
struct Padded(AtomicUsize);

impl Pieces {
    pub fn new(threads: usize) -> Self {
        Self { rest: (0..threads).map(|_| Padded::default()).collect(), items: 0, least: 1 }
    }

    /// Begins with other items.
    pub fn reset(&mut self, items: usize, least: usize) {
        (self.items, self.least) = (items, least.max(1));
        let threads = self.rest.len();
        for (thread, rest) in self.rest.iter_mut().enumerate() {
            *rest.0.get_mut() = share(items, thread, threads).start;
        }
    }

    /// What a thread does next. Half of what is left of a part: few pieces, and small ones at the end.
    pub fn next(&self, thread: usize) -> Option<Range<usize>> {
        let threads = self.rest.len();
        (thread..threads).chain(0..thread).find_map(|part| {
            let end = share(self.items, part, threads).end;
            let after = |start: usize| {
                let left = end - start;
                let half = if threads == 1 { left } else { (left / 2).next_multiple_of(self.least) };
                start + half.clamp(self.least.min(left), left)
            };
            let rest = &self.rest[part].0;
            // Relaxed: that pieces are different is all that counts, the pool orders the rest.
            let start = rest
                .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |start| {
                    (start < end).then(|| after(start))
                })
                .ok()?;
            Some(start..after(start))
        })
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::SeqCst);
        self.shared.epoch.fetch_add(1, Ordering::SeqCst);
        for worker in self.workers.drain(..) {
            worker.thread().unpark();
            // A worker that panicked has been reported by `run` already.
            let _ = worker.join();
        }
    }
}

fn work(shared: &Shared, index: usize) {
    let mut seen = 0;
    loop {
        wait_for_epoch(shared, seen);
        seen += 1;
        if shared.stop.load(Ordering::SeqCst) {
            return;
        }
        // SAFETY: the epoch has moved, so the leader has written `job` and waits for us before it changes it or lets
        // the closure go.
        let job = unsafe { (*shared.job.get()).map(|job| &*job) };
        if let Some(job) = job
            && std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| job(index))).is_err()
        {
            shared.panicked.store(true, Ordering::Relaxed);
        }
        shared.done[index - 1].0.store(seen, Ordering::Release);
    }
}

fn wait_for_epoch(shared: &Shared, seen: usize) {
    let moved = || shared.epoch.load(Ordering::SeqCst) != seen;
    let mut spins = 0u32;
    let mut since = None;
    while !moved() {
        relax(&mut spins);
        if spins.is_multiple_of(256) && since.get_or_insert_with(Instant::now).elapsed() > SPIN {
            // Counted before the last look, and the leader looks at the count after it has moved the epoch: one of the
            // two sees the other.
            shared.sleepers.fetch_add(1, Ordering::SeqCst);
            while !moved() {
                std::thread::park();
            }
            shared.sleepers.fetch_sub(1, Ordering::SeqCst);
        }
    }
}

/// One turn of a spin loop; now and then gives the core away, for machines with more threads than cores.
fn relax(spins: &mut u32) {
    *spins = spins.wrapping_add(1);
    if spins.is_multiple_of(1024) {
        std::thread::yield_now();
    } else {
        std::hint::spin_loop();
    }
}

/// The cores that the calling thread may run on, in the order of their numbers; empty where the system does not tell.
pub fn allowed_cores() -> Vec<usize> {
    #[cfg(target_os = "linux")]
    // SAFETY: plain data, zero is a valid empty set, which the call fills; CPU_ISSET is given an index below the set's size.
    unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        let size = size_of::<libc::cpu_set_t>();
        match libc::sched_getaffinity(0, size, &mut set) {
            0 => (0..8 * size).filter(|core| libc::CPU_ISSET(*core, &set)).collect(),
            _ => Vec::new(),
        }
    }
    #[cfg(not(target_os = "linux"))]
    Vec::new()
}

/// Binds the calling thread to one of [`allowed_cores`]. Best effort: a thread that floats is only slower.
fn pin(core: usize) {
    #[cfg(target_os = "linux")]
    // SAFETY: plain data, zero is a valid empty set; CPU_SET is given an index below the set's size.
    unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        libc::CPU_SET(core, &mut set);
        libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &set);
    }
    #[cfg(not(target_os = "linux"))]
    let _ = core;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_thread_runs_every_job_once() {
        for threads in [1, 2, 5] {
            let mut pool = Pool::new(threads, None);
            let counts: Vec<AtomicUsize> = (0..threads).map(|_| AtomicUsize::new(0)).collect();
            for round in 0..2000 {
                if round == 1000 {
                    std::thread::sleep(3 * SPIN); // all workers sleep now
                }
                pool.run(&|thread| {
                    counts[thread].fetch_add(1, Ordering::Relaxed);
                });
            }
            assert!(counts.iter().all(|count| count.load(Ordering::Relaxed) == 2000));
        }
    }

    #[test]
    fn split_covers_each_item_once() {
        let mut pool = Pool::new(3, None);
        let hits: Vec<AtomicUsize> = (0..10).map(|_| AtomicUsize::new(0)).collect();
        pool.split(10, &|range| {
            range.for_each(|i| {
                hits[i].fetch_add(1, Ordering::Relaxed);
            });
        });
        assert!(hits.iter().all(|hit| hit.load(Ordering::Relaxed) == 1));
    }

    #[test]
    fn pieces_are_all_items_once_whoever_is_late() {
        for (threads, items, least) in [(1, 10, 3), (2, 64, 4), (3, 100, 7), (4, 3, 16), (2, 0, 1)] {
            let mut pieces = Pieces::new(threads);
            for late in 0..threads {
                pieces.reset(items, least);
                // The late thread begins one piece, and the others do all else.
                let begun = pieces.next(late);
                let others = (0..threads).filter(|thread| threads == 1 || *thread != late);
                let rest =
                    others.flat_map(|thread| std::iter::from_fn(|| pieces.next(thread)).collect::<Vec<_>>());
                let mut taken: Vec<usize> = begun.into_iter().chain(rest).flatten().collect();
                taken.sort_unstable();
                assert!(taken.into_iter().eq(0..items), "{threads} threads, {items} items, {late} is late");
            }
        }
    }

    #[test]
    fn threads_that_run_together_take_each_item_once() {
        let (items, threads) = (500, 4);
        let mut pool = Pool::new(threads, None);
        let mut pieces = Pieces::new(threads);
        let hits: Vec<AtomicUsize> = (0..items).map(|_| AtomicUsize::new(0)).collect();
        for round in 1..=500 {
            pieces.reset(items, 1);
            let pieces = &pieces;
            pool.run(&|thread| {
                while let Some(piece) = pieces.next(thread) {
                    piece.for_each(|item| {
                        hits[item].fetch_add(1, Ordering::Relaxed);
                    });
                }
            });
            assert!(hits.iter().all(|hit| hit.load(Ordering::Relaxed) == round));
        }
    }

    #[test]
    fn a_thread_takes_what_is_next_to_its_last_piece_and_less_and_less() {
        let mut pieces = Pieces::new(2);
        pieces.reset(64, 4);
        let own = std::array::from_fn(|_| pieces.next(0));
        assert_eq!(own, [Some(0..16), Some(16..24), Some(24..28), Some(28..32)]);
        assert_eq!(pieces.next(0), Some(32..48), "the other's");
        assert_eq!(pieces.next(1), Some(48..56));
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn threads_stay_on_their_cores_and_only_on_allowed_ones() {
        // On a thread of its own, whose cores the test sets.
        let test = || {
            let last = *allowed_cores().last().unwrap();
            pin(last);
            let pool = Pool::new(1, Some(0));
            pool.pin_caller();
            assert_eq!(allowed_cores(), [last], "counted among the allowed cores, not all");
            let mut pool = Pool::new(2, Some(0));
            let seen = std::sync::Mutex::new(Vec::new());
            pool.run(&|_| seen.lock().unwrap().push(allowed_cores()));
            assert_eq!(seen.into_inner().unwrap(), [[last], [last]], "two threads on one core float");
            assert_eq!(pool.core, None);
        };
        std::thread::spawn(test).join().unwrap();
        let allowed = allowed_cores();
        if allowed.len() > 1 {
            let mut pool = Pool::new(2, Some(0));
            let seen = std::sync::Mutex::new(vec![Vec::new(); 2]);
            pool.run(&|thread| seen.lock().unwrap()[thread] = allowed_cores());
            assert_eq!(
                seen.into_inner().unwrap(),
                [&allowed[..], &allowed[1..2]],
                "the caller is asked first"
            );
        }
    }

    #[test]
    fn a_panic_on_a_worker_reaches_the_caller() {
        let mut pool = Pool::new(2, None);
        let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            pool.run(&|thread| assert_ne!(thread, 1, "on purpose"));
        }));
        assert!(outcome.is_err());
    }
}
