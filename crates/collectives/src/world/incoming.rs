//! The connections that higher ranks make to this one.

use std::collections::{BTreeMap, BTreeSet};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::sync::mpsc::{self, Receiver};
use std::time::Instant;

use super::bound_endpoint::BoundEndpoint;
use super::dial::{ConnectionRequest, Purpose};
use super::shared_memory;
use super::topology::Topology;
use crate::forming::Reports;
use crate::rendezvous::Listener;
use crate::{Config, FormingEvent, InitError};

/// Both listeners of this rank, and the connections that they have accepted, in any order.
pub(super) struct IncomingConnections {
    tcp: Receiver<(TcpStream, Vec<u8>)>,
    local: Receiver<(UnixStream, Vec<u8>)>,
    _tcp_listener: Listener,
    _local_listener: Listener,
}

impl IncomingConnections {
    pub fn listen(config: &Config, bound: BoundEndpoint) -> Result<Self, InitError> {
        let (tcp_sender, tcp) = mpsc::channel();
        let (local_sender, local) = mpsc::channel();
        let failed = InitError::system("connections cannot be accepted");
        let tcp_listener =
            Listener::tcp(bound.tcp, config.secret.clone(), tcp_sender, config.observer.clone())
                .map_err(failed)?;
        let failed = InitError::system("local connections cannot be accepted");
        let local_listener =
            shared_memory::listen(bound.local, config.secret.clone(), local_sender, config.observer.clone())
                .map_err(failed)?;
        Ok(Self { tcp, local, _tcp_listener: tcp_listener, _local_listener: local_listener })
    }

    /// Waits for the TCP connections of all higher ranks.
    pub fn tcp_connections(
        &self,
        topology: &Topology<'_>,
        deadline: Instant,
    ) -> Result<BTreeMap<(usize, Purpose), TcpStream>, InitError> {
        let mut missing: BTreeSet<(usize, Purpose)> = BTreeSet::new();
        for peer in higher_ranks(topology) {
            missing.insert((peer, Purpose::Liveness));
            if !topology.shares_memory(peer) {
                missing.extend((0..topology.connections(peer)).map(|index| (peer, Purpose::Data(index))));
            }
        }
        let mut connections = BTreeMap::new();
        let mut reports = Reports::new(topology.config.observer.as_ref(), deadline);
        while !missing.is_empty() {
            let Ok((stream, hello)) = self.tcp.recv_timeout(reports.pause()) else {
                let mut ranks: Vec<usize> = missing.iter().map(|(peer, _)| *peer).collect();
                ranks.dedup();
                if reports.left().is_zero() {
                    return Err(missing_error(topology, ranks));
                }
                let port = own_port(topology);
                reports.due(false, |left| FormingEvent::Unconnected { ranks, port, left });
                continue;
            };
            let Some(request) = parse(topology, &hello) else { continue };
            let key = (request.from, request.purpose);
            if missing.remove(&key) {
                connections.insert(key, stream);
            }
        }
        Ok(connections)
    }

    /// Waits for the local connections of all higher ranks of this host; `accept` gets each.
    pub fn local_connections(
        &self,
        topology: &Topology<'_>,
        deadline: Instant,
        mut accept: impl FnMut(usize, UnixStream) -> Result<(), InitError>,
    ) -> Result<(), InitError> {
        let mut missing: BTreeSet<usize> =
            higher_ranks(topology).filter(|peer| topology.shares_memory(*peer)).collect();
        while !missing.is_empty() {
            let left = deadline.saturating_duration_since(Instant::now());
            let Ok((stream, hello)) = self.local.recv_timeout(left) else {
                return Err(missing_error(topology, missing.into_iter().collect()));
            };
            let Some(request) = parse(topology, &hello) else { continue };
            if missing.remove(&request.from) {
                accept(request.from, stream)?;
            }
        }
        Ok(())
    }
}

fn higher_ranks(topology: &Topology<'_>) -> impl Iterator<Item = usize> + use<> {
    topology.config.rank + 1..topology.table.len()
}

/// The request in `hello`, if it is for this rank and this group.
fn parse(topology: &Topology<'_>, hello: &[u8]) -> Option<ConnectionRequest> {
    let request: ConnectionRequest = serde_json::from_slice(hello).ok()?;
    (request.session == topology.session() && request.to == topology.config.rank).then_some(request)
}

fn missing_error(topology: &Topology<'_>, ranks: Vec<usize>) -> InitError {
    InitError::NotConnected { ranks, port: own_port(topology), after: topology.config.rendezvous_limit }
}

fn own_port(topology: &Topology<'_>) -> u16 {
    topology.table[topology.config.rank].port
}
