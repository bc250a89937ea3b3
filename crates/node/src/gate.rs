//! A node's listening port. Strangers may open any number of connections: a limited number is held
//! at a time, each for a limited time, and a member always gets in.

use std::collections::VecDeque;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustls::ServerConfig;
use rustls::server::Acceptor;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use tokio::task::{AbortHandle, JoinSet};
use tokio_rustls::LazyConfigAcceptor;
use tokio_rustls::server::TlsStream;

use crate::id::NodeId;
use crate::tls::{Protocol, Tls, peer_of};

/// Maximum unauthenticated connections. Beyond this the oldest is dropped; a member authenticates
/// in milliseconds.
const MOST_UNPROVEN: usize = 256;
/// Time for a handshake.
const HANDSHAKE_LIMIT: Duration = Duration::from_secs(5);
/// Time for a stranger's whole connection: a handshake and a few messages.
const JOIN_LIMIT: Duration = Duration::from_secs(15);
/// Pause after accepting failed for lack of a resource, probably file descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// Interval of log messages while accepting fails.
const ACCEPT_WARNING_EVERY: Duration = Duration::from_secs(10);
/// Maximum connections that wait in the system to be accepted.
const BACKLOG: i32 = 1024;
/// Maximum members' connections that wait for the agent.
const MEMBERS_WAITING: usize = 64;

/// A connection whose client has proved its key.
#[derive(Debug)]
pub struct Connection {
    /// Client's key: a member's, unless the protocol is [`Protocol::Join`].
    pub peer: NodeId,
    /// The protocol that the client requests.
    pub protocol: Protocol,
    /// The client's address.
    pub remote: SocketAddr,
    /// The data.
    pub stream: TlsStream<TcpStream>,
}

/// The server side of each protocol.
#[derive(Debug)]
struct Configs([(Protocol, Arc<ServerConfig>); 3]);

impl Configs {
    fn new(tls: &Tls) -> Result<Self, rustls::Error> {
        let [peer, call, join] = Protocol::ALL;
        let config = |protocol| Ok::<_, rustls::Error>((protocol, tls.server(protocol)?));
        Ok(Self([config(peer)?, config(call)?, config(join)?]))
    }

    /// The protocol that a client's hello names.
    fn choose(&self, hello: &rustls::server::ClientHello<'_>) -> Option<&(Protocol, Arc<ServerConfig>)> {
        let asked: Vec<&[u8]> = hello.alpn()?.collect();
        self.0.iter().find(|(protocol, _)| asked.contains(&protocol.name()))
    }
}

/// Binds an address. `[::]` accepts IPv4 as well.
///
/// # Errors
/// If the system refuses, probably because the port is in use.
pub fn bind(address: SocketAddr) -> io::Result<TcpListener> {
    let domain = socket2::Domain::for_address(address);
    let socket = socket2::Socket::new(domain, socket2::Type::STREAM, None)?;
    if address.is_ipv6() {
        socket.set_only_v6(false)?;
    }
    // Lets a restarted agent use its port although old connections linger.
    socket.set_reuse_address(true)?;
    socket.bind(&address.into())?;
    socket.listen(BACKLOG)?;
    socket.set_nonblocking(true)?;
    TcpListener::from_std(socket.into())
}

/// Accepts connections on `listener`. Members' connections come out of the receiver; strangers' are
/// passed to `join`, whose future is dropped when its time is over. Ends when the receiver is
/// dropped.
///
/// # Errors
/// If TLS cannot be set up.
pub fn open<F>(
    listener: TcpListener,
    tls: &Tls,
    join: impl Fn(Connection) -> F + Send + Sync + 'static,
) -> Result<mpsc::Receiver<Connection>, rustls::Error>
where
    F: Future<Output = ()> + Send + 'static,
{
    let configs = Arc::new(Configs::new(tls)?);
    let (members, receiver) = mpsc::channel(MEMBERS_WAITING);
    tokio::spawn(accept(listener, configs, members, Arc::new(join)));
    Ok(receiver)
}

async fn accept<F>(
    listener: TcpListener,
    configs: Arc<Configs>,
    members: mpsc::Sender<Connection>,
    join: Arc<impl Fn(Connection) -> F + Send + Sync + 'static>,
) where
    F: Future<Output = ()> + Send + 'static,
{
    let mut unproven = Unproven::default();
    let mut failures = AcceptFailures::default();
    loop {
        let accepted = tokio::select! {
            biased;
            () = members.closed() => return,
            _ = unproven.tasks.join_next(), if !unproven.tasks.is_empty() => continue,
            accepted = listener.accept() => accepted,
        };
        let (stream, remote) = match accepted {
            Ok(accepted) => accepted,
            Err(error) => {
                failures.pause("nodes", &error).await;
                continue;
            }
        };
        let (configs, members, join) = (configs.clone(), members.clone(), join.clone());
        unproven.add(async move {
            let handshake = tokio::time::timeout(HANDSHAKE_LIMIT, handshake(stream, remote, &configs));
            let Ok(Some(connection)) = handshake.await else { return };
            if connection.protocol == Protocol::Join {
                let _ = tokio::time::timeout(JOIN_LIMIT, join(connection)).await;
            } else {
                // Fails when the agent ends.
                let _ = members.send(connection).await;
            }
        });
    }
}

/// Failures to accept connections at one door, probably for lack of file descriptors.
#[derive(Default)]
pub(crate) struct AcceptFailures {
    warned: Option<Instant>,
}

impl AcceptFailures {
    /// Logs a failure, at intervals, and waits until another attempt may succeed.
    pub async fn pause(&mut self, door: &str, error: &io::Error) {
        if self.warned.is_none_or(|at| at.elapsed() > ACCEPT_WARNING_EVERY) {
            self.warned = Some(Instant::now());
            tracing::warn!(
                "cannot accept a connection of {door}: {error}; raise the limit of open files (ulimit -n) for more"
            );
        }
        tokio::time::sleep(ACCEPT_PAUSE).await;
    }
}

/// Tasks of unauthenticated connections, oldest first.
#[derive(Default)]
pub(crate) struct Unproven {
    pub tasks: JoinSet<()>,
    oldest: VecDeque<AbortHandle>,
}

impl Unproven {
    pub fn add(&mut self, task: impl Future<Output = ()> + Send + 'static) {
        if self.oldest.len() >= MOST_UNPROVEN {
            self.oldest.retain(|task| !task.is_finished());
        }
        if self.oldest.len() >= MOST_UNPROVEN
            && let Some(oldest) = self.oldest.pop_front()
        {
            oldest.abort();
        }
        self.oldest.push_back(self.tasks.spawn(task));
    }
}

/// Does the handshake; `None` if the client may not use the protocol that it requests, or does not
/// use TLS.
async fn handshake(stream: TcpStream, remote: SocketAddr, configs: &Configs) -> Option<Connection> {
    // A failure only costs latency.
    let _ = stream.set_nodelay(true);
    let start = LazyConfigAcceptor::new(Acceptor::default(), stream).await.ok()?;
    let (protocol, config) = configs.choose(&start.client_hello())?;
    let stream = start.into_stream(config.clone()).await.ok()?;
    let peer = peer_of(stream.get_ref().1)?;
    Some(Connection { peer, protocol: *protocol, remote, stream })
}
