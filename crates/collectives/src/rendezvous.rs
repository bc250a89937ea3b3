//! How ranks find each other: each rank sends rank 0, the coordinator, its endpoint and gets the
//! endpoints of all ranks back.

mod endpoint;
pub(crate) mod handshake;
pub(crate) mod interfaces;
mod listener;
mod stream;

pub(crate) use endpoint::Endpoint;
pub(crate) use listener::Listener;
pub(crate) use stream::{DeadlineStream, HandshakeStream};

use std::io;
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::forming::Reports;
use crate::{Config, FormingEvent, InitError};

/// Longest wait for one address, to connect and for the handshake. A rank may have several
/// addresses, some of which lead nowhere.
pub(crate) const CONNECT_LIMIT: Duration = Duration::from_secs(3);
pub(crate) const RETRY_INTERVAL: Duration = Duration::from_millis(20);
/// How much longer than its own limit a rank waits for the coordinator to give up.
const REPLY_SLACK: Duration = Duration::from_secs(2);

/// What a rank sends to the coordinator. The field names are part of the wire format.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Hello {
    pub rank: usize,
    pub size: usize,
    pub endpoint: Endpoint,
}

/// The coordinator's reply. The variants' names are part of the wire format.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Reply {
    /// All ranks' endpoints, in rank order.
    Table(Vec<Endpoint>),
    /// Why the rank is refused.
    Refused(String),
    /// The ranks that did not connect in time.
    Missing(Vec<usize>),
}

/// Exchanges endpoints with all ranks; the result is in rank order.
pub(crate) fn exchange_endpoints(config: &Config, endpoint: Endpoint) -> Result<Vec<Endpoint>, InitError> {
    if config.rank == 0 { coordinate(config, endpoint) } else { register(config, endpoint) }
}

/// Rank 0's side.
fn coordinate(config: &Config, mut own: Endpoint) -> Result<Vec<Endpoint>, InitError> {
    let listen = |source| InitError::Listen { address: config.coordinator.clone(), source };
    let listener = match &config.listener {
        Some(listener) => listener.try_clone().map_err(listen)?,
        None => TcpListener::bind(&config.coordinator).map_err(listen)?,
    };
    let (sender, accepted) = mpsc::channel();
    let _listener =
        Listener::tcp(listener, config.secret.clone(), sender, config.observer.clone()).map_err(listen)?;
    let mut reports = Reports::new(config.observer.as_ref(), Instant::now() + config.rendezvous_limit);
    let mut registered: Registered = (0..config.size).map(|_| None).collect();
    loop {
        let missing: Vec<usize> = (1..config.size).filter(|rank| registered[*rank].is_none()).collect();
        if missing.is_empty() {
            return send_table(config, own, registered);
        }
        let Ok((mut stream, hello)) = accepted.recv_timeout(reports.pause()) else {
            if reports.left().is_zero() {
                return Err(give_up(config, registered, missing));
            }
            let address = config.coordinator.clone();
            reports.due(false, |left| FormingEvent::Waiting { address, missing, left });
            continue;
        };
        match check_hello(config, &registered, &hello) {
            Ok(mut hello) => {
                // The address that the coordinator sees is the one most likely to work for others.
                if let (Ok(seen), Ok(own_side)) = (stream.peer_addr(), stream.local_addr()) {
                    move_to_front(&mut hello.endpoint.addresses, seen.ip());
                    move_to_front(&mut own.addresses, own_side.ip());
                }
                let (rank, address) = (hello.rank, stream.peer());
                if registered[rank].replace((stream, hello.endpoint)).is_none() && reports.has_begun() {
                    let missing = missing.into_iter().filter(|other| *other != rank).collect();
                    reports.tell(FormingEvent::Joined { rank, address, missing });
                }
            }
            Err(why) => {
                reports.tell(FormingEvent::Refused { address: stream.peer(), why: why.clone() });
                // Fails if the peer has closed the connection; it then does not learn why.
                let _ = send_reply(&mut stream, &Reply::Refused(why));
            }
        }
    }
}

/// Tells the ranks that have joined which others did not.
fn give_up(config: &Config, mut registered: Registered, missing: Vec<usize>) -> InitError {
    for (stream, _) in registered.iter_mut().flatten() {
        // Fails for ranks that have left in the meantime; they need no reply.
        let _ = send_reply(stream, &Reply::Missing(missing.clone()));
    }
    InitError::Missing { missing, after: config.rendezvous_limit }
}

/// By rank, the connections to the ranks that have registered, and their endpoints.
type Registered = Vec<Option<(TcpStream, Endpoint)>>;

/// The hello, or why its sender cannot be a rank of this group.
fn check_hello(config: &Config, registered: &Registered, hello: &[u8]) -> Result<Hello, String> {
    let hello: Hello =
        serde_json::from_slice(hello).map_err(|error| format!("its hello is malformed: {error}"))?;
    if hello.size != config.size {
        let (rank, theirs, ours) = (hello.rank, hello.size, config.size);
        return Err(format!(
            "rank {rank} was started for a group of {theirs} ranks, rank 0 for {ours}: give all the same THUNDER_WORLD_SIZE"
        ));
    }
    if hello.rank == 0 || hello.rank >= config.size {
        let last = config.size - 1;
        return Err(format!("rank {} cannot join: the ranks that connect are 1 to {last}", hello.rank));
    }
    if registered[hello.rank].as_ref().is_some_and(|(old, _)| is_open(old)) {
        return Err(format!("rank {} has already joined", hello.rank));
    }
    Ok(hello)
}

/// Sends all endpoints to all ranks.
fn send_table(config: &Config, own: Endpoint, registered: Registered) -> Result<Vec<Endpoint>, InitError> {
    let mut streams = Vec::with_capacity(config.size - 1);
    let mut table = vec![own];
    for (stream, endpoint) in registered.into_iter().flatten() {
        streams.push(stream);
        table.push(endpoint);
    }
    let table = Reply::Table(table);
    for (stream, rank) in streams.iter_mut().zip(1..) {
        let tried = || config.coordinator.clone();
        send_reply(stream, &table).map_err(|source| InitError::Unreachable {
            rank,
            tried: tried(),
            source,
        })?;
    }
    let Reply::Table(table) = table else { return Ok(Vec::new()) };
    Ok(table)
}

/// True when the other side has not closed the connection. It sends nothing at this point.
fn is_open(stream: &TcpStream) -> bool {
    let mut byte = [0; 1];
    let open = stream.set_nonblocking(true).is_ok()
        && matches!(stream.peek(&mut byte), Err(error) if error.kind() == io::ErrorKind::WouldBlock);
    open && stream.set_nonblocking(false).is_ok()
}

fn move_to_front(addresses: &mut Vec<IpAddr>, first: IpAddr) {
    addresses.retain(|address| *address != first);
    addresses.insert(0, first);
}

fn send_reply(stream: &mut TcpStream, reply: &Reply) -> io::Result<()> {
    let message = serde_json::to_vec(reply).map_err(io::Error::other)?;
    handshake::write_message(stream, &message)
}

/// The other ranks' side: sends the own endpoint to the coordinator and waits for the table.
fn register(config: &Config, endpoint: Endpoint) -> Result<Vec<Endpoint>, InitError> {
    let start = Instant::now();
    let deadline = start + config.rendezvous_limit;
    let hello = Hello { rank: config.rank, size: config.size, endpoint };
    let hello = serde_json::to_vec(&hello)
        .map_err(|error| InitError::system("the address list cannot be written")(io::Error::other(error)))?;
    let refused = |why: String| InitError::Refused { address: config.coordinator.clone(), why };
    let mut last = "no address".to_owned();
    let mut reports = Reports::new(config.observer.as_ref(), deadline);
    let mut stream = loop {
        let left = reports.left();
        let address = config.coordinator.clone();
        if left.is_zero() {
            return Err(InitError::NoCoordinator { address, after: start.elapsed(), last });
        }
        match connect_to_coordinator(config, &hello, left) {
            Ok(stream) => break stream,
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
                return Err(refused(error.to_string()));
            }
            Err(error) => {
                let why = error.to_string();
                let has_changed = std::mem::replace(&mut last, why.clone()) != why;
                reports.due(has_changed, |left| FormingEvent::NoCoordinator { address, why, left });
            }
        }
        std::thread::sleep(RETRY_INTERVAL);
    };
    let message = await_reply(config, &mut stream, deadline).map_err(|error| InitError::NoCoordinator {
        address: config.coordinator.clone(),
        after: start.elapsed(),
        last: format!("it closed the connection while it waited for other ranks: {error}"),
    })?;
    match serde_json::from_slice(&message) {
        Ok(Reply::Table(table)) if table.len() == config.size => Ok(table),
        Ok(Reply::Table(table)) => Err(refused(format!("it sent {} addresses", table.len()))),
        Ok(Reply::Refused(why)) => Err(refused(why)),
        Ok(Reply::Missing(missing)) => Err(InitError::Missing { missing, after: start.elapsed() }),
        Err(error) => Err(refused(format!("its reply is malformed: {error}"))),
    }
}

/// The coordinator replies when all ranks have joined, or when it gives up. The latter is at worst
/// a little after this rank's own `deadline`.
fn await_reply(config: &Config, stream: &mut TcpStream, deadline: Instant) -> io::Result<Vec<u8>> {
    let mut reports = Reports::new(config.observer.as_ref(), deadline + REPLY_SLACK);
    let mut byte = [0; 1];
    loop {
        let pause = reports.pause();
        if pause.is_zero() && reports.left().is_zero() {
            return Err(io::Error::new(io::ErrorKind::TimedOut, "it did not say whether the others came"));
        }
        stream.set_timeouts(Some(pause.max(RETRY_INTERVAL)))?;
        match stream.peek(&mut byte) {
            Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut) => {
                let address = config.coordinator.clone();
                reports.due(false, |left| FormingEvent::Registered { address, left });
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
            Ok(_) => return handshake::read_message(&mut DeadlineStream::new(stream, CONNECT_LIMIT)),
        }
    }
}

/// Connects to the first of the coordinator's addresses that answers.
fn connect_to_coordinator(config: &Config, hello: &[u8], left: Duration) -> io::Result<TcpStream> {
    let mut last = io::Error::new(io::ErrorKind::AddrNotAvailable, "no address");
    for address in config.coordinator.to_socket_addrs()? {
        match connect(address, &config.secret, hello, left.min(CONNECT_LIMIT)) {
            Ok(stream) => return Ok(stream),
            Err(error) => last = error,
        }
    }
    Err(last)
}

/// Connects and runs the handshake, both within `limit`.
pub(crate) fn connect(
    address: SocketAddr,
    secret: &[u8],
    hello: &[u8],
    limit: Duration,
) -> io::Result<TcpStream> {
    let started = Instant::now();
    let mut stream = TcpStream::connect_timeout(&address, limit)?;
    stream.set_nodelay(true)?;
    let left = limit.saturating_sub(started.elapsed());
    handshake::connect(&mut DeadlineStream::new(&mut stream, left), secret, hello)?;
    Ok(stream)
}
