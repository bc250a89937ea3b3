//! RDMA: a `thunder_verbs::Channel` over the cables between two ranks.

use std::io::{Read, Write};
use std::net::Ipv4Addr;
use std::time::Duration;

use thunder_verbs::{Abort, Cable, Channel, ChannelOptions, Context, Error};

use super::{Closed, Interest, Link};
use crate::{InitError, RdmaConfig, Transport};

/// Sleep of a wait whose spinning found nothing, doubled from the first value to the last. Devices
/// on macOS cannot wake a sleeping thread, so a longer sleep costs latency after a pause, and a
/// shorter one costs processor time while idle.
const SLEEPS_US: std::ops::RangeInclusive<u64> = 20..=1000;
/// How long a dropped link waits until its last frames have been sent.
const DRAIN_LIMIT: Duration = Duration::from_secs(1);

/// The addresses of these devices. A device that cannot be queried has none; its error appears when
/// it is used.
pub(crate) fn addresses_of(devices: &[String]) -> Vec<Ipv4Addr> {
    let of = |name: &String| Context::open(name).and_then(|context| context.addresses()).unwrap_or_default();
    devices.iter().flat_map(of).collect()
}

/// One rank's end of the cables between a pair.
pub(crate) struct RdmaLink {
    channel: Channel,
    shown: usize,
    /// The next sleep, while nothing moves.
    sleep_us: u64,
    abandoned: bool,
}

impl RdmaLink {
    /// Connects over `devices` with the rank at the other end of `stream`, which calls this too.
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
        // The watch, not the link, notices a lost peer and ends the operation: a link never waits.
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
        // The channel keeps an error, and the next call reports it.
        let _ = self.channel.consume(count);
    }

    fn arm(&mut self, _interest: Interest) -> bool {
        std::thread::sleep(Duration::from_micros(self.sleep_us));
        self.sleep_us = (self.sleep_us * 2).min(*SLEEPS_US.end());
        false
    }

    fn disarm(&mut self) {}

    /// Adds nothing: `arm` never lets a rank sleep on this link.
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
        // If a port is down, a device may report the failed send first.
        let is_up = self.channel.check_ports().is_ok();
        self.channel.failure().filter(|error| is_up && !error.is_cut()).map(Error::to_string)
    }
}

impl Drop for RdmaLink {
    fn drop(&mut self) {
        // The last frames of a rank that leaves must reach the others. A broken link has none to
        // deliver.
        if !self.abandoned {
            let _ = self.channel.drain(DRAIN_LIMIT);
        }
    }
}
