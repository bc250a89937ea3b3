//! Worker threads that run one closure together. Starting a closure takes well under a microsecond
//! while workers spin.

use std::cell::UnsafeCell;
use std::ops::{Range, RangeInclusive};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How long a worker spins for the next job before it sleeps. The gaps between a step's operations
/// are microseconds; sleeping and waking would cost more than an operation of a small model.
const SPIN: Duration = Duration::from_micros(200);

/// A job. Every thread calls it with the thread's index.
type Job = *const (dyn Fn(usize) + Sync);

/// State that the leader and the workers share.
///
/// The fields that workers wait for have cache lines apart from those that workers write with each
/// job: a worker that is done must not take the line from workers that have not begun.
#[repr(align(128))]
struct Shared {
    /// Number of jobs so far. Workers run a job each time it changes.
    epoch: AtomicUsize,
    /// Workers that sleep or are about to.
    sleepers: AtomicUsize,
    stop: AtomicBool,
    panicked: AtomicBool,
    job: UnsafeCell<Option<Job>>,
    /// The number of the last job that each worker has finished.
    done: Box<[Padded]>,
}

// SAFETY: the leader writes `job` only while all workers have finished the last job; workers read
// `job` only between the leader's change of `epoch` and their own store to `done`.
unsafe impl Sync for Shared {}
// SAFETY: the pointer in `job` is dereferenced only while `Pool::run` holds the closure alive.
unsafe impl Send for Shared {}

/// The compute threads of one rank. The calling thread takes part as thread 0.
#[derive(Debug)]
pub struct Pool {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
    /// The core of thread 0, if the pool is pinned.
    core: Option<usize>,
}

impl std::fmt::Debug for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Shared").finish_non_exhaustive()
    }
}

impl Pool {
    /// A pool of `threads` threads, including the caller's. With `first_core`, thread `i` is pinned
    /// to core `first_core + i` of [`allowed_cores`], if there are enough cores; thread 0 is pinned
    /// only by [`Pool::pin_caller`].
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
            // Indices have no gaps, even if the system starts fewer threads than requested.
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

    /// Pins the calling thread to thread 0's core, if the pool is pinned. Threads that the caller
    /// starts afterwards inherit the core, so call this only on a thread that does nothing but
    /// compute.
    pub fn pin_caller(&self) {
        if let Some(core) = self.core {
            pin(core);
        }
    }

    /// Number of threads, including the caller.
    pub fn threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// Runs `job` on every thread. Returns when all threads are done.
    ///
    /// # Panics
    /// If the job panicked on any thread.
    pub fn run(&mut self, job: &(dyn Fn(usize) + Sync)) {
        if self.workers.is_empty() {
            return job(0);
        }
        let shared = &*self.shared;
        // SAFETY: no worker is busy (`run` takes `&mut self` and returns only when all workers are
        // done), so none reads `job`. The lifetime is erased, but no worker uses the pointer after
        // its store to `done`.
        unsafe {
            *shared.job.get() = Some(std::mem::transmute::<&(dyn Fn(usize) + Sync), Job>(job));
        }
        let epoch = shared.epoch.fetch_add(1, Ordering::SeqCst) + 1;
        if shared.sleepers.load(Ordering::SeqCst) > 0 {
            self.workers.iter().for_each(|worker| worker.thread().unpark());
        }
        // Wait for the workers even if this thread's part panics: they hold a reference to the job.
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

/// Runs `job` for ranges of rows, on all threads unless the rows are too few to be worth waking the
/// threads.
pub(in crate::cpu) fn for_rows(pool: &mut Pool, rows: usize, job: &(dyn Fn(Range<usize>) + Sync)) {
    if rows < 4 { job(0..rows) } else { pool.split(rows, job) }
}

/// The part of `0..items` that belongs to `thread`.
pub(in crate::cpu) fn share(items: usize, thread: usize, threads: usize) -> Range<usize> {
    items * thread / threads..items * (thread + 1) / threads
}

/// Distributes items over threads: each thread claims ranges of its own part first, then of the
/// parts of slower threads, because cores are not always equally fast.
#[derive(Debug, Default)]
pub(in crate::cpu) struct WorkQueue {
    /// The first unclaimed item of each thread's part.
    unclaimed: Vec<Padded>,
    items: usize,
    /// Fewest and most items of a claim.
    claims: [usize; 2],
}

/// A counter in a pair of cache lines of its own, because CPUs fetch lines in pairs.
#[derive(Debug, Default)]
#[repr(align(128))]
struct Padded(AtomicUsize);

impl WorkQueue {
    pub fn new(threads: usize) -> Self {
        let unclaimed = (0..threads).map(|_| Padded::default()).collect();
        Self { unclaimed, items: 0, claims: [1, usize::MAX] }
    }

    /// Starts over with `items` items, of which a claim has this many, or the rest.
    pub fn reset(&mut self, items: usize, claims: RangeInclusive<usize>) {
        (self.items, self.claims) = (items, [*claims.start(), *claims.end()].map(|claim| claim.max(1)));
        let threads = self.unclaimed.len();
        for (thread, unclaimed) in self.unclaimed.iter_mut().enumerate() {
            *unclaimed.0.get_mut() = share(items, thread, threads).start;
        }
    }

    /// Claims the next range for a thread: half of the rest of a part, so that claims are few, and
    /// small at the end.
    pub fn next(&self, thread: usize) -> Option<Range<usize>> {
        let threads = self.unclaimed.len();
        (thread..threads).chain(0..thread).find_map(|part| {
            let end = share(self.items, part, threads).end;
            let after = |start: usize| {
                let (left, [least, most]) = (end - start, self.claims);
                let half = if threads == 1 { left } else { (left / 2).next_multiple_of(least).min(most) };
                start + half.clamp(least.min(left), left)
            };
            let unclaimed = &self.unclaimed[part].0;
            // Relaxed: only distinct ranges matter; the pool orders all other memory.
            let start = unclaimed
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
            // `run` has reported a worker's panic already.
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
        // SAFETY: the epoch has changed, so the leader has written `job`; it waits for this worker
        // before it changes `job` or drops the closure.
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
            // This worker adds itself to `sleepers` before it checks the epoch again; the leader
            // checks `sleepers` after it changes the epoch. So at least one of the two sees the
            // other's change.
            shared.sleepers.fetch_add(1, Ordering::SeqCst);
            while !moved() {
                std::thread::park();
            }
            shared.sleepers.fetch_sub(1, Ordering::SeqCst);
        }
    }
}

/// One turn of a spin loop. Yields the core now and then, for machines with more threads than
/// cores.
fn relax(spins: &mut u32) {
    *spins = spins.wrapping_add(1);
    if spins.is_multiple_of(1024) {
        std::thread::yield_now();
    } else {
        std::hint::spin_loop();
    }
}

/// The cores that the calling thread may run on, in ascending order; empty if the system does not
/// say.
pub fn allowed_cores() -> Vec<usize> {
    #[cfg(target_os = "linux")]
    // SAFETY: plain data; zero is a valid empty set, which the call fills; CPU_ISSET gets an index
    // below the set's size.
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

/// Binds the calling thread, and those that it starts afterwards, to one of [`allowed_cores`]. Best
/// effort: an unpinned thread is only slower.
pub fn pin(core: usize) {
    #[cfg(target_os = "linux")]
    // SAFETY: plain data; zero is a valid empty set; CPU_SET gets an index below the set's size.
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
    fn claims_cover_each_item_once_with_a_late_thread() {
        for (threads, items, least) in [(1, 10, 3), (2, 64, 4), (3, 100, 7), (4, 3, 16), (2, 0, 1)] {
            let mut queue = WorkQueue::new(threads);
            for late in 0..threads {
                queue.reset(items, least..=3 * least);
                // The late thread claims one range, and the others claim the rest.
                let begun = queue.next(late);
                let others = (0..threads).filter(|thread| threads == 1 || *thread != late);
                let rest =
                    others.flat_map(|thread| std::iter::from_fn(|| queue.next(thread)).collect::<Vec<_>>());
                let mut taken: Vec<usize> = begun.into_iter().chain(rest).flatten().collect();
                taken.sort_unstable();
                assert!(taken.into_iter().eq(0..items), "{threads} threads, {items} items, {late} is late");
            }
        }
    }

    #[test]
    fn concurrent_threads_claim_each_item_once() {
        let (items, threads) = (500, 4);
        let mut pool = Pool::new(threads, None);
        let mut queue = WorkQueue::new(threads);
        let hits: Vec<AtomicUsize> = (0..items).map(|_| AtomicUsize::new(0)).collect();
        for round in 1..=500 {
            queue.reset(items, 1..=usize::MAX);
            let queue = &queue;
            pool.run(&|thread| {
                while let Some(claimed) = queue.next(thread) {
                    claimed.for_each(|item| {
                        hits[item].fetch_add(1, Ordering::Relaxed);
                    });
                }
            });
            assert!(hits.iter().all(|hit| hit.load(Ordering::Relaxed) == round));
        }
    }

    #[test]
    fn a_threads_claims_are_adjacent_and_shrink() {
        let mut queue = WorkQueue::new(2);
        queue.reset(64, 4..=usize::MAX);
        let own = std::array::from_fn(|_| queue.next(0));
        assert_eq!(own, [Some(0..16), Some(16..24), Some(24..28), Some(28..32)]);
        assert_eq!(queue.next(0), Some(32..48), "the other thread's");
        assert_eq!(queue.next(1), Some(48..56));
    }

    #[test]
    fn a_slow_thread_holds_up_few_items() {
        let mut queue = WorkQueue::new(2);
        queue.reset(64, 2..=8);
        let own = std::array::from_fn(|_| queue.next(0).map(|claimed| claimed.len()));
        assert_eq!(own, [8, 8, 8, 4, 2, 2].map(Some));
        assert_eq!(queue.next(0), Some(32..40), "the other thread's");
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn threads_are_pinned_to_allowed_cores_only() {
        // Runs on a thread of its own, because it sets the thread's cores.
        let test = || {
            let last = *allowed_cores().last().unwrap();
            pin(last);
            let pool = Pool::new(1, Some(0));
            pool.pin_caller();
            assert_eq!(allowed_cores(), [last], "cores are counted among the allowed cores");
            let mut pool = Pool::new(2, Some(0));
            let seen = std::sync::Mutex::new(Vec::new());
            pool.run(&|_| seen.lock().unwrap().push(allowed_cores()));
            assert_eq!(
                seen.into_inner().unwrap(),
                [[last], [last]],
                "two threads are not pinned to one core"
            );
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
                "the caller keeps its cores until pin_caller"
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
