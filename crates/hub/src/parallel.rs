//! Runs work on several items in parallel.

use std::{
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    thread,
};

use crate::error::HubError;

/// Runs `work` for all items, `jobs` at a time. The first error sets `stop`, which ends the other
/// jobs, and is returned.
pub(crate) fn in_parallel<T: Sync>(
    items: &[T],
    jobs: usize,
    stop: &AtomicBool,
    work: impl Fn(&T) -> Result<(), HubError> + Sync,
) -> Result<(), HubError> {
    let next = AtomicUsize::new(0);
    let first_error = Mutex::new(None);
    let worker = || {
        while !stop.load(Ordering::Relaxed)
            && let Some(item) = items.get(next.fetch_add(1, Ordering::Relaxed))
        {
            if let Err(error) = work(item) {
                stop.store(true, Ordering::Relaxed);
                first_error.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
            }
        }
    };
    thread::scope(|scope| {
        for _ in 0..jobs.clamp(1, items.len().max(1)) {
            scope.spawn(worker);
        }
    });
    first_error.into_inner().unwrap_or_else(PoisonError::into_inner).map_or(Ok(()), Err)
}
