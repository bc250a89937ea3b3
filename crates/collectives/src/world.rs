//! The connections of a group: a link and a liveness anchor to each other rank.

mod call;

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, TcpListener, TcpStream};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::mpsc;
use std::time::Instant;

use crate::link::Link;
use crate::link::board::{Board, board_bytes};
use crate::link::rdma::{RdmaConfig, RdmaLink, addresses_of};
use crate::link::shm::{ShmLink, segment_bytes};
use crate::link::tcp::TcpLink;
use crate::platform::{self, Mapping};
use crate::rendezvous::{CALL_LIMIT, Door, Endpoint, Stream, Until};
use crate::watch::Watch;
use crate::{Config, InitError, TransportChoice, auth};
use call::{Call, Purpose, dial, hello};

/// A rank's two listeners, and what it tells others about them.
pub(crate) struct Address {
    tcp: TcpListener,
    local: UnixListener,
    pub endpoint: Endpoint,
}

impl Address {
    pub fn open(config: &Config) -> Result<Self, InitError> {
        let tcp = TcpListener::bind((Ipv6Addr::UNSPECIFIED, 0))
            .or_else(|_| TcpListener::bind((Ipv4Addr::UNSPECIFIED, 0)))
            .map_err(InitError::system("this rank cannot listen for others"))?;
        let port = tcp.local_addr().map_err(InitError::system("the listener has no address"))?.port();
        let session = hex(&auth::random::<16>().map_err(InitError::system("no random numbers"))?);
        let local = format!("thunder-{session}");
        let listener = platform::bind_local(&local)
            .map_err(InitError::system("this rank cannot listen on a local socket"))?;
        let host = match &config.host {
            Some(host) => host.clone(),
            None => platform::host_identity()
                .map_err(InitError::system("the host's identity cannot be read; set THUNDER_HOST"))?,
        };
        let mut addresses = platform::interface_addresses();
        addresses.push(IpAddr::V4(Ipv4Addr::LOCALHOST));
        let connections = config.connections;
        let endpoint = Endpoint { host, addresses, port, connections, local, session };
        Ok(Self { tcp, local: listener, endpoint })
    }
}

/// The connections of one rank to all others; `None` at its own place.
pub(crate) struct World {
    pub links: Vec<Option<Box<dyn Link>>>,
    /// The ranks by host, where they share memory; each by itself where not. In the order of their lowest ranks.
    pub hosts: Vec<Vec<usize>>,
    /// What the ranks of this host share, if there are several and they may.
    pub board: Option<Board>,
    pub watch: Watch,
    /// Ranks on this rank's host, itself included.
    pub local_ranks: usize,
}

/// Connects a rank with all others of the table. Lower ranks are called by higher ones.
pub(crate) fn form(
    config: &Config,
    rank: usize,
    address: Address,
    table: &[Endpoint],
) -> Result<World, InitError> {
    let deadline = Instant::now() + config.rendezvous_limit;
    let session = table[0].session.clone();
    let host = &table[rank].host;
    let same_host = |peer: usize| table[peer].host == *host;
    let cables = |peer: usize| {
        let wanted = match config.transport {
            TransportChoice::Shm | TransportChoice::Tcp => false,
            TransportChoice::Auto => !same_host(peer),
            TransportChoice::Rdma => true,
        };
        let rdma = config.rdma.as_ref().filter(|_| wanted)?;
        Some((rdma, rdma.devices.get(&peer)?.as_slice()))
    };
    let local =
        |peer: usize| config.transport != TransportChoice::Tcp && same_host(peer) && cables(peer).is_none();
    if config.transport == TransportChoice::Shm
        && let Some(peer) = (0..table.len()).find(|peer| !local(*peer))
    {
        return Err(InitError::NotLocal { rank: peer });
    }

    let (tcp_sender, tcp_guests) = mpsc::channel();
    let (local_sender, local_guests) = mpsc::channel();
    let door = InitError::system("connections cannot be accepted");
    let _tcp_door = Door::tcp(address.tcp, config.secret.clone(), tcp_sender).map_err(door)?;
    let door = InitError::system("local connections cannot be accepted");
    let _local_door = local_door(address.local, config.secret.clone(), local_sender).map_err(door)?;

    let connections = |peer: usize| match cables(peer) {
        Some(_) => 1,
        None => config.connections.min(table[peer].connections).max(1),
    };
    // Where cables may lead to a rank of this host, not all ranks know which pairs have one.
    let shares = matches!(config.transport, TransportChoice::Auto | TransportChoice::Shm);
    let mut hosts: Vec<Vec<usize>> = Vec::new();
    for (peer, endpoint) in table.iter().enumerate() {
        match hosts.iter_mut().find(|ranks| shares && table[ranks[0]].host == endpoint.host) {
            Some(ranks) => ranks.push(peer),
            None => hosts.push(vec![peer]),
        }
    }
    let sharing = hosts.iter().find(|ranks| ranks.len() > 1 && ranks.contains(&rank)).cloned();
    let mut shared = None;
    let mut anchors: Vec<Option<TcpStream>> = (0..table.len()).map(|_| None).collect();
    let mut links: Vec<Option<Box<dyn Link>>> = (0..table.len()).map(|_| None).collect();
    for peer in 0..rank {
        let call = |purpose| Call { session: session.clone(), from: rank, to: peer, purpose };
        // A rank that a cable leads to is watched over that cable, so that it is lost when the cable is.
        let ours = cables(peer).map_or(Vec::new(), |(_, devices)| addresses_of(devices));
        let endpoint = &table[peer].nearest_first(&ours);
        anchors[peer] = Some(dial(config, endpoint, &call(Purpose::Anchor), deadline)?);
        if !local(peer) {
            let dial = |index| dial(config, endpoint, &call(Purpose::Data(index)), deadline);
            let streams = (0..connections(peer)).map(dial).collect::<Result<_, _>>()?;
            links[peer] = Some(remote_link(config, peer, cables(peer), streams)?);
            continue;
        }
        let board = sharing.as_deref().filter(|ranks| ranks[0] == peer);
        let (link, object) = call_local(config, endpoint, &call(Purpose::Data(0)), board.is_some())?;
        links[peer] = Some(link);
        shared = shared.or(object);
    }
    // Both kinds of callers, in whatever order they come.
    let mut tcp_missing: BTreeMap<(usize, Purpose), Option<TcpStream>> = BTreeMap::new();
    let mut local_missing: BTreeMap<usize, ()> = BTreeMap::new();
    for peer in rank + 1..table.len() {
        tcp_missing.insert((peer, Purpose::Anchor), None);
        if local(peer) {
            local_missing.insert(peer, ());
        } else {
            tcp_missing.extend((0..connections(peer)).map(|index| ((peer, Purpose::Data(index)), None)));
        }
    }
    let valid = |hello: &[u8]| {
        let call: Call = serde_json::from_slice(hello).ok()?;
        (call.session == session && call.to == rank).then_some(call)
    };
    let missing_error = |missing: Vec<usize>| InitError::Missing { missing, after: config.rendezvous_limit };
    while tcp_missing.values().any(Option::is_none) {
        let left = deadline.saturating_duration_since(Instant::now());
        let Ok((stream, hello)) = tcp_guests.recv_timeout(left) else {
            let missing = tcp_missing.iter().filter(|(_, stream)| stream.is_none());
            let mut ranks: Vec<usize> = missing.map(|((peer, _), _)| *peer).collect();
            ranks.dedup();
            return Err(missing_error(ranks));
        };
        let Some(call) = valid(&hello) else { continue };
        if let Some(place @ None) = tcp_missing.get_mut(&(call.from, call.purpose)) {
            *place = Some(stream);
        }
    }
    let mut streams: Vec<Vec<TcpStream>> = table.iter().map(|_| Vec::new()).collect();
    // In the order of the connections' numbers, as the map is.
    for ((peer, purpose), stream) in tcp_missing {
        match purpose {
            Purpose::Anchor => anchors[peer] = stream,
            Purpose::Data(_) => streams[peer].extend(stream),
        }
    }
    for (peer, streams) in streams.into_iter().enumerate().filter(|(_, streams)| !streams.is_empty()) {
        links[peer] = Some(remote_link(config, peer, cables(peer), streams)?);
    }
    if let Some(ranks) = sharing.as_deref().filter(|ranks| ranks[0] == rank) {
        let object = platform::shared_object(board_bytes(ranks.len(), config.ring_bytes));
        shared = Some(object.map_err(InitError::system("shared memory cannot be made"))?);
    }
    while !local_missing.is_empty() {
        let left = deadline.saturating_duration_since(Instant::now());
        let Ok((stream, hello)) = local_guests.recv_timeout(left) else {
            return Err(missing_error(local_missing.keys().copied().collect()));
        };
        let Some(call) = valid(&hello) else { continue };
        if local_missing.remove(&call.from).is_some() {
            let board = shared.as_ref().filter(|_| sharing.as_ref().is_some_and(|ranks| ranks[0] == rank));
            links[call.from] = Some(answer_local(config, stream, board)?);
        }
    }
    let remote: Vec<bool> = table.iter().map(|peer| peer.host != *host).collect();
    let watch = Watch::start(rank, anchors, &remote, config.loss_limit)
        .map_err(InitError::system("the liveness watch cannot start"))?;
    let local_ranks = table.iter().filter(|peer| peer.host == *host).count();
    let board = match (shared, sharing) {
        (Some(object), Some(ranks)) => {
            let mapping = Mapping::new(&object, board_bytes(ranks.len(), config.ring_bytes))
                .map_err(InitError::system("shared memory cannot be mapped"))?;
            Some(Board::new(mapping, ranks, rank, config.ring_bytes))
        }
        _ => None,
    };
    Ok(World { links, hosts, board, watch, local_ranks })
}

/// Over the cables if there are any, with the stream to agree on them; else over the streams.
fn remote_link(
    config: &Config,
    peer: usize,
    cables: Option<(&RdmaConfig, &[String])>,
    mut streams: Vec<TcpStream>,
) -> Result<Box<dyn Link>, InitError> {
    let set_up = InitError::system("a connection cannot be set up");
    if let (Some((rdma, devices)), [stream]) = (cables, &mut streams[..]) {
        stream.limit(Some(config.rendezvous_limit)).map_err(set_up)?;
        return Ok(Box::new(RdmaLink::connect(rdma, peer, devices, stream)?));
    }
    let unlimited = streams.iter().try_for_each(|stream| stream.limit(None));
    Ok(Box::new(unlimited.and_then(|()| TcpLink::new(streams)).map_err(set_up)?))
}

fn local_door(
    listener: UnixListener,
    secret: Vec<u8>,
    guests: mpsc::Sender<(UnixStream, Vec<u8>)>,
) -> io::Result<Door> {
    listener.set_nonblocking(true)?;
    let accept = move || match listener.accept() {
        Ok((stream, _)) => {
            stream.set_nonblocking(false)?;
            Ok(platform::peer_is_same_user(&stream)?.then_some(stream))
        }
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(None),
        Err(error) => Err(error),
    };
    Door::open(accept, secret, guests)
}

/// The higher rank of a local pair: gets the memory from the lower one, and the host's board from the lowest.
fn call_local(
    config: &Config,
    endpoint: &Endpoint,
    call: &Call,
    with_board: bool,
) -> Result<(Box<dyn Link>, Option<File>), InitError> {
    let hello = hello(call)?;
    let attempt = || {
        let mut stream = platform::connect_local(&endpoint.local)?;
        auth::greet(&mut Until::new(&mut stream, CALL_LIMIT), &config.secret, &hello)?;
        stream.limit(Some(config.rendezvous_limit))?;
        let object = platform::receive_descriptor(&stream)?;
        let board = with_board.then(|| platform::receive_descriptor(&stream)).transpose()?;
        stream.limit(None)?;
        let mapping = Mapping::new(&object, segment_bytes(config.ring_bytes))?;
        Ok((ShmLink::new(mapping, config.ring_bytes, false, stream)?, board))
    };
    let (link, board) = attempt().map_err(|source| InitError::Unreachable {
        rank: call.to,
        tried: format!("local socket {}", endpoint.local),
        source,
    })?;
    Ok((Box::new(link), board))
}

/// The lower rank of a local pair: makes the memory and passes it on, the lowest one its host's board too.
fn answer_local(
    config: &Config,
    stream: UnixStream,
    board: Option<&File>,
) -> Result<Box<dyn Link>, InitError> {
    let bytes = segment_bytes(config.ring_bytes);
    let attempt = || {
        let object = platform::shared_object(bytes)?;
        let mapping = Mapping::new(&object, bytes)?;
        platform::send_descriptor(&stream, &object)?;
        board.map(|board| platform::send_descriptor(&stream, board)).transpose()?;
        stream.limit(None)?;
        ShmLink::new(mapping, config.ring_bytes, true, stream)
    };
    Ok(Box::new(attempt().map_err(InitError::system("shared memory cannot be made"))?))
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
