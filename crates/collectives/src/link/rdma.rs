//! RDMA: a `thunder_verbs::Channel` over the cables between two ranks.

use std::collections::BTreeMap;
use std::net::Ipv4Addr;
use std::path::Path;
use std::time::Duration;

use thunder_verbs::{Abort, Cable, Channel, ChannelOptions, Context, Error, Mode, Profile};

use super::{Closed, Interest, Link};
use crate::rendezvous::Stream;
use crate::{InitError, Transport};

/// The nap of a wait that spun in vain, doubled from the first to the last. Devices on macOS cannot wake a sleeper, so
/// a longer nap costs latency after a pause, a shorter one costs processor time while idle.
const NAPS_US: std::ops::RangeInclusive<u64> = 20..=1000;
/// How long a link that is dropped waits for its last frames to leave.
const DRAIN_LIMIT: Duration = Duration::from_secs(1);

/// Which devices lead to which ranks, and how they are used.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RdmaConfig {
    /// The names of this rank's devices towards each rank it is cabled to, a name per cable. Both ends must list their
    /// cables in the same order.
    pub devices: BTreeMap<usize, Vec<String>>,
    /// How bytes travel; the same on all ranks. `None`: the fastest that the platform has.
    pub mode: Option<Mode>,
}

impl RdmaConfig {
    /// Reads a device file, MLX's for JACCL: a list with a row per rank, which has an entry per rank, which is null, a
    /// device's name, or a list of names.
    ///
    /// # Errors
    /// When the file cannot be read or has another form.
    pub fn from_file(path: &Path, rank: usize) -> Result<Self, InitError> {
        let wrong = |why: String| InitError::Hostfile { path: path.to_owned(), why };
        let text = std::fs::read_to_string(path).map_err(|error| wrong(error.to_string()))?;
        let devices = parse_row(&text, rank).map_err(wrong)?;
        Ok(Self { devices, mode: None })
    }

    /// After a split: ranks have other numbers, or are not in the group.
    pub(crate) fn renumber(&mut self, number: impl Fn(usize) -> Option<usize>) {
        let devices = std::mem::take(&mut self.devices);
        self.devices = devices.into_iter().filter_map(|(old, names)| Some((number(old)?, names))).collect();
    }

    fn mode(&self) -> Mode {
        self.mode.unwrap_or(if Profile::native().reliable { Mode::RcWrite } else { Mode::Uc })
    }
}

fn parse_row(text: &str, rank: usize) -> Result<BTreeMap<usize, Vec<String>>, String> {
    #[derive(serde::Deserialize)]
    #[serde(untagged)]
    enum Entry {
        One(String),
        Many(Vec<String>),
    }
    let rows: Vec<Vec<Option<Entry>>> = serde_json::from_str(text).map_err(|error| {
        format!("{error}; write a row per rank with null, a device or a list of devices per rank")
    })?;
    let count = rows.len();
    let row =
        rows.into_iter().nth(rank).ok_or_else(|| format!("it has {count} rows, none for rank {rank}"))?;
    let names = |entry| match entry {
        Entry::One(name) => vec![name],
        Entry::Many(names) => names,
    };
    let cabled = row.into_iter().enumerate().filter_map(|(peer, entry)| Some((peer, names(entry?))));
    Ok(cabled.filter(|(peer, names)| *peer != rank && !names.is_empty()).collect())
}

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
    nap_us: u64,
    abandoned: bool,
}

impl RdmaLink {
    /// Connects over `devices` with the rank at the other end of `stream`, which does the same.
    pub fn connect(
        config: &RdmaConfig,
        peer: usize,
        devices: &[String],
        stream: &mut impl Stream,
    ) -> Result<Self, InitError> {
        let failed = |source: Error| InitError::Rdma { rank: peer, source };
        let cable = |name: &String| Ok(Cable { context: Context::open(name)?, local_address: None });
        let mut cables = devices.iter().map(cable).collect::<Result<Vec<_>, _>>().map_err(failed)?;
        Cable::find_addresses(&mut cables, stream).map_err(failed)?;
        let prepared = Channel::prepare(&cables, ChannelOptions::new(config.mode())).map_err(failed)?;
        // Liveness is the watch's, which ends the operation and not the link's wait: a link never waits.
        let channel = prepared.handshake(stream, Abort::new()).map_err(failed)?;
        Ok(Self { channel, shown: 0, nap_us: *NAPS_US.start(), abandoned: false })
    }

    fn moved(&mut self, count: usize) -> usize {
        if count > 0 {
            self.nap_us = *NAPS_US.start();
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

    fn arrived(&mut self, want: usize) -> Result<usize, Closed> {
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
        std::thread::sleep(Duration::from_micros(self.nap_us));
        self.nap_us = (self.nap_us * 2).min(*NAPS_US.end());
        false
    }

    fn disarm(&mut self) {}

    /// Nothing to poll: `arm` never lets a rank sleep on it.
    fn descriptors(&self, _interest: Interest, _set: &mut Vec<libc::pollfd>) {}

    fn reports_end(&self) -> bool {
        false
    }

    fn is_examined(&self) -> bool {
        true
    }

    fn examine(&mut self, lasts: bool) -> Result<(), Closed> {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_split_renumbers_the_cables_and_drops_those_that_lead_out() {
        let devices = [(1, "a"), (2, "b"), (3, "c")].map(|(peer, name)| (peer, vec![name.to_string()]));
        let mut config = RdmaConfig { devices: devices.into(), mode: None };
        config.renumber(|old| [3, 0, 1].iter().position(|rank| *rank == old));
        assert_eq!(config.devices, BTreeMap::from([(0, vec!["c".to_string()]), (2, vec!["a".to_string()])]));
    }

    #[test]
    fn device_files_hold_null_a_name_or_a_list() {
        let text = r#"[[null, "rdma_en2", null], [["rdma_en4", "rdma_en5"], null, []], [null, null, null]]"#;
        let names = |names: &[&str]| names.iter().map(|name| name.to_string()).collect::<Vec<_>>();
        assert_eq!(parse_row(text, 0).unwrap(), BTreeMap::from([(1, names(&["rdma_en2"]))]));
        assert_eq!(parse_row(text, 1).unwrap(), BTreeMap::from([(0, names(&["rdma_en4", "rdma_en5"]))]));
        assert_eq!(parse_row(text, 2).unwrap(), BTreeMap::new());
        assert!(parse_row(text, 3).unwrap_err().contains("3 rows"));
        assert!(parse_row("{}", 0).unwrap_err().contains("a row per rank"));
    }
}
