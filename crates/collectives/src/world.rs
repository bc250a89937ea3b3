//! The connections of a group: one rank's data link and liveness connection to each other rank.

mod bound_endpoint;
mod dial;
mod incoming;
mod shared_memory;
mod topology;

pub(crate) use bound_endpoint::{BoundEndpoint, hex};

use std::collections::BTreeMap;
use std::fs::File;
use std::net::TcpStream;
use std::time::Instant;

use crate::link::Link;
use crate::link::board::{Board, board_bytes};
use crate::link::rdma::{RdmaLink, addresses_of};
use crate::link::tcp::{Sealed, TcpLink};
use crate::platform::{self, Mapping};
use crate::rendezvous::{Endpoint, HandshakeStream};
use crate::watch::Watch;
use crate::{Config, InitError, RdmaConfig};
use dial::{ConnectionRequest, Purpose, dial};
use incoming::IncomingConnections;
use topology::Topology;

/// The connections of one rank to all others.
pub(crate) struct World {
    /// One link per rank; `None` at this rank's own index.
    pub links: Vec<Option<Box<dyn Link>>>,
    /// The ranks by host, where they share memory; otherwise each rank is a host of its own. Hosts
    /// are in the order of their lowest ranks.
    pub hosts: Vec<Vec<usize>>,
    /// The board of this host's ranks, if there are several and shared memory is allowed.
    pub board: Option<Board>,
    pub watch: Watch,
    /// Ranks on this rank's host, including itself.
    pub local_ranks: usize,
}

/// Connects this rank with all others in `table`. The higher rank of a pair dials the lower one.
pub(crate) fn form(config: &Config, bound: BoundEndpoint, table: &[Endpoint]) -> Result<World, InitError> {
    let deadline = Instant::now() + config.rendezvous_limit;
    let config = &with_cables(config, &bound.endpoint, table);
    let topology = Topology::new(config, table)?;
    let incoming = IncomingConnections::listen(config, bound)?;
    let hosts = topology.hosts();
    let on_board = topology.ranks_on_board(&hosts);
    let mut forming = Forming {
        topology,
        deadline,
        board_object: None,
        liveness: (0..table.len()).map(|_| None).collect(),
        links: (0..table.len()).map(|_| None).collect(),
    };
    forming.dial_lower(on_board.as_deref())?;
    forming.accept_higher(&incoming, on_board.as_deref())?;

    let Forming { topology, board_object, liveness, links, .. } = forming;
    let remote: Vec<bool> = (0..table.len()).map(|peer| !topology.same_host(peer)).collect();
    let local_ranks = remote.iter().filter(|remote| !**remote).count();
    let watch = Watch::start(config.rank, liveness, &remote, config.loss_limit)
        .map_err(InitError::system("the liveness watch cannot start"))?;
    let board = match (board_object, on_board) {
        (Some(object), Some(ranks)) => Some(map_board(config, &object, ranks)?),
        _ => None,
    };
    Ok(World { links, hosts, board, watch, local_ranks })
}

/// The configuration with the RDMA devices of the cables that lead to ranks of `table`, unless it
/// names devices itself. Both ends of a cable find it by its network, and in the same order.
fn with_cables(config: &Config, own: &Endpoint, table: &[Endpoint]) -> Config {
    let mut config = config.clone();
    if config.rdma.is_none() {
        let mut devices: BTreeMap<usize, Vec<String>> = BTreeMap::new();
        for cable in config.cables.iter().filter(|cable| own.is_in(cable)) {
            let other = |(rank, peer): &(usize, &Endpoint)| *rank != config.rank && peer.is_in(cable);
            if let (Some(device), Some((rank, _))) = (&cable.device, table.iter().enumerate().find(other)) {
                devices.entry(rank).or_default().push(device.clone());
            }
        }
        config.rdma = (!devices.is_empty()).then_some(RdmaConfig { devices, mode: None });
    }
    config
}

/// A world whose connections are being made.
struct Forming<'a> {
    topology: Topology<'a>,
    deadline: Instant,
    /// The board's shared memory: made by the lowest rank on the board, received by the others.
    board_object: Option<File>,
    liveness: Vec<Option<TcpStream>>,
    links: Vec<Option<Box<dyn Link>>>,
}

impl Forming<'_> {
    /// Connects to all lower ranks.
    fn dial_lower(&mut self, on_board: Option<&[usize]>) -> Result<(), InitError> {
        let (topology, deadline) = (&self.topology, self.deadline);
        let config = topology.config;
        for peer in 0..config.rank {
            let request = |purpose| ConnectionRequest {
                session: topology.session().to_owned(),
                from: config.rank,
                to: peer,
                purpose,
            };
            // A rank with a cable is watched over that cable, so that it counts as lost when the
            // cable is cut.
            let ours = topology.cables(peer).map_or(Vec::new(), |(_, devices)| addresses_of(devices));
            let endpoint = topology.table[peer].nearest_first(&ours);
            let endpoint = &endpoint.preferring(&topology.table[config.rank], &config.cables);
            self.liveness[peer] = Some(dial(config, endpoint, &request(Purpose::Liveness), deadline)?);
            if !topology.shares_memory(peer) {
                let dial = |index| dial(config, endpoint, &request(Purpose::Data(index)), deadline);
                let streams = (0..topology.connections(peer)).map(dial).collect::<Result<_, _>>()?;
                self.links[peer] = Some(remote_link(topology, peer, streams)?);
                continue;
            }
            let gets_board = on_board.is_some_and(|ranks| ranks[0] == peer);
            let (link, object) =
                shared_memory::connect(config, endpoint, &request(Purpose::Data(0)), gets_board)?;
            self.links[peer] = Some(link);
            self.board_object = self.board_object.take().or(object);
        }
        Ok(())
    }

    /// Takes the connections of all higher ranks.
    fn accept_higher(
        &mut self,
        incoming: &IncomingConnections,
        on_board: Option<&[usize]>,
    ) -> Result<(), InitError> {
        let topology = &self.topology;
        let config = topology.config;
        let mut streams: Vec<Vec<TcpStream>> = topology.table.iter().map(|_| Vec::new()).collect();
        // Sorted, so that the data connections come in the order of their numbers.
        for ((peer, purpose), stream) in incoming.tcp_connections(topology, self.deadline)? {
            match purpose {
                Purpose::Liveness => self.liveness[peer] = Some(stream),
                Purpose::Data(_) => streams[peer].push(stream),
            }
        }
        for (peer, streams) in streams.into_iter().enumerate().filter(|(_, streams)| !streams.is_empty()) {
            self.links[peer] = Some(remote_link(topology, peer, streams)?);
        }
        let makes_board = on_board.filter(|ranks| ranks[0] == config.rank);
        if let Some(ranks) = makes_board {
            let object = platform::shared_object(board_bytes(ranks.len(), config.ring_bytes));
            self.board_object = Some(object.map_err(InitError::system("shared memory cannot be created"))?);
        }
        let board = self.board_object.as_ref().filter(|_| makes_board.is_some());
        let links = &mut self.links;
        incoming.local_connections(topology, self.deadline, |peer, stream| {
            links[peer] = Some(shared_memory::accept(config, stream, board)?);
            Ok(())
        })
    }
}

fn map_board(config: &Config, object: &File, ranks: Vec<usize>) -> Result<Board, InitError> {
    let mapping = Mapping::new(object, board_bytes(ranks.len(), config.ring_bytes))
        .map_err(InitError::system("shared memory cannot be mapped"))?;
    Ok(Board::new(mapping, ranks, config.rank, config.ring_bytes))
}

/// Over the cables to `peer` if there are any (then the stream carries their handshake), else over
/// the streams themselves.
fn remote_link(
    topology: &Topology<'_>,
    peer: usize,
    mut streams: Vec<TcpStream>,
) -> Result<Box<dyn Link>, InitError> {
    let set_up = InitError::system("a connection cannot be set up");
    if let (Some((rdma, devices)), [stream]) = (topology.cables(peer), &mut streams[..]) {
        stream.set_timeouts(Some(topology.config.rendezvous_limit)).map_err(set_up)?;
        return Ok(Box::new(RdmaLink::connect(rdma, peer, devices, stream)?));
    }
    if !topology.is_sealed() {
        let unlimited = streams.iter().try_for_each(|stream| stream.set_timeouts(None));
        return Ok(Box::new(unlimited.and_then(|()| TcpLink::new(streams)).map_err(set_up)?));
    }
    let Config { rank, secret, rendezvous_limit, .. } = topology.config;
    let agree = |stream: TcpStream| {
        stream.set_timeouts(Some(*rendezvous_limit))?;
        let handle = stream.duplicate()?;
        let sealed = Sealed::agree(stream, secret, *rank > peer)?;
        // A limit belongs to the socket, so this handle's counts.
        handle.set_timeouts(None)?;
        Ok(sealed)
    };
    let sealed: std::io::Result<Vec<Sealed>> = streams.into_iter().map(agree).collect();
    Ok(Box::new(sealed.and_then(TcpLink::new).map_err(set_up)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cables_with_devices_are_found_by_the_ranks_at_their_ends() {
        let table = [
            Endpoint::at(&["10.0.7.1", "10.0.7.5", "192.168.1.1"]),
            Endpoint::at(&["10.0.7.2", "10.0.7.6", "192.168.1.2"]),
            Endpoint::at(&["192.168.1.3"]),
        ];
        let mut config = Config::new(0, 3, "127.0.0.1:1");
        let names = "10.0.7.4/30=rdma_en3,10.0.7.0/30=rdma_en2,10.0.9.0/30=rdma_en4,192.168.1.0/24";
        config.cables = names.split(',').map(|text| text.parse().unwrap()).collect();
        let rdma = with_cables(&config, &table[0], &table).rdma.unwrap();
        assert_eq!(rdma.devices, BTreeMap::from([(1, vec!["rdma_en3".to_owned(), "rdma_en2".to_owned()])]));
        config.rdma = Some(RdmaConfig { devices: BTreeMap::new(), mode: None });
        assert_eq!(with_cables(&config, &table[0], &table).rdma.unwrap().devices, BTreeMap::new());
    }
}
