//! Kernels that threads compile, while weights are read or before a proof. Drivers take up to a
//! second for one.

use std::collections::{HashMap, HashSet, VecDeque};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use super::pipelines::{Made, Source};
use crate::kernel::Kernel;

/// Most threads that compile. Others read and pack weights at the same time.
const THREADS: usize = 8;

/// Kernels that are compiled in the background.
#[derive(Default)]
pub(super) struct Soon {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

#[derive(Default)]
struct Shared {
    all: Mutex<All>,
    /// A kernel is made.
    made: Condvar,
}

#[derive(Default)]
struct All {
    waiting: VecDeque<(Kernel, Source)>,
    compiling: HashSet<Kernel>,
    /// Threads that will look for more.
    threads: usize,
    made: HashMap<Kernel, Made>,
}

impl Shared {
    fn all(&self) -> MutexGuard<'_, All> {
        self.all.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Compiles until nothing waits.
    fn compile(&self) {
        loop {
            let mut all = self.all();
            let Some((kernel, source)) = all.waiting.pop_front() else {
                all.threads -= 1;
                return;
            };
            all.compiling.insert(kernel);
            drop(all);
            let made = catch_unwind(AssertUnwindSafe(|| source.compile()));
            let made = made.unwrap_or_else(|_| Err("the thread that compiled it panicked".to_owned()));
            let mut all = self.all();
            all.compiling.remove(&kernel);
            all.made.insert(kernel, made);
            self.made.notify_all();
        }
    }
}

impl Soon {
    /// True if the kernel is made, or will be.
    pub fn has(&self, kernel: &Kernel) -> bool {
        let all = self.shared.all();
        all.made.contains_key(kernel)
            || all.compiling.contains(kernel)
            || all.waiting.iter().any(|(waiting, _)| waiting == kernel)
    }

    /// Lets a thread compile a kernel.
    pub fn add(&mut self, kernel: Kernel, source: Source) {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let mut all = self.shared.all();
        all.waiting.push_back((kernel, source));
        if all.threads >= cores.div_ceil(2).min(THREADS) {
            return;
        }
        let shared = Arc::clone(&self.shared);
        let thread = std::thread::Builder::new().name("compile".to_owned());
        // Without a thread, whoever needs the kernel compiles it.
        if let Ok(thread) = thread.spawn(move || shared.compile()) {
            all.threads += 1;
            drop(all);
            self.threads.retain(|thread| !thread.is_finished());
            self.threads.push(thread);
        }
    }

    /// Waits until no thread compiles.
    pub fn finish(&self) {
        let mut all = self.shared.all();
        while !all.compiling.is_empty() || (all.threads > 0 && !all.waiting.is_empty()) {
            all = self.shared.made.wait(all).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// The kernel, if a thread has compiled it or is about to end. `None` if nothing was begun: it
    /// is no longer the threads' then.
    pub fn take(&self, kernel: &Kernel) -> Option<Made> {
        let mut all = self.shared.all();
        all.waiting.retain(|(waiting, _)| waiting != kernel);
        while all.compiling.contains(kernel) {
            all = self.shared.made.wait(all).unwrap_or_else(PoisonError::into_inner);
        }
        all.made.remove(kernel)
    }
}

impl Drop for Soon {
    /// The driver must not compile when the process ends.
    fn drop(&mut self) {
        self.shared.all().waiting.clear();
        for thread in self.threads.drain(..) {
            // A panic of its kernel was reported as that kernel's error.
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use thunder_collectives::Group;
    use thunder_compute::Activations;

    use crate::kernel::Kernel;
    use crate::tests::{backend, device};

    const KERNELS: [Kernel; 3] = [Kernel::Add, Kernel::Scale, Kernel::Gate];

    #[test]
    fn kernels_that_threads_compile_are_used_and_their_errors_reported() {
        let Some(found) = device("kernels_that_threads_compile_are_used_and_their_errors_reported") else {
            return;
        };
        let mut backend = backend(&found, Activations::Auto, Group::solo());
        let device = &mut backend.device;
        KERNELS.iter().for_each(|kernel| device.forget(kernel));
        device.sabotage = Some(|kernel, text| match kernel {
            Kernel::Scale => format!("{text} nonsense"),
            _ => text,
        });
        device.prepare_soon(KERNELS);
        assert!(KERNELS.iter().all(|kernel| device.soon.has(kernel)));
        device.finish_soon();
        assert_eq!(device.soon.shared.all().made.len(), KERNELS.len());
        device.prepare_together(&KERNELS);
        assert!(device.pipelines.contains_key(&Kernel::Add) && device.pipelines.contains_key(&Kernel::Gate));
        assert!(!device.pipelines.contains_key(&Kernel::Scale));
        device.prepare_soon([Kernel::Scale]);
        let error = device.prepare(&Kernel::Scale).unwrap_err().to_string();
        assert!(error.contains("Scale does not compile"), "{error}");
        assert!(!KERNELS.iter().any(|kernel| device.soon.has(kernel)));
    }

    #[test]
    fn a_device_that_is_dropped_waits_for_no_more_than_what_is_being_compiled() {
        let Some(found) = device("a_device_that_is_dropped_waits_for_no_more_than_what_is_being_compiled")
        else {
            return;
        };
        let mut backend = backend(&found, Activations::Auto, Group::solo());
        let all: Vec<Kernel> = crate::kernel::AttendMany::all().map(Kernel::AttendMany).collect();
        backend.device.prepare_soon(all.iter().copied());
        let shared = std::sync::Arc::downgrade(&backend.device.soon.shared);
        drop(backend);
        assert!(shared.upgrade().is_none(), "no thread has it any more");
    }
}
