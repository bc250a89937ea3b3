//! How ranks find each other: each tells rank 0 where it can be reached, and gets everybody's answers back.

use std::cmp::Reverse;
use std::collections::VecDeque;
use std::io::{self, Read, Write};
use std::net::{IpAddr, Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::auth;
use crate::{Config, InitError};

/// Longest wait for one address, to connect and for the handshake; a rank may have several, of which some lead nowhere.
pub(crate) const CALL_LIMIT: Duration = Duration::from_secs(3);
/// A connection that has not proved itself and confirmed by then is dropped. Its caller has given up long before; a confirmation that takes
/// longer is lost, and the group does not form.
const HANDSHAKE_LIMIT: Duration = Duration::from_secs(10);
/// Handshakes at a time. One more, and the oldest is turned away: who knows the secret is done in no time.
const HANDSHAKES: usize = 64;
pub(crate) const RETRY: Duration = Duration::from_millis(20);

/// Where a rank can be reached.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Endpoint {
    /// Equal for ranks that can share memory.
    pub host: String,
    pub addresses: Vec<IpAddr>,
    pub port: u16,
    /// TCP connections that it would have with each other rank.
    pub connections: usize,
    /// Name of its local socket.
    pub local: String,
    /// Names the group that the ranks form; the lowest rank's counts.
    pub session: String,
}

impl Endpoint {
    /// The same with its addresses ordered by how many leading bits they share with one of ours, as long as there are any.
    pub fn nearest_first(&self, ours: &[Ipv4Addr]) -> Self {
        let shared = |address: &IpAddr| match address {
            IpAddr::V4(address) => {
                ours.iter().map(|own| (own.to_bits() ^ address.to_bits()).leading_zeros()).max()
            }
            IpAddr::V6(_) => None,
        };
        let mut sorted = self.clone();
        sorted.addresses.sort_by_key(|address| Reverse(shared(address)));
        sorted
    }
}

#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Hello {
    pub rank: usize,
    pub size: usize,
    pub endpoint: Endpoint,
}

#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Answer {
    Table(Vec<Endpoint>),
    Refused(String),
    Missing(Vec<usize>),
}

/// A stream that a handshake can run on.
pub(crate) trait Stream: Read + Write + Send + Sized + 'static {
    fn limit(&self, limit: Option<Duration>) -> io::Result<()>;
    /// Another handle of the same stream.
    fn twin(&self) -> io::Result<Self>;
    /// Ends all reads and writes on it, also those under way.
    fn hang_up(&self) -> io::Result<()>;
}

impl Stream for TcpStream {
    fn limit(&self, limit: Option<Duration>) -> io::Result<()> {
        self.set_read_timeout(limit)?;
        self.set_write_timeout(limit)
    }
    fn twin(&self) -> io::Result<Self> {
        self.try_clone()
    }
    fn hang_up(&self) -> io::Result<()> {
        self.shutdown(Shutdown::Both)
    }
}

impl Stream for std::os::unix::net::UnixStream {
    fn limit(&self, limit: Option<Duration>) -> io::Result<()> {
        self.set_read_timeout(limit)?;
        self.set_write_timeout(limit)
    }
    fn twin(&self) -> io::Result<Self> {
        self.try_clone()
    }
    fn hang_up(&self) -> io::Result<()> {
        self.shutdown(Shutdown::Both)
    }
}

/// A stream on which all reads and writes together end within a limit: one on each alone would let a stranger who sends a
/// byte now and then stay for hours.
pub(crate) struct Until<'a, S> {
    stream: &'a mut S,
    deadline: Instant,
}

impl<'a, S: Stream> Until<'a, S> {
    pub fn new(stream: &'a mut S, limit: Duration) -> Self {
        Self { stream, deadline: Instant::now() + limit }
    }

    fn limited(&mut self) -> io::Result<&mut S> {
        let left = self.deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        self.stream.limit(Some(left))?;
        Ok(self.stream)
    }
}

impl<S: Stream> Read for Until<'_, S> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        self.limited()?.read(into)
    }
}

impl<S: Stream> Write for Until<'_, S> {
    fn write(&mut self, from: &[u8]) -> io::Result<usize> {
        self.limited()?.write(from)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.stream.flush()
    }
}

/// The guests whose handshakes are under way, the oldest first.
struct Waiting<S>(Mutex<(u64, VecDeque<(u64, S)>)>);

impl<S> Default for Waiting<S> {
    fn default() -> Self {
        Self(Mutex::new((0, VecDeque::new())))
    }
}

impl<S: Stream> Waiting<S> {
    /// The guest's number.
    fn enter(&self, stream: &S) -> io::Result<u64> {
        let twin = stream.twin()?;
        let mut inside = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let (number, guests) = &mut *inside;
        if guests.len() >= HANDSHAKES
            && let Some((_, oldest)) = guests.pop_front()
        {
            // It may have gone by itself.
            let _ = oldest.hang_up();
        }
        *number += 1;
        guests.push_back((*number, twin));
        Ok(*number)
    }

    /// False if it was turned away meanwhile.
    fn leave(&self, number: u64) -> bool {
        let mut inside = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let before = inside.1.len();
        inside.1.retain(|(other, _)| *other != number);
        inside.1.len() < before
    }
}

/// Accepts connections in the background, each handshake on a thread of its own, so that nobody can hold up the others.
/// Ends when dropped; its address is free then.
pub(crate) struct Door {
    open: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Door {
    /// `accept` polls for a connection without blocking; those that know the secret arrive in `guests` with their hello.
    pub fn open<S: Stream>(
        accept: impl Fn() -> io::Result<Option<S>> + Send + 'static,
        secret: Vec<u8>,
        guests: mpsc::Sender<(S, Vec<u8>)>,
    ) -> io::Result<Self> {
        let open = Arc::new(AtomicBool::new(true));
        let still_open = open.clone();
        let secret: Arc<[u8]> = secret.into();
        let thread = std::thread::Builder::new().name("thunder-door".to_owned()).spawn(move || {
            let waiting = Arc::new(Waiting::default());
            while still_open.load(Ordering::Relaxed) {
                let Ok(Some(mut stream)) = accept() else {
                    std::thread::sleep(Duration::from_millis(1));
                    continue;
                };
                let Ok(number) = waiting.enter(&stream) else { continue };
                let (waiting, guests, secret) = (waiting.clone(), guests.clone(), secret.clone());
                let handshake = move || {
                    let mut limited = Until::new(&mut stream, HANDSHAKE_LIMIT);
                    let hello = auth::welcome(&mut limited, &secret);
                    // Who knows the secret is not turned away any more: it may count on being connected from now on.
                    if waiting.leave(number)
                        && let Ok(hello) = hello
                        && auth::confirmed(&mut limited).is_ok()
                        && stream.limit(Some(HANDSHAKE_LIMIT)).is_ok()
                    {
                        // Nobody waits for guests any more: the stream closes.
                        let _ = guests.send((stream, hello));
                    }
                };
                // Without a thread the guest gets no answer, and tries again.
                let _ = std::thread::Builder::new().name("thunder-guest".to_owned()).spawn(handshake);
            }
        })?;
        Ok(Self { open, thread: Some(thread) })
    }

    pub fn tcp(
        listener: TcpListener,
        secret: Vec<u8>,
        guests: mpsc::Sender<(TcpStream, Vec<u8>)>,
    ) -> io::Result<Self> {
        listener.set_nonblocking(true)?;
        let accept = move || match listener.accept() {
            Ok((stream, _)) => {
                stream.set_nonblocking(false)?;
                stream.set_nodelay(true)?;
                Ok(Some(stream))
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(None),
            Err(error) => Err(error),
        };
        Self::open(accept, secret, guests)
    }
}

impl Drop for Door {
    fn drop(&mut self) {
        self.open.store(false, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            // One that panicked has closed its listener too.
            let _ = thread.join();
        }
    }
}

/// Exchanges endpoints with all ranks; the result is in rank order.
pub(crate) fn exchange(config: &Config, endpoint: Endpoint) -> Result<Vec<Endpoint>, InitError> {
    if config.rank == 0 { coordinate(config, endpoint) } else { report(config, endpoint) }
}

fn coordinate(config: &Config, mut own: Endpoint) -> Result<Vec<Endpoint>, InitError> {
    let listen = |source| InitError::Listen { address: config.coordinator.clone(), source };
    let listener = match &config.listener {
        Some(listener) => listener.try_clone().map_err(listen)?,
        None => TcpListener::bind(&config.coordinator).map_err(listen)?,
    };
    let (sender, guests) = mpsc::channel();
    let _door = Door::tcp(listener, config.secret.clone(), sender).map_err(listen)?;
    let deadline = Instant::now() + config.rendezvous_limit;
    let mut present: Vec<Option<(TcpStream, Endpoint)>> = (0..config.size).map(|_| None).collect();
    let mut missing = config.size - 1;
    while missing > 0 {
        let left = deadline.saturating_duration_since(Instant::now());
        let Ok((mut stream, hello)) = guests.recv_timeout(left) else { break };
        let problem = match serde_json::from_slice::<Hello>(&hello) {
            Err(error) => Some(format!("its hello is malformed: {error}")),
            Ok(hello) if hello.size != config.size => {
                Some(format!("the world size here is {}, yours is {}", config.size, hello.size))
            }
            Ok(hello) if hello.rank == 0 || hello.rank >= config.size => {
                Some(format!("rank {} is not to be had", hello.rank))
            }
            Ok(hello) if present[hello.rank].as_ref().is_some_and(|(old, _)| is_open(old)) => {
                Some(format!("rank {} is here already", hello.rank))
            }
            Ok(mut hello) => {
                // How this rank sees it is the address most likely to work for others.
                if let (Ok(seen), Ok(own_side)) = (stream.peer_addr(), stream.local_addr()) {
                    prefer(&mut hello.endpoint.addresses, seen.ip());
                    prefer(&mut own.addresses, own_side.ip());
                }
                if present[hello.rank].replace((stream, hello.endpoint)).is_none() {
                    missing -= 1;
                }
                continue;
            }
        };
        if let Some(why) = problem {
            // A guest that does not read its refusal has had its chance.
            let _ = answer(&mut stream, &Answer::Refused(why));
        }
    }
    if missing > 0 {
        let absent: Vec<usize> = (1..config.size).filter(|rank| present[*rank].is_none()).collect();
        for (stream, _) in present.iter_mut().flatten() {
            // Whoever has gone meanwhile need not know.
            let _ = answer(stream, &Answer::Missing(absent.clone()));
        }
        return Err(InitError::Missing { missing: absent, after: config.rendezvous_limit });
    }
    let mut streams = Vec::with_capacity(config.size - 1);
    let mut table = vec![own];
    for (stream, endpoint) in present.into_iter().flatten() {
        streams.push(stream);
        table.push(endpoint);
    }
    let table = Answer::Table(table);
    for (index, stream) in streams.iter_mut().enumerate() {
        answer(stream, &table)
            .map_err(|source| unreachable(index + 1, config.coordinator.clone(), source))?;
    }
    let Answer::Table(table) = table else { return Ok(Vec::new()) };
    Ok(table)
}

/// Whether the other side has not hung up; nothing is expected from it at this point.
fn is_open(stream: &TcpStream) -> bool {
    let mut byte = [0; 1];
    let open = stream.set_nonblocking(true).is_ok()
        && matches!(stream.peek(&mut byte), Err(error) if error.kind() == io::ErrorKind::WouldBlock);
    open && stream.set_nonblocking(false).is_ok()
}

fn prefer(addresses: &mut Vec<IpAddr>, first: IpAddr) {
    addresses.retain(|address| *address != first);
    addresses.insert(0, first);
}

fn answer(stream: &mut TcpStream, answer: &Answer) -> io::Result<()> {
    let message = serde_json::to_vec(answer).map_err(io::Error::other)?;
    auth::write_message_to(stream, &message)
}

fn unreachable(rank: usize, tried: String, source: io::Error) -> InitError {
    InitError::Unreachable { rank, tried, source }
}

fn report(config: &Config, endpoint: Endpoint) -> Result<Vec<Endpoint>, InitError> {
    let start = Instant::now();
    let deadline = start + config.rendezvous_limit;
    let hello = Hello { rank: config.rank, size: config.size, endpoint };
    let hello = serde_json::to_vec(&hello)
        .map_err(|error| InitError::system("the address list cannot be written")(io::Error::other(error)))?;
    let refused = |why: String| InitError::Refused { address: config.coordinator.clone(), why };
    let mut last = "no address".to_owned();
    let mut stream = loop {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            let after = start.elapsed();
            return Err(InitError::NoCoordinator { address: config.coordinator.clone(), after, last });
        }
        match join(config, &hello, left) {
            Ok(stream) => break stream,
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
                return Err(refused(error.to_string()));
            }
            Err(error) => last = error.to_string(),
        }
        std::thread::sleep(RETRY);
    };
    // The coordinator answers when all have come, or when it gives up: a little after this rank's own limit at worst.
    let left = deadline.saturating_duration_since(Instant::now()) + Duration::from_secs(2);
    let message = auth::read_message(&mut Until::new(&mut stream, left));
    let message = message.map_err(|error| InitError::NoCoordinator {
        address: config.coordinator.clone(),
        after: start.elapsed(),
        last: format!("it went away while it waited for other ranks: {error}"),
    })?;
    match serde_json::from_slice(&message) {
        Ok(Answer::Table(table)) if table.len() == config.size => Ok(table),
        Ok(Answer::Table(table)) => Err(refused(format!("it sent {} addresses", table.len()))),
        Ok(Answer::Refused(why)) => Err(refused(why)),
        Ok(Answer::Missing(missing)) => Err(InitError::Missing { missing, after: start.elapsed() }),
        Err(error) => Err(refused(format!("its answer is malformed: {error}"))),
    }
}

/// At the first of the coordinator's addresses that answers.
fn join(config: &Config, hello: &[u8], left: Duration) -> io::Result<TcpStream> {
    let mut last = io::Error::new(io::ErrorKind::AddrNotAvailable, "no address");
    for address in config.coordinator.to_socket_addrs()? {
        match call(address, &config.secret, hello, left.min(CALL_LIMIT)) {
            Ok(stream) => return Ok(stream),
            Err(error) => last = error,
        }
    }
    Err(last)
}

/// Connects and shakes hands within a limit.
pub(crate) fn call(
    address: SocketAddr,
    secret: &[u8],
    hello: &[u8],
    limit: Duration,
) -> io::Result<TcpStream> {
    let started = Instant::now();
    let mut stream = TcpStream::connect_timeout(&address, limit)?;
    stream.set_nodelay(true)?;
    auth::greet(&mut Until::new(&mut stream, limit.saturating_sub(started.elapsed())), secret, hello)?;
    Ok(stream)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_address_on_the_cable_comes_first() {
        let addresses = |texts: &[&str]| texts.iter().map(|text| text.parse().unwrap()).collect();
        let listed = ["fe80::1", "10.0.1.9", "10.0.7.2", "127.0.0.1"];
        let endpoint = Endpoint {
            host: String::new(),
            addresses: addresses(&listed),
            port: 1,
            connections: 1,
            local: String::new(),
            session: String::new(),
        };
        let sorted: Vec<IpAddr> = addresses(&["10.0.7.2", "10.0.1.9", "127.0.0.1", "fe80::1"]);
        let ours = ["192.168.3.1", "10.0.7.1"].map(|text| text.parse().unwrap());
        assert_eq!(endpoint.nearest_first(&ours).addresses, sorted);
        assert_eq!(endpoint.nearest_first(&[]).addresses, addresses(&listed), "without cables as it was");
    }
}
