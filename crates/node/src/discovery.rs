//! Finds nodes on the local network by multicast DNS (service `_thunderhead._tcp`), on all
//! interfaces, even if they have only link-local addresses.
//!
//! The results are hints. A node proves its identity with its key, in the handshake.

use std::net::{SocketAddr, SocketAddrV6};
use std::time::Duration;

use mdns_sd::{ResolvedService, ScopedIp, ServiceDaemon, ServiceEvent, ServiceInfo};
use tokio::sync::mpsc;

use crate::id::NodeId;
use crate::joining::server::check_name;

const SERVICE: &str = "_thunderhead._tcp.local.";
/// Times between queries. The library waits 1 s, 2 s, 4 s …; the first queries may get lost while
/// an interface comes up. The last time is repeated.
const ASK_AFTER: [Duration; 5] = [
    Duration::from_millis(300),
    Duration::from_millis(500),
    Duration::from_secs(1),
    Duration::from_secs(2),
    Duration::from_secs(60),
];
/// Interval at which interfaces are checked for new addresses.
const INTERFACES_EVERY_S: u32 = 1;
/// Maximum addresses of one node.
const MOST_ADDRESSES: usize = 16;
/// Maximum found nodes that wait to be recorded.
const WAITING: usize = 64;

/// A node that announces itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Found {
    /// Its key, by its own account.
    pub id: NodeId,
    /// Its name, by its own account.
    pub name: String,
    /// Whether it is in no cluster, and shows a code.
    pub alone: bool,
    /// Where it listens. Link-local IPv6 addresses include the interface on which they were heard.
    pub addresses: Vec<SocketAddr>,
}

/// What this node announces.
#[derive(Debug, Clone)]
pub struct Announcement {
    /// This node.
    pub id: NodeId,
    /// Its name.
    pub name: String,
    /// Its port.
    pub port: u16,
    /// Its addresses; empty: those of all interfaces, even when they change.
    pub addresses: Vec<std::net::IpAddr>,
}

/// Announces this node and finds others, until dropped.
pub struct Discovery {
    daemon: ServiceDaemon,
    announcement: Announcement,
}

impl Discovery {
    /// Starts. Found nodes come out of the receiver, and again when their data changes.
    ///
    /// # Errors
    /// If the system refuses a socket.
    pub fn start(
        announcement: Announcement,
        alone: bool,
    ) -> Result<(Self, mpsc::Receiver<Found>), mdns_sd::Error> {
        let daemon = ServiceDaemon::new()?;
        daemon.set_ip_check_interval(INTERFACES_EVERY_S)?;
        let (sender, receiver) = mpsc::channel(WAITING);
        tokio::spawn(browse(daemon.clone(), announcement.id, sender));
        let discovery = Self { daemon, announcement };
        discovery.announce(alone)?;
        Ok((discovery, receiver))
    }

    /// Announces this node, replacing the earlier announcement.
    ///
    /// # Errors
    /// If the daemon has ended.
    pub fn announce(&self, alone: bool) -> Result<(), mdns_sd::Error> {
        let Announcement { id, name, port, addresses } = &self.announcement;
        let (full, short) = (id.to_string(), id.short());
        let properties = [("id", full.as_str()), ("name", name), ("alone", if alone { "1" } else { "0" })];
        // The key makes the names unique, not the machine's name, because two nodes may share a
        // machine.
        let host = format!("thunder-{short}.local.");
        let service = ServiceInfo::new(SERVICE, &short, &host, &addresses[..], *port, &properties[..])?;
        self.daemon.register(if addresses.is_empty() { service.enable_addr_auto() } else { service })
    }
}

impl Drop for Discovery {
    fn drop(&mut self) {
        // If this fails, the daemon ends with the process.
        let _ = self.daemon.shutdown();
    }
}

async fn browse(daemon: ServiceDaemon, me: NodeId, found: mpsc::Sender<Found>) {
    let mut waits = ASK_AFTER.iter().copied().chain(std::iter::repeat(ASK_AFTER[ASK_AFTER.len() - 1]));
    while let (Some(wait), Ok(events)) = (waits.next(), daemon.browse(SERVICE)) {
        let again = tokio::time::Instant::now() + wait;
        while let Ok(Ok(event)) = tokio::time::timeout_at(again, events.recv_async()).await {
            let ServiceEvent::ServiceResolved(service) = event else { continue };
            let Some(node) = read(&service).filter(|node| node.id != me) else { continue };
            if found.send(node).await.is_err() {
                return;
            }
        }
        // The daemon closes the receiver when it ends; the pause prevents spinning.
        tokio::time::sleep_until(again).await;
    }
}

/// The node that a service describes; `None` if the description is not one of ours.
fn read(service: &ResolvedService) -> Option<Found> {
    let property = |name| service.txt_properties.get_property_val_str(name);
    let id = property("id")?.parse().ok()?;
    let name = check_name(property("name")?.to_owned()).ok()?;
    let mut addresses: Vec<SocketAddr> =
        service.addresses.iter().map(|address| with_port(address, service.port)).collect();
    addresses.sort();
    addresses.truncate(MOST_ADDRESSES);
    Some(Found { id, name, alone: property("alone") == Some("1"), addresses })
}

fn with_port(address: &ScopedIp, port: u16) -> SocketAddr {
    match address {
        // Without the interface, the system would not know where to send packets.
        ScopedIp::V6(v6) if v6.addr().is_unicast_link_local() => {
            SocketAddrV6::new(*v6.addr(), port, 0, v6.scope_id().index).into()
        }
        other => SocketAddr::new(other.to_ip_addr(), port),
    }
}
