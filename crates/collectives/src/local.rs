//! Groups whose ranks are threads of one process, for tests and measurements.

use std::net::{Ipv4Addr, TcpListener};
use std::sync::Arc;

use crate::{Config, Group, InitError, TransportChoice};

/// The ranks of a group of `size`, to be given to as many threads. They are connected as processes would be, over
/// `transport`.
///
/// # Errors
/// As [`Group::init`].
pub fn groups(size: usize, transport: TransportChoice) -> Result<Vec<Group>, InitError> {
    groups_with(size, |config| config.transport = transport)
}

/// [`groups`] with any other setting changed.
///
/// # Errors
/// As [`Group::init`].
pub fn groups_with(size: usize, change: impl Fn(&mut Config)) -> Result<Vec<Group>, InitError> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))
        .map_err(InitError::system("no port on loopback can be had"))?;
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

/// Runs `work` on every rank of a group, each on a thread, and returns the results in rank order.
///
/// # Errors
/// As [`Group::init`].
///
/// # Panics
/// When `work` does.
pub fn run<R: Send>(
    size: usize,
    transport: TransportChoice,
    work: impl Fn(Group) -> R + Sync,
) -> Result<Vec<R>, InitError> {
    Ok(run_on(groups(size, transport)?, work))
}

/// [`run`] on ranks that exist.
///
/// # Panics
/// When `work` does.
pub fn run_on<R: Send>(groups: Vec<Group>, work: impl Fn(Group) -> R + Sync) -> Vec<R> {
    std::thread::scope(|scope| {
        let ranks: Vec<_> = groups.into_iter().map(|group| scope.spawn(|| work(group))).collect();
        ranks
            .into_iter()
            .map(|rank| rank.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
            .collect()
    })
}
