//! The paths between two nodes: each pair of interfaces over which one node reaches the other. The
//! destination address decides which path a packet takes, so every address is tried.

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use tokio::net::TcpStream;
use tokio::task::JoinSet;
use tokio_rustls::client::TlsStream;

use super::super::Agent;
use super::super::calls::{Call, CallReply};
use super::{LIMIT, describe, interface_of, send_and_time};
use crate::id::NodeId;
use crate::report::PathReport;
use crate::tls::Protocol;

/// Maximum paths to a node that are measured. A machine has few interfaces, but may have many
/// addresses.
const MOST_PATHS: usize = 4;
/// Time for further addresses after one has answered: unreachable addresses never answer.
const OTHERS_LIMIT: Duration = Duration::from_secs(1);
/// Paths count as equally fast if the ratio of their bandwidths is at least this.
const AS_GOOD: f64 = 0.8;

/// A connection over a path that is not measured yet.
struct Open {
    /// Its index among the addresses, and the address.
    place: usize,
    address: String,
    near: IpAddr,
    far: IpAddr,
    /// The other node's interface; its address if the node's version does not report it.
    far_interface: String,
    stream: TlsStream<TcpStream>,
}

impl Agent {
    /// Measures the paths to a node, each for this time. Returns the best one first.
    pub(super) async fn measure_paths(
        &self,
        to: NodeId,
        sending: Duration,
    ) -> Result<Vec<PathReport>, String> {
        let (mut paths, mut failure) = (Vec::new(), None);
        for mut open in self.open_paths(to, sending).await? {
            let measured = tokio::time::timeout(LIMIT, send_and_time(&mut open.stream, sending)).await;
            let (latency, bytes_s) = match measured {
                Ok(Ok(figures)) => figures,
                Ok(Err(error)) => {
                    failure = Some(format!("{}: {error}", open.address));
                    continue;
                }
                Err(_) => {
                    failure = Some(format!("{}: not done within {LIMIT:?}", open.address));
                    continue;
                }
            };
            let (interface, kind, claimed_bits_s) = interface_of(open.near, open.far);
            let (address, far_interface) = (open.address, open.far_interface);
            let latency_us = latency.as_micros() as u64;
            paths.push(PathReport {
                address,
                interface,
                far_interface,
                kind,
                claimed_bits_s,
                latency_us,
                bytes_s,
            });
        }
        best_first(&mut paths);
        match failure {
            Some(why) if paths.is_empty() => Err(why),
            _ => Ok(paths),
        }
    }

    /// A connection for each path, in the order of the node's addresses.
    async fn open_paths(&self, to: NodeId, sending: Duration) -> Result<Vec<Open>, String> {
        let addresses = self.addresses_of(&self.lock(), &to);
        let mut opening = JoinSet::new();
        for (place, address) in addresses.into_iter().enumerate() {
            let agent = self.clone();
            opening.spawn(async move { agent.open_path(to, place, address, sending).await });
        }
        let (mut open, mut refused) = (Vec::new(), None);
        loop {
            let next = opening.join_next();
            let next = if open.is_empty() {
                next.await
            } else {
                // Dropping the set ends the other attempts.
                let Ok(next) = tokio::time::timeout(OTHERS_LIMIT, next).await else { break };
                next
            };
            match next {
                Some(Ok(Ok(Some(path)))) => open.push(path),
                Some(Ok(Err(why))) => refused = Some(why),
                Some(_) => {}
                None => break,
            }
        }
        if open.is_empty() {
            return Err(refused.unwrap_or_else(|| format!("{} cannot be reached", self.name_of(&to))));
        }
        open.sort_by_key(|path| path.place);
        // IPv4 and IPv6 over the same cable are one path.
        let mut seen = BTreeSet::new();
        open.retain(|path| seen.insert((interface_of(path.near, path.far).0, path.far_interface.clone())));
        open.truncate(MOST_PATHS);
        Ok(open)
    }

    /// Connects to one address; `None` if it does not answer.
    async fn open_path(
        &self,
        to: NodeId,
        place: usize,
        address: String,
        sending: Duration,
    ) -> Result<Option<Open>, String> {
        let dialed = self.dial(to, Protocol::Call, None, vec![address.clone()]).await;
        let Some((mut stream, remote)) = dialed else { return Ok(None) };
        let call = Call::Measure { sending_ms: sending.as_millis() as u64, tells_interface: true };
        let far = remote.ip().to_canonical();
        let far_interface =
            match self.ask_over(to, &mut stream, &call, super::super::calls::CALL_LIMIT).await? {
                CallReply::MeasuringAt { interface } => interface,
                CallReply::Measuring => far.to_string(),
                _ => return Err(format!("{} is of a version that measures no links", self.name_of(&to))),
            };
        let near = stream.get_ref().0.local_addr().map_err(|error| error.to_string())?.ip().to_canonical();
        Ok(Some(Open { place, address, near, far, far_interface, stream }))
    }

    /// The address for calls to a node: that of the best path, if it was measured.
    pub(in crate::agent) fn preferred_address(&self, to: &NodeId) -> Option<String> {
        let links = self.measured();
        let link = links.iter().find(|link| link.to == *to)?;
        // With a single path, all addresses are tried at once.
        (link.paths.len() > 1).then(|| link.paths[0].address.clone())
    }

    /// This node's interfaces over which other nodes were reached, the fastest first.
    pub(in crate::agent) fn measured_interfaces(&self) -> Vec<String> {
        let mut rates: Vec<(u64, String)> = Vec::new();
        for path in self.measured().iter().flat_map(|link| &link.paths) {
            match rates.iter_mut().find(|(_, name)| *name == path.interface) {
                Some((rate, _)) => *rate = path.bytes_s.max(*rate),
                None => rates.push((path.bytes_s, path.interface.clone())),
            }
        }
        rates.sort_by_key(|(rate, _)| std::cmp::Reverse(*rate));
        rates.into_iter().map(|(_, name)| name).collect()
    }
}

/// Puts the path to use first: among those that are about as fast as the fastest, the one whose
/// interface claims most, then the one with the shortest round trip.
fn best_first(paths: &mut [PathReport]) {
    paths.sort_by_key(|path| std::cmp::Reverse(path.bytes_s));
    let most = paths.first().map_or(0, |path| path.bytes_s) as f64;
    let good = paths.iter().take_while(|path| path.bytes_s as f64 >= most * AS_GOOD).count();
    paths[..good].sort_by_key(|path| (std::cmp::Reverse(path.claimed_bits_s), path.latency_us));
}

/// The interfaces of this machine with their addresses and states. When this changes, links are
/// measured again.
pub(super) fn own_interfaces() -> BTreeSet<String> {
    let interfaces = if_addrs::get_if_addrs().unwrap_or_default();
    let usable = interfaces.into_iter().filter(|interface| !interface.is_loopback());
    usable
        .map(|interface| {
            let (_, claimed) = describe(&interface.name);
            format!("{} {} {claimed:?} {:?}", interface.name, interface.ip(), interface.oper_status)
        })
        .collect()
}

/// The interface at which a connection ends here.
pub(in crate::agent) fn interface_at(near: std::io::Result<SocketAddr>, far: SocketAddr) -> String {
    near.map_or_else(
        |_| "?".to_owned(),
        |near| interface_of(near.ip().to_canonical(), far.ip().to_canonical()).0,
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::LinkKind;

    fn path(interface: &str, bytes_s: u64, claimed: Option<u64>, latency_us: u64) -> PathReport {
        PathReport {
            address: String::new(),
            interface: interface.to_owned(),
            far_interface: "eth0".to_owned(),
            kind: LinkKind::Ethernet,
            claimed_bits_s: claimed,
            latency_us,
            bytes_s,
        }
    }

    #[test]
    fn the_fastest_way_is_first_and_of_equals_the_one_with_more_to_give() {
        let order = |mut paths: Vec<PathReport>| {
            best_first(&mut paths);
            paths.into_iter().map(|path| path.interface).collect::<Vec<_>>()
        };
        assert_eq!(order(vec![path("wifi", 50, None, 9), path("lan", 110, None, 20)]), ["lan", "wifi"]);
        // Both paths are limited by the core of a TLS connection.
        let (lan, cable) = (path("lan", 1000, Some(10), 5), path("cable", 900, Some(40), 9));
        assert_eq!(order(vec![lan.clone(), path("slow", 1, Some(99), 1), cable]), ["cable", "lan", "slow"]);
        assert_eq!(order(vec![lan, path("near", 990, Some(10), 2)]), ["near", "lan"]);
        assert_eq!(order(Vec::new()), Vec::<String>::new());
    }
}
