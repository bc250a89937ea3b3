//! The host's threads: some copy what other ranks store, one watches these ranks.

use std::sync::mpsc::channel;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use thunder_collectives::{CommError, Group};
use thunder_compute::cpu::pool::pin;

use super::copy::Copier;
use super::{Host, Orders};
use crate::wait::{Cores, Waits, host_cores};

/// Time between checks of the other ranks.
const CHECK: Duration = Duration::from_millis(1);
/// Time between checks whether there is a group to watch; a new group comes with a notification.
const IDLE: Duration = Duration::from_secs(3600);

/// Maximum copying threads of a rank. With two threads 32 KiB take 11 µs, with one 17. Each uses a
/// core while the device computes.
const MOST_COPIERS: usize = 4;
/// Cores of the host for one copying thread.
const CORES_OF_COPIER: usize = 4;

/// The threads, as other threads see them.
pub(super) struct Threads {
    host: Arc<Host>,
    orders: Arc<Orders>,
    watch: Arc<Watch>,
    threads: Vec<JoinHandle<()>>,
}

struct Watch {
    host: Arc<Host>,
    lent: Mutex<Lent>,
    changed: Condvar,
}

/// State of the watching thread.
#[derive(Default)]
struct Lent {
    group: Option<Box<Group>>,
    /// The loss that it has noticed.
    lost: Option<CommError>,
    must_end: bool,
}

impl Threads {
    /// `is_real`: the device does not compute on the host's cores. `cores`: those of the rank.
    pub fn start(
        host: &Arc<Host>,
        orders: &Arc<Orders>,
        (is_real, cores): (bool, Option<Cores>),
    ) -> std::io::Result<Self> {
        let count = (host_cores() / CORES_OF_COPIER / host.ranks).clamp(1, MOST_COPIERS);
        let watch = Watch { host: Arc::clone(host), lent: Mutex::default(), changed: Condvar::new() };
        let watch = Arc::new(watch);
        let mut all = Self { host: Arc::clone(host), orders: Arc::clone(orders), watch, threads: Vec::new() };
        let named = |name: &str| std::thread::Builder::new().name(name.to_owned());
        for index in 0..count {
            let (order, incoming) = channel();
            let copier = Copier::new(Arc::clone(host), (index, count), Waits::new(is_real));
            let core = cores.and_then(|cores| cores.of_thread(index));
            all.threads.push(named("gpu-copy").spawn(move || {
                core.into_iter().for_each(pin);
                copier.run(&incoming);
            })?);
            orders.add(order);
        }
        let watch = Arc::clone(&all.watch);
        all.threads.push(named("gpu-watch").spawn(move || watch.run())?);
        Ok(all)
    }

    /// Lends the group to the watching thread.
    pub fn begin(&self, group: Box<Group>) {
        self.watch.lent().group = Some(group);
        self.watch.changed.notify_one();
    }

    /// Takes the group back, if it was lent, and a loss that was noticed.
    pub fn take(&self) -> (Option<Box<Group>>, Option<CommError>) {
        let mut lent = self.watch.lent();
        (lent.group.take(), lent.lost.take())
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        self.host.end();
        self.orders.close();
        self.watch.lent().must_end = true;
        self.watch.changed.notify_one();
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

impl Watch {
    fn lent(&self) -> MutexGuard<'_, Lent> {
        self.lent.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn run(&self) {
        let mut lent = self.lent();
        while !lent.must_end {
            let watches = lent.group.is_some() && !self.host.is_over();
            let waited = self.changed.wait_timeout(lent, if watches { CHECK } else { IDLE });
            (lent, _) = waited.unwrap_or_else(PoisonError::into_inner);
            // It may have been taken back meanwhile: what devices do then is not of its exchanges.
            let Some(group) = lent.group.as_mut().filter(|_| watches) else { continue };
            lent.lost = group.check().err();
            // A device that gave up stores nothing more, so the others must not wait.
            let gave_up = (0..self.host.ranks).any(|rank| self.host.verdict(rank).is_some());
            if lent.lost.is_some() || gave_up {
                self.host.end();
            }
        }
    }
}
