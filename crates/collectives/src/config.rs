//! How a rank finds its group and how long it waits: fields, and the environment variables that set
//! them.

mod cables;
mod environment;
mod ports;
mod rdma;

pub use cables::CableNetwork;
pub(crate) use ports::bind;
pub use ports::parse_ports;
pub use rdma::RdmaConfig;

use std::io;
use std::net::{TcpListener, ToSocketAddrs};
use std::ops::RangeInclusive;
use std::sync::Arc;
use std::time::Duration;

use crate::error::rounded;
use crate::{InitError, Observer, TransportChoice, Wire, platform};

/// More connections would only use up file descriptors.
const MAX_CONNECTIONS: usize = 16;

/// The configuration of [`crate::Group::init`]. Start from [`Config::new`] or [`Config::from_env`]
/// and change fields.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Config {
    /// This rank, from 0.
    pub rank: usize,
    /// Number of ranks.
    pub size: usize,
    /// Where rank 0 listens, as `host:port`.
    pub coordinator: String,
    /// The secret that all ranks share. Required if the coordinator is not on loopback.
    pub secret: Vec<u8>,
    /// Which transports may be used.
    pub transport: TransportChoice,
    /// The RDMA devices that lead to other ranks.
    pub rdma: Option<RdmaConfig>,
    /// Networks in the order in which ranks prefer them for their connections, usually one for each
    /// cable. Only those count in which both ranks have an address.
    pub cables: Vec<CableNetwork>,
    /// How long a live rank may send nothing within an operation. Must be longer than the slowest
    /// rank's computation between two operations; shorter values notice a stopped process earlier.
    pub stall_limit: Duration,
    /// After this time without an answer a host counts as lost; at least 500 ms. Shorter values
    /// notice a cut cable earlier, longer values survive longer network disturbances.
    pub loss_limit: Duration,
    /// How long all ranks may take to join.
    pub rendezvous_limit: Duration,
    /// How long a wait spins before it sleeps. Longer values cost processor time, shorter ones
    /// about 10 µs per late peer. `None`: 200 µs if there is a core per local rank, otherwise 20
    /// µs.
    pub spin: Option<Duration>,
    /// The same for `recv_idle` and `broadcast_idle`.
    pub idle_spin: Duration,
    /// Overrides the host's identity. Ranks with the same identity try shared memory.
    pub host: Option<String>,
    /// Bytes of each shared-memory ring, a power of two. Each rank has one for reductions, and each
    /// pair of ranks one per direction. Larger rings use more cache, smaller ones interrupt long
    /// messages more often.
    pub ring_bytes: usize,
    /// TCP connections between two ranks. If two ranks differ, the smaller value is used. Several
    /// connections carry long messages together, which helps if one does not fill the wire or if
    /// there are several wires. Each costs buffers.
    pub connections: usize,
    /// Encrypt what TCP links between hosts carry. It is encrypted if any rank of the group wants
    /// it. Costs processor time; shared memory and RDMA are not affected. Needs a secret.
    pub encrypt: bool,
    /// How the values of all-reduces travel between hosts. Must be the same on all ranks.
    pub wire: Wire,
    /// A listener for the coordinator that is already bound (rank 0 only), so that the system can
    /// choose the port.
    pub listener: Option<Arc<TcpListener>>,
    /// Ports on which this rank takes the other ranks' connections, for firewalls. `None`: any free
    /// port. While a group forms, each rank of a host needs one of its own.
    pub ports: Option<RangeInclusive<u16>>,
    /// Told what happens while the group forms.
    pub observer: Option<Observer>,
}

impl Config {
    /// Defaults for a rank of a group.
    pub fn new(rank: usize, size: usize, coordinator: impl Into<String>) -> Self {
        Self {
            rank,
            size,
            coordinator: coordinator.into(),
            secret: Vec::new(),
            transport: TransportChoice::Auto,
            rdma: None,
            cables: Vec::new(),
            stall_limit: Duration::from_secs(10),
            loss_limit: Duration::from_millis(1300),
            rendezvous_limit: Duration::from_secs(60),
            spin: None,
            idle_spin: Duration::from_micros(100),
            host: None,
            ring_bytes: 512 << 10,
            connections: 1,
            encrypt: false,
            wire: Wire::Exact,
            listener: None,
            ports: None,
            observer: None,
        }
    }

    /// The configuration of this rank in a group without rank `lost`: higher ranks move down by
    /// one. If `lost` was 0, the new rank 0 must listen, at a `coordinator` that all ranks know.
    ///
    /// # Errors
    /// If `lost` is this rank or not in the group.
    pub fn without(&self, lost: usize) -> Result<Self, InitError> {
        if lost == self.rank || lost >= self.size {
            let remedy =
                format!("rank {} of {} can only continue without another rank", self.rank, self.size);
            return Err(InitError::Setting {
                name: "the lost rank".to_owned(),
                value: lost.to_string(),
                remedy,
            });
        }
        let moved = |rank: usize| rank - usize::from(rank > lost);
        let mut config = self.clone();
        (config.rank, config.size) = (moved(self.rank), self.size - 1);
        if let Some(rdma) = &mut config.rdma {
            rdma.renumber(|rank| (rank != lost).then(|| moved(rank)));
        }
        Ok(config)
    }

    /// Shared by ranks that can share memory.
    pub(crate) fn host_identity(&self) -> io::Result<String> {
        self.host.clone().map_or_else(platform::host_identity, Ok)
    }

    /// Shared by ranks that run on the same kernel, and so on the same cores.
    pub(crate) fn machine_identity(&self) -> io::Result<String> {
        self.host.clone().map_or_else(platform::machine_identity, Ok)
    }

    pub(crate) fn check(&self) -> Result<(), InitError> {
        if self.size == 0 || self.size > MAX_RANKS {
            return Err(setting("world size", &self.size.to_string(), &format!("use 1 to {MAX_RANKS}")));
        }
        if self.rank >= self.size {
            let remedy = format!("ranks of a group of {} are 0 to {}", self.size, self.size - 1);
            return Err(setting("rank", &self.rank.to_string(), &remedy));
        }
        if !self.ring_bytes.is_power_of_two() || !(4096..=1 << 30).contains(&self.ring_bytes) {
            let remedy = "use a power of two from 4096 to 2^30";
            return Err(setting("ring bytes", &self.ring_bytes.to_string(), remedy));
        }
        for (name, limit) in [
            ("stall limit", self.stall_limit),
            ("loss limit", self.loss_limit),
            ("rendezvous limit", self.rendezvous_limit),
        ] {
            if limit > LONGEST_LIMIT {
                return Err(setting(name, &rounded(limit), "use a year (31536000000 ms) at most"));
            }
        }
        if self.loss_limit < LEAST_LOSS_LIMIT {
            let remedy = "use 500 ms or more: TCP takes 200 ms to repeat a packet that was lost";
            return Err(setting("loss limit", &rounded(self.loss_limit), remedy));
        }
        if !(1..=MAX_CONNECTIONS).contains(&self.connections) {
            let remedy = format!("use 1 to {MAX_CONNECTIONS}");
            return Err(setting("connections", &self.connections.to_string(), &remedy));
        }
        if self.transport == TransportChoice::Rdma && self.rdma.is_none() {
            let remedy =
                "set THUNDER_RDMA_DEVICES to a device file, a row per rank with its device towards each rank";
            return Err(setting("transport", "rdma", remedy));
        }
        if self.size > 1 && self.secret.is_empty() && self.listener.is_none() {
            let unusable = |error: io::Error| {
                setting("coordinator", &self.coordinator, &format!("use host:port ({error})"))
            };
            let mut addresses = self.coordinator.to_socket_addrs().map_err(unusable)?;
            if !addresses.all(|address| address.ip().is_loopback()) {
                return Err(InitError::NoSecret { coordinator: self.coordinator.clone() });
            }
        }
        Ok(())
    }
}

/// The most ranks of a group: a rank has two bytes on the wire.
pub const MAX_RANKS: usize = u16::MAX as usize;
/// Longest time limit: a longer one could overflow when added to the current time.
const LONGEST_LIMIT: Duration = Duration::from_secs(365 * 24 * 60 * 60);
const LEAST_LOSS_LIMIT: Duration = Duration::from_millis(500);
fn setting(name: &str, value: &str, remedy: &str) -> InitError {
    InitError::Setting { name: name.to_owned(), value: value.to_owned(), remedy: remedy.to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ranks_above_a_lost_one_move_down() {
        let mut config = Config::new(2, 4, "127.0.0.1:1");
        let devices = [(0, "a"), (1, "b"), (3, "c")].map(|(rank, name)| (rank, vec![name.to_owned()]));
        config.rdma = Some(RdmaConfig { devices: devices.into(), mode: None });
        let after = |lost| {
            let config = config.without(lost).unwrap();
            (config.rank, config.size, config.rdma.unwrap().devices.into_keys().collect::<Vec<_>>())
        };
        assert_eq!(after(0), (1, 3, vec![0, 2]));
        assert_eq!(after(3), (2, 3, vec![0, 1]));
        for wrong in [2, 4] {
            assert!(config.without(wrong).unwrap_err().to_string().contains("rank 2 of 4"));
        }
        let mut first = Config::new(0, 3, "127.0.0.1:1");
        first.listener = Some(Arc::new(TcpListener::bind("127.0.0.1:0").unwrap()));
        assert!(first.without(1).unwrap().listener.is_some(), "rank 0 goes on listening where it did");
    }
}
