//! RDMA: a `thunder_verbs::Channel` over the cables between two ranks.

use std::io::{Read, Write};
use std::net::Ipv4Addr;
use std::time::Duration;

use thunder_verbs::{Abort, Cable, Channel, ChannelOptions, Context, Error};

use super::{Closed, Interest, Link};
use crate::{InitError, RdmaConfig, Transport};

/// The nap of a wait that spun in vain, doubled from the first to the last. Devices on macOS cannot wake a sleeper, so
/// a longer nap costs latency after a pause, a shorter one costs processor time while idle.
const SLEEPS_US: std::ops::RangeInclusive<u64> = 20..=1000;
/// How long a link that is dropped waits for its last frames to leave.
const DRAIN_LIMIT: Duration = Duration::from_secs(1);

/// The addresses of these devices; none of one that cannot be asked, as that shows when it is used.
pub(crate) fn addresses_of(devices: &[String]) -> Vec<Ipv4Addr> {
    let of = |name: &String| Context::open(name).and_then(|context| context.addresses()).unwrap_or_default();
    devices.iter().flat_map(of).collect()
}

/// One rank's end of a pair's cables.
pub(crate) struct RdmaLink {
    channel: Channel,
    shown: usize,
    /// The next nap, while nothing moves.
    sleep_us: u64,
    abandoned: bool,
}

impl RdmaLink {
    /// Connects over `devices` with the rank at the other end of `stream`, which does the same.
    pub fn connect(
        config: &RdmaConfig,
        peer: usize,
        devices: &[String],
        stream: &mut (impl Read + Write),
    ) -> Result<Self, InitError> {
        let failed = |source: Error| InitError::Rdma { rank: peer, source };
        let cable = |name: &String| Ok(Cable { context: Context::open(name)?, local_address: None });
        let mut cables = devices.iter().map(cable).collect::<Result<Vec<_>, _>>().map_err(failed)?;
        Cable::find_addresses(&mut cables, stream).map_err(failed)?;
        let prepared = Channel::prepare(&cables, ChannelOptions::new(config.mode())).map_err(failed)?;
        // Liveness is the watch's, which ends the operation and not the link's wait: a link never waits.
        let channel = prepared.handshake(stream, Abort::new()).map_err(failed)?;
        Ok(Self { channel, shown: 0, sleep_us: *SLEEPS_US.start(), abandoned: false })
    }

    fn moved(&mut self, count: usize) -> usize {
        if count > 0 {
            self.sleep_us = *SLEEPS_US.start();
        }
        count
    }
}

impl Link for RdmaLink {
    fn transport(&self) -> Transport {
        Transport::Rdma
    }

    fn send(&mut self, first: &[u8], second: &[u8]) -> Result<usize, Closed> {
        let sent = self.channel.send_parts(first, second).map_err(|_| Closed)?;
        Ok(self.moved(sent))
    }

    fn fill_view(&mut self, want: usize) -> Result<usize, Closed> {
        self.shown = self.channel.peek().map_err(|_| Closed)?.len().min(want);
        Ok(self.moved(self.shown))
    }

    fn view(&self) -> &[u8] {
        &self.channel.peeked()[..self.shown]
    }

    fn consume(&mut self, count: usize) {
        debug_assert!(count <= self.shown);
        self.shown -= count;
        // The channel keeps its failure, and the next look at it reports it.
        let _ = self.channel.consume(count);
    }

    fn arm(&mut self, _interest: Interest) -> bool {
        std::thread::sleep(Duration::from_micros(self.sleep_us));
        self.sleep_us = (self.sleep_us * 2).min(*SLEEPS_US.end());
        false
    }

    fn disarm(&mut self) {}

    /// Nothing to poll: `arm` never lets a rank sleep on it.
    fn descriptors(&self, _interest: Interest, _set: &mut Vec<libc::pollfd>) {}

    fn reports_end(&self) -> bool {
        false
    }

    fn needs_health_checks(&self) -> bool {
        true
    }

    fn check_health(&mut self, lasts: bool) -> Result<(), Closed> {
        let result = if lasts { self.channel.probe() } else { self.channel.check_ports() };
        result.map_err(|_| Closed)
    }

    fn abandon(&mut self) {
        self.abandoned = true;
    }

    fn fault(&self) -> Option<String> {
        // A device may fail a send because its port is down before it says so.
        let is_up = self.channel.check_ports().is_ok();
        self.channel.failure().filter(|error| is_up && !error.is_cut()).map(Error::to_string)
    }
}

impl Drop for RdmaLink {
    fn drop(&mut self) {
        // The last frames of a rank that leaves must reach the others. A broken link has none that could.
        if !self.abandoned {
            let _ = self.channel.drain(DRAIN_LIMIT);
        }
    }
}
