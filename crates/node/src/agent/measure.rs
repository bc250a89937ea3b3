//! Measures links between members: round trips and bandwidth of a TLS connection as calls use it,
//! bandwidth of several connections as pulls use them, and the speed that the interface claims.

pub(super) mod paths;
pub(super) mod ranks;

use std::collections::{BTreeMap, BTreeSet};
use std::io::{Read as _, Write as _};
use std::net::IpAddr;
use std::time::{Duration, Instant};

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::task::JoinSet;

use super::Agent;
use super::bulk::{self, ClientStream};
use super::calls::{Call, CallReply};
use crate::gate::Connection;
use crate::id::NodeId;
use crate::report::{LinkKind, LinkReport};
use crate::wire::{self, WireError};

/// Number of timed round trips; their median counts.
const ROUND_TRIPS: usize = 15;
/// Bytes of a piece.
const PIECE_BYTES: usize = 64 << 10;
/// Number of simultaneous connections, as for a pull of one file.
const SEVERAL: usize = 4;
/// Bytes of a piece on one of several connections.
const BULK_PIECE_BYTES: usize = 64 << 10;
/// Time of sending when a link is new. Longer is more exact, and disturbs more.
pub(super) const FIRST_LOOK: Duration = Duration::from_millis(150);
/// Time of sending on request of a person.
pub(super) const CLOSE_LOOK: Duration = Duration::from_millis(400);
/// Time limit of a measurement on request, including ranks.
pub(super) const CLOSE_LOOK_LIMIT: Duration = Duration::from_secs(20);
/// Maximum time of sending to which a node agrees.
const LONGEST: Duration = Duration::from_secs(2);
/// Time for a measurement, including its round trips.
const LIMIT: Duration = Duration::from_secs(10);
/// A new link settles before it is measured, because nodes send each other much at first.
const SETTLE: Duration = Duration::from_secs(10);
/// Time without changes of interfaces and addresses before links are measured again: a cable that
/// is plugged in gets its addresses one after the other.
const SETTLE_AGAIN: Duration = Duration::from_secs(3);
/// Interval at which unmeasured links and changed interfaces are looked for.
const LOOK_EVERY: Duration = Duration::from_secs(2);

/// All pairs of `count` nodes, in rounds in which each node is in at most one pair, because
/// simultaneous measurements would slow each other down. Each round rotates all places but the
/// first by one.
pub(super) fn rounds(count: usize) -> Vec<Vec<(usize, usize)>> {
    let places = count + count % 2;
    let at = |round: usize, place: usize| match place {
        0 => 0,
        _ => 1 + (place - 1 + round) % (places - 1),
    };
    let pairs = |round: usize| {
        let pair = |place: usize| (at(round, place), at(round, places - 1 - place));
        (0..places / 2).map(pair).filter(|(one, other)| *one < count && *other < count).collect()
    };
    (1..places).map(|round| pairs(round - 1)).collect()
}

/// What is known about the link to a node that is up.
struct Watched {
    /// This node's interfaces and the other node's addresses, and since when they have been the
    /// same.
    ends: BTreeSet<String>,
    since: Instant,
    /// Whether the link was measured with these ends.
    is_measured: bool,
}

impl Agent {
    /// Measures each link after it has come up, and again when an interface or an address of its
    /// ends has appeared or disappeared, one link at a time.
    pub(super) async fn keep_links_measured(self) {
        let mut watched = BTreeMap::<NodeId, Watched>::new();
        loop {
            tokio::time::sleep(LOOK_EVERY).await;
            let up: Vec<NodeId> = {
                let state = self.lock();
                state.membership.peers().filter(|(_, peer)| peer.up).map(|(id, _)| id).collect()
            };
            watched.retain(|id, _| up.contains(id));
            self.measured().retain(|link| up.contains(&link.to));
            let own = if up.is_empty() { BTreeSet::new() } else { paths::own_interfaces() };
            for id in up {
                let mut ends = own.clone();
                ends.extend(self.addresses_of(&self.lock(), &id));
                let new = || Watched { ends: ends.clone(), since: Instant::now(), is_measured: false };
                let link = watched.entry(id).or_insert_with(new);
                if link.ends != ends {
                    *link = new();
                }
                let is_known = self.measured().iter().any(|link| link.to == id);
                let settle = if is_known { SETTLE_AGAIN } else { SETTLE };
                if link.is_measured || link.since.elapsed() < settle {
                    continue;
                }
                match self.measure(id, FIRST_LOOK).await {
                    Ok(_) => link.is_measured = true,
                    Err(why) => {
                        tracing::debug!("the link to {} cannot be measured: {why}", self.name_of(&id));
                        // Tried again after another pause.
                        link.since = Instant::now();
                    }
                }
            }
        }
    }

    /// Makes a node measure its link to another node, on request of a person.
    pub(super) async fn measure_from(&self, from: NodeId, to: NodeId) -> Result<LinkReport, String> {
        if from == self.0.id {
            return self.measure(to, CLOSE_LOOK).await;
        }
        match self.call_within(from, &Call::MeasureLink(to), CLOSE_LOOK_LIMIT).await?.0 {
            CallReply::Measured(link) => Ok(link),
            _ => Err(format!("{}: a strange reply", self.name_of(&from))),
        }
    }

    /// Waits until this node has heard of links that other nodes have measured: reports come over
    /// other connections than replies.
    pub(super) async fn until_heard(&self, measured: &[(NodeId, LinkReport)]) {
        let mut changes = self.changes();
        loop {
            changes.mark_unchanged();
            let members = self.status().members;
            let is_heard = |(from, link): &(NodeId, LinkReport)| {
                let member = members.iter().find(|member| member.id == *from);
                let report = member.and_then(|member| member.report.as_ref());
                report.is_some_and(|report| report.links.contains(link))
            };
            if measured.iter().all(is_heard) || changes.changed().await.is_err() {
                return;
            }
        }
    }

    fn measured(&self) -> std::sync::MutexGuard<'_, Vec<LinkReport>> {
        self.0.measured.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    /// The measured links of this node.
    pub(super) fn measured_links(&self) -> Vec<LinkReport> {
        self.measured().clone()
    }

    /// Measures the paths from this node to another, sending over each for some time. If this is
    /// the time for a person's request, also measures several connections and two ranks over the
    /// best path.
    pub(super) async fn measure(&self, to: NodeId, sending: Duration) -> Result<LinkReport, String> {
        let paths = self.measure_paths(to, sending).await?;
        let best =
            paths.first().cloned().ok_or_else(|| format!("{} cannot be reached", self.name_of(&to)))?;
        let known = self.measured().iter().find(|link| link.to == to).cloned();
        // Earlier figures of a person's request are still valid for the same path.
        let same = known.filter(|known| known.paths.first().is_some_and(|path| path.address == best.address));
        let (several_bytes_s, ranks) = same.map_or((None, None), |link| (link.several_bytes_s, link.ranks));
        let mut link = LinkReport {
            to,
            latency_us: best.latency_us,
            bytes_s: best.bytes_s,
            several_bytes_s,
            ranks,
            interface: best.interface,
            kind: best.kind,
            claimed_bits_s: best.claimed_bits_s,
            paths,
        };
        // From now on calls use the best path, including the calls of the following measurements.
        self.keep_link(link.clone());
        if sending >= CLOSE_LOOK {
            link.several_bytes_s = self.measure_several(to, sending).await;
            // Both directions are one measurement.
            link.ranks = if to < self.0.id { None } else { self.measure_ranks(to).await };
            self.keep_link(link.clone());
        }
        if sending >= CLOSE_LOOK {
            // A person waits for the result.
            let mut state = self.lock();
            self.report_ranks(&mut state, None);
            self.settle(&mut state);
        }
        Ok(link)
    }
}

impl Agent {
    fn keep_link(&self, link: LinkReport) {
        let mut all = self.measured();
        all.retain(|known| known.to != link.to);
        all.push(link);
    }

    /// Bytes per second over several connections at once, each with a core of its own at both ends;
    /// `None` if the other node does not support this.
    async fn measure_several(&self, to: NodeId, sending: Duration) -> Option<u64> {
        let mut streams = Vec::new();
        for _ in 0..SEVERAL {
            let (reply, stream) = self.call(to, &Call::MeasureBulk).await.ok()?;
            matches!(reply, CallReply::Measuring).then_some(())?;
            streams.push(bulk::client(stream).ok()?);
        }
        let mut sendings = JoinSet::new();
        for mut stream in streams {
            sendings.spawn_blocking(move || send_bulk(&mut stream, sending));
        }
        let rates = tokio::time::timeout(LIMIT, sendings.join_all()).await.ok()?;
        rates.into_iter().collect::<std::io::Result<Vec<u64>>>().ok().map(|rates| rates.iter().sum())
    }

    /// The receiving side of one of several connections.
    pub(super) async fn receive_bulk(&self, mut connection: Connection) -> Result<(), WireError> {
        wire::send(&mut connection.stream, &CallReply::Measuring).await?;
        let received = self.serve_blocking(connection, |stream| {
            stream.sock.set_limits(Some(LONGEST), Some(LONGEST))?;
            time_bulk(stream)
        });
        Ok(received.await?)
    }
}

/// Sends pieces for some time. Returns the bytes per second that the other side has received.
fn send_bulk(stream: &mut ClientStream, sending: Duration) -> std::io::Result<u64> {
    stream.sock.set_limits(Some(LIMIT), Some(LIMIT))?;
    // A piece begins with 1; 0 is the end.
    let (piece, began) = ([1; BULK_PIECE_BYTES], Instant::now());
    while began.elapsed() < sending {
        stream.write_all(&piece)?;
    }
    stream.write_all(&[0; BULK_PIECE_BYTES])?;
    stream.flush()?;
    let mut rate = [0; 8];
    stream.read_exact(&mut rate)?;
    Ok(u64::from_le_bytes(rate))
}

/// Receives and times what [`send_bulk`] sends.
fn time_bulk(stream: &mut (impl std::io::Read + std::io::Write)) -> std::io::Result<()> {
    let mut piece = vec![0; BULK_PIECE_BYTES];
    let (mut bytes, began) = (0, Instant::now());
    while began.elapsed() < LIMIT {
        stream.read_exact(&mut piece)?;
        if piece[0] == 0 {
            break;
        }
        bytes += BULK_PIECE_BYTES as u64;
    }
    let rate = (bytes as f64 / began.elapsed().as_secs_f64().max(1e-6)) as u64;
    stream.write_all(&rate.to_le_bytes())?;
    stream.flush()
}

/// The measuring side. Returns the median round trip, and bytes per second.
async fn send_and_time(
    stream: &mut (impl AsyncRead + AsyncWrite + Unpin),
    sending: Duration,
) -> std::io::Result<(Duration, u64)> {
    let mut trips = Vec::new();
    for _ in 0..ROUND_TRIPS {
        let began = Instant::now();
        stream.write_all(&[1; 8]).await?;
        stream.flush().await?;
        stream.read_exact(&mut [0; 8]).await?;
        trips.push(began.elapsed());
    }
    trips.sort();
    let piece = vec![0x5a; PIECE_BYTES];
    let began = Instant::now();
    while began.elapsed() < sending {
        stream.write_u32_le(PIECE_BYTES as u32).await?;
        stream.write_all(&piece).await?;
    }
    stream.write_u32_le(0).await?;
    stream.flush().await?;
    Ok((trips[ROUND_TRIPS / 2], stream.read_u64_le().await?))
}

/// The other side of a measurement.
///
/// # Errors
/// If the connection fails, or the data is not a measurement.
pub(super) async fn receive_and_time(
    stream: &mut (impl AsyncRead + AsyncWrite + Unpin),
    sending_ms: u64,
) -> std::io::Result<()> {
    let receive = async {
        let mut trip = [0; 8];
        for _ in 0..ROUND_TRIPS {
            stream.read_exact(&mut trip).await?;
            stream.write_all(&trip).await?;
            stream.flush().await?;
        }
        let mut piece = vec![0; PIECE_BYTES];
        // Counts from the end of the first piece, because everything before it waited for the
        // sender.
        let (mut bytes, mut began) = (0u64, None);
        loop {
            let length = stream.read_u32_le().await? as usize;
            if length == 0 {
                break;
            }
            let piece = piece.get_mut(..length).ok_or(std::io::ErrorKind::InvalidData)?;
            stream.read_exact(piece).await?;
            match began {
                None => began = Some(Instant::now()),
                Some(_) => bytes += length as u64,
            }
        }
        let seconds = began.map_or(1.0, |began: Instant| began.elapsed().as_secs_f64()).max(1e-6);
        stream.write_u64_le((bytes as f64 / seconds) as u64).await?;
        stream.flush().await
    };
    let limit = LIMIT + Duration::from_millis(sending_ms).min(LONGEST);
    tokio::time::timeout(limit, receive).await.unwrap_or_else(|_| Err(std::io::ErrorKind::TimedOut.into()))
}

/// The interface with an address, its kind, and the bits per second that it claims.
fn interface_of(near: IpAddr, far: IpAddr) -> (String, LinkKind, Option<u64>) {
    if near.is_loopback() || near == far {
        return ("lo".to_owned(), LinkKind::Loopback, None);
    }
    let interfaces = if_addrs::get_if_addrs().unwrap_or_default();
    let name = interfaces.into_iter().find(|interface| interface.ip() == near).map(|found| found.name);
    let Some(name) = name else { return ("?".to_owned(), LinkKind::Unknown, None) };
    let (kind, claimed) = describe(&name);
    (name, kind, claimed)
}

#[cfg(target_os = "linux")]
fn describe(name: &str) -> (LinkKind, Option<u64>) {
    let folder = std::path::Path::new("/sys/class/net").join(name);
    let text = |file: &str| std::fs::read_to_string(folder.join(file)).unwrap_or_default();
    let driver = std::fs::read_link(folder.join("device/driver")).unwrap_or_default();
    let driver = driver.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let kind = if folder.join("wireless").exists() || folder.join("phy80211").exists() {
        LinkKind::WiFi
    } else if driver.contains("thunderbolt") {
        LinkKind::Thunderbolt
    } else if text("type").trim() == "32" {
        LinkKind::InfiniBand
    } else if folder.join("device").exists() {
        LinkKind::Ethernet
    } else {
        LinkKind::Virtual
    };
    // Virtual interfaces report -1 or a meaningless number.
    let speed = text("speed").trim().parse::<u64>().ok().filter(|_| kind != LinkKind::Virtual);
    (kind, speed.map(|megabits| megabits * 1_000_000))
}

#[cfg(not(target_os = "linux"))]
fn describe(name: &str) -> (LinkKind, Option<u64>) {
    use thunder_cables::machine::Kind;
    // This is macOS's name of the bridge over Thunderbolt ports.
    let kind = match thunder_cables::lan::Kinds::read().of(name) {
        Kind::Thunderbolt | Kind::Bridge => LinkKind::Thunderbolt,
        Kind::Ethernet => LinkKind::Ethernet,
        Kind::WiFi => LinkKind::WiFi,
        Kind::Other => LinkKind::Unknown,
    };
    (kind, None)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
    use super::*;

    fn run<T>(work: impl Future<Output = T>) -> T {
        tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap().block_on(work)
    }

    #[test]
    fn both_sides_of_a_measurement_agree_and_garbage_ends_it() {
        let (near, far) = run(async {
            let (mut near, mut far) = tokio::io::duplex(1 << 20);
            tokio::join!(send_and_time(&mut near, Duration::from_millis(30)), receive_and_time(&mut far, 30))
        });
        let (latency, bytes_s) = near.unwrap();
        far.unwrap();
        assert!(latency < Duration::from_millis(100) && bytes_s > 1 << 20, "{latency:?}, {bytes_s} bytes/s");
        let error = run(async {
            let (mut near, mut far) = tokio::io::duplex(1 << 20);
            near.write_all(&[0xff; 8 * ROUND_TRIPS + 4]).await.unwrap();
            receive_and_time(&mut far, 30).await.unwrap_err()
        });
        assert_eq!(error.kind(), std::io::ErrorKind::InvalidData);
    }

    #[test]
    fn each_pair_is_measured_once_and_no_node_twice_at_a_time() {
        assert_eq!((rounds(0), rounds(1)), (vec![], vec![vec![]]));
        for count in 2..12 {
            let mut all = std::collections::BTreeSet::new();
            for round in rounds(count) {
                let mut busy = std::collections::BTreeSet::new();
                for (one, other) in round {
                    assert!(busy.insert(one) && busy.insert(other), "{count} nodes");
                    assert!(all.insert((one.min(other), one.max(other))), "{count} nodes");
                }
            }
            assert_eq!(all.len(), count * (count - 1) / 2, "{count} nodes");
        }
    }

    #[test]
    fn loopback_is_known() {
        let localhost = IpAddr::from([127, 0, 0, 1]);
        assert_eq!(interface_of(localhost, localhost).1, LinkKind::Loopback);
    }
}
