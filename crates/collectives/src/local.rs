//! Groups whose ranks are threads of one process, for tests and measurements.

use std::net::{Ipv4Addr, TcpListener};
use std::sync::Arc;

use crate::{Config, Group, InitError, TransportChoice};

/// Forms a group of `size` and returns its ranks, one for each of as many threads. They are
/// connected over `transport`, as processes would be.
///
/// # Errors
/// Those of [`Group::init`].
pub fn groups(size: usize, transport: TransportChoice) -> Result<Vec<Group>, InitError> {
    groups_with(size, |config| config.transport = transport)
}

/// [`groups`] with other settings: `change` edits each rank's configuration.
///
/// # Errors
/// Those of [`Group::init`].
pub fn groups_with(size: usize, change: impl Fn(&mut Config)) -> Result<Vec<Group>, InitError> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))
        .map_err(InitError::system("no port on loopback is available"))?;
    let address = listener.local_addr().map_err(InitError::system("the listener has no address"))?;
    let listener = Arc::new(listener);
    std::thread::scope(|scope| {
        let ranks: Vec<_> = (0..size)
            .map(|rank| {
                let mut config = Config::new(rank, size, address.to_string());
                config.listener = (rank == 0).then(|| listener.clone());
                change(&mut config);
                scope.spawn(move || Group::init(config))
            })
            .collect();
        ranks
            .into_iter()
            .map(|rank| {
                rank.join().unwrap_or_else(|_| {
                    Err(InitError::system("a rank's thread panicked")(std::io::Error::other("panic")))
                })
            })
            .collect()
    })
}

/// Forms a group and runs `work` on every rank, each on its own thread. Returns the results in rank
/// order.
///
/// # Errors
/// Those of [`Group::init`].
///
/// # Panics
/// If `work` does.
pub fn run<R: Send>(
    size: usize,
    transport: TransportChoice,
    work: impl Fn(Group) -> R + Sync,
) -> Result<Vec<R>, InitError> {
    Ok(run_on(groups(size, transport)?, work))
}

/// Runs `work` on ranks that exist, each on its own thread. Returns the results in rank order.
///
/// # Panics
/// If `work` does.
pub fn run_on<R: Send>(groups: Vec<Group>, work: impl Fn(Group) -> R + Sync) -> Vec<R> {
    std::thread::scope(|scope| {
        let ranks: Vec<_> = groups.into_iter().map(|group| scope.spawn(|| work(group))).collect();
        ranks
            .into_iter()
            .map(|rank| rank.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
            .collect()
    })
}
