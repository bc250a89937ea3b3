//! The two words with which one side waits for the other: how far the other side has come, and
//! whether this side sleeps.
//!
//! A rank that is about to sleep sets its flag and checks the position once more. Its peer
//! publishes the position and then checks the flag. Both have a full fence between the two steps,
//! so at least one of them sees the other: no wake-up is lost. The tests check this with loom, so
//! the functions are generic over the source of their atomics.

/// How far one side has come.
pub(super) trait Position {
    /// Stores with release: a side that sees the position also sees everything written before it.
    fn release(&self, value: u64);
    /// Loads with acquire.
    fn acquire(&self) -> u64;
}

/// Whether one side sleeps.
pub(super) trait Sleeps {
    fn set(&self);
    fn is_set(&self) -> bool;
    /// Clears the flag. True if it was set.
    fn take(&self) -> bool;
    /// A sequentially consistent fence.
    fn full_fence();
}

/// Implements the traits for the std atomics and for loom's, so that the checked code is the code
/// that runs.
macro_rules! implement {
    ($($atomic:ident)::+) => {
        mod implementation {
            use super::{Position, Sleeps};
            use $($atomic)::+::{AtomicU32, AtomicU64, Ordering, fence};

            impl Position for AtomicU64 {
                fn release(&self, value: u64) {
                    self.store(value, Ordering::Release);
                }
                fn acquire(&self) -> u64 {
                    self.load(Ordering::Acquire)
                }
            }

            impl Sleeps for AtomicU32 {
                fn set(&self) {
                    self.store(1, Ordering::Relaxed);
                }
                fn is_set(&self) -> bool {
                    self.load(Ordering::Relaxed) != 0
                }
                fn take(&self) -> bool {
                    self.swap(0, Ordering::Relaxed) != 0
                }
                fn full_fence() {
                    fence(Ordering::SeqCst);
                }
            }
        }
    };
}

implement!(std::sync::atomic);

/// Publishes a position. True when the other side sleeps; this caller alone must then wake it.
pub(super) fn publish<S: Sleeps>(position: &impl Position, value: u64, sleeps: &S) -> bool {
    position.release(value);
    must_wake(sleeps)
}

/// The second half of `publish`, for a position that was just released.
pub(super) fn must_wake<S: Sleeps>(sleeps: &S) -> bool {
    S::full_fence();
    sleeps.is_set() && sleeps.take()
}

/// Announces sleep, then checks once more with `look`. If that shows nothing new, sleep is safe.
pub(super) fn announce<S: Sleeps, R>(sleeps: &S, look: impl FnOnce() -> R) -> R {
    sleeps.set();
    S::full_fence();
    look()
}

#[cfg(test)]
mod tests {
    use loom::cell::UnsafeCell;
    use loom::sync::atomic::{AtomicU32, AtomicU64, Ordering};
    use loom::sync::{Arc, Condvar, Mutex};

    use super::{Position, Sleeps, announce, publish};

    implement!(loom::sync::atomic);

    /// A position that is stored without release.
    #[derive(Default)]
    struct Unreleased(AtomicU64);

    impl Position for Unreleased {
        fn release(&self, value: u64) {
            self.0.store(value, Ordering::Relaxed);
        }
        fn acquire(&self) -> u64 {
            self.0.acquire()
        }
    }

    /// A position that is loaded without acquire.
    #[derive(Default)]
    struct Unacquired(AtomicU64);

    impl Position for Unacquired {
        fn release(&self, value: u64) {
            self.0.release(value);
        }
        fn acquire(&self) -> u64 {
            self.0.load(Ordering::Relaxed)
        }
    }

    /// A flag without the fence between it and the position.
    #[derive(Default)]
    struct Unfenced(AtomicU32);

    impl Sleeps for Unfenced {
        fn set(&self) {
            self.0.set();
        }
        fn is_set(&self) -> bool {
            self.0.is_set()
        }
        fn take(&self) -> bool {
            self.0.take()
        }
        fn full_fence() {}
    }

    /// Like the socket: a wake-up that comes before the wait is kept.
    #[derive(Default)]
    struct WakeSocket {
        pending: Mutex<bool>,
        changed: Condvar,
    }

    impl WakeSocket {
        fn notify(&self) {
            *self.pending.lock().unwrap() = true;
            self.changed.notify_one();
        }
        fn wait(&self) {
            let mut pending = self.pending.lock().unwrap();
            while !*pending {
                pending = self.changed.wait(pending).unwrap();
            }
            *pending = false;
        }
    }

    /// A ring of one place, and the sockets of both sides.
    struct Ring<P, S> {
        head: P,
        tail: P,
        reader_sleeps: S,
        writer_sleeps: S,
        to_reader: WakeSocket,
        to_writer: WakeSocket,
        place: UnsafeCell<u64>,
    }

    fn wait<S: Sleeps>(sleeps: &S, position: &impl Position, wanted: u64, wake_socket: &WakeSocket) {
        while position.acquire() < wanted {
            if announce(sleeps, || position.acquire()) < wanted {
                wake_socket.wait();
            }
            sleeps.take();
        }
    }

    /// Loom tries every order of the two sides' steps and every value that a load may return. A
    /// lost wake-up would be a deadlock; a place accessed by both at once would be a race.
    fn check<P, S>()
    where
        P: Position + Default + Send + Sync + 'static,
        S: Sleeps + Default + Send + Sync + 'static,
    {
        const MESSAGES: u64 = 2;
        let mut model = loom::model::Builder::new();
        model.preemption_bound = Some(3);
        model.check(|| {
            let ring = Arc::new(Ring {
                head: P::default(),
                tail: P::default(),
                reader_sleeps: S::default(),
                writer_sleeps: S::default(),
                to_reader: WakeSocket::default(),
                to_writer: WakeSocket::default(),
                place: UnsafeCell::new(0),
            });
            let writer = ring.clone();
            let writer = loom::thread::spawn(move || {
                for message in 0..MESSAGES {
                    wait(&writer.writer_sleeps, &writer.tail, message, &writer.to_writer);
                    // SAFETY: loom checks that nothing else accesses the place at the same time.
                    writer.place.with_mut(|place| unsafe { *place = 10 + message });
                    if publish(&writer.head, message + 1, &writer.reader_sleeps) {
                        writer.to_reader.notify();
                    }
                }
            });
            for message in 0..MESSAGES {
                wait(&ring.reader_sleeps, &ring.head, message + 1, &ring.to_reader);
                // SAFETY: as above.
                assert_eq!(ring.place.with(|place| unsafe { *place }), 10 + message);
                if publish(&ring.tail, message + 1, &ring.writer_sleeps) {
                    ring.to_writer.notify();
                }
            }
            writer.join().unwrap();
        });
    }

    #[test]
    fn no_wake_up_is_lost_and_no_place_is_accessed_by_both() {
        check::<AtomicU64, AtomicU32>();
    }

    #[test]
    #[should_panic(expected = "Causality violation")]
    fn without_release_a_place_is_accessed_by_both() {
        check::<Unreleased, AtomicU32>();
    }

    #[test]
    #[should_panic(expected = "Causality violation")]
    fn without_acquire_a_place_is_accessed_by_both() {
        check::<Unacquired, AtomicU32>();
    }

    /// The core of the protocol: one side publishes, the other announces sleep, and one of them
    /// sees the other.
    fn one_sees_the_other<S: Sleeps + Default + Send + Sync + 'static>() {
        loom::model(|| {
            let words = Arc::new((AtomicU64::new(0), S::default()));
            let theirs = words.clone();
            let writer = loom::thread::spawn(move || publish(&theirs.0, 1, &theirs.1));
            let seen = announce(&words.1, || words.0.acquire()) == 1;
            assert!(writer.join().unwrap() || seen, "a wake-up is lost");
        });
    }

    #[test]
    fn a_rank_that_falls_asleep_sees_the_position_or_is_woken() {
        one_sees_the_other::<AtomicU32>();
    }

    #[test]
    #[should_panic(expected = "a wake-up is lost")]
    fn without_the_fence_a_wake_up_is_lost() {
        one_sees_the_other::<Unfenced>();
    }

    /// One rank's part of a board: its places, how far it has posted, and its wake-up.
    struct Side {
        places: [UnsafeCell<u64>; 2],
        posted: AtomicU64,
        sleeps: AtomicU32,
        wake_socket: WakeSocket,
    }

    /// What a rank does on a board of two: post, wake the other rank, wait for its record.
    fn exchange(own: &Side, other: &Side, rounds: u64) {
        for round in 0..rounds {
            let place = (round % 2) as usize;
            // SAFETY: loom checks that nothing else accesses the place at the same time.
            own.places[place].with_mut(|place| unsafe { *place = 10 + round });
            if publish(&own.posted, round + 1, &other.sleeps) {
                other.wake_socket.notify();
            }
            wait(&own.sleeps, &other.posted, round + 1, &own.wake_socket);
            // SAFETY: as above.
            assert_eq!(other.places[place].with(|place| unsafe { *place }), 10 + round);
        }
    }

    /// Two places suffice for ranks that post one record at a time, without announcing what they
    /// have read.
    #[test]
    fn a_boards_place_is_free_once_all_have_posted_the_next_record() {
        const ROUNDS: u64 = 3;
        let mut model = loom::model::Builder::new();
        model.preemption_bound = Some(3);
        model.check(|| {
            let side = || Side {
                places: [UnsafeCell::new(0), UnsafeCell::new(0)],
                posted: AtomicU64::new(0),
                sleeps: AtomicU32::new(0),
                wake_socket: WakeSocket::default(),
            };
            let sides = Arc::new([side(), side()]);
            let theirs = sides.clone();
            let thread = loom::thread::spawn(move || exchange(&theirs[0], &theirs[1], ROUNDS));
            exchange(&sides[1], &sides[0], ROUNDS);
            thread.join().unwrap();
        });
    }
}
