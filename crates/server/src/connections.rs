//! Connections: accepted until shutdown, then closed within a time limit.

use std::future::Future;
use std::io::ErrorKind;
use std::net::SocketAddr;
use std::pin::pin;
use std::time::{Duration, Instant};

use axum::Router;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::GracefulShutdown;
use tokio::net::{TcpListener, TcpStream, UnixListener, UnixStream};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio_rustls::TlsAcceptor;

use crate::access::Peer;
use crate::client::{Socket, client};
use crate::config::ServerConfig;

/// Pause after an accept failed for lack of a resource, most likely file descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// Time for a TLS handshake.
const HANDSHAKE_LIMIT: Duration = Duration::from_secs(5);
/// Interval of log messages while connections cannot be accepted.
const WARNING_EVERY: Duration = Duration::from_secs(10);
/// Number of ended connections after which freed memory is returned to the system.
const GIVE_BACK_AFTER: usize = 100;
/// Maximum size of a request's head, and maximum bytes of a response that wait in the server.
const BUFFER_BYTES: usize = 64 << 10;

/// Limits for the number and times of connections.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ConnectionLimits {
    most: usize,
    head_timeout: Duration,
    pub write_timeout: Duration,
    pub half_closed_limit: Duration,
}

impl ConnectionLimits {
    pub fn of(config: &ServerConfig) -> Self {
        Self {
            most: config.max_connections,
            head_timeout: config.read_timeout,
            write_timeout: config.write_timeout,
            half_closed_limit: config.half_closed_limit,
        }
    }
}

/// Additional connections for the server's own user: a client that fills all others must not
/// prevent the operator from revoking a key.
const LOCAL_BEYOND: usize = 16;

/// The response to unencrypted connections beyond the limit.
const FULL: &[u8] =
    b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 1\r\nconnection: close\r\ncontent-length: 0\r\n\r\n";

/// Open connections. Dropping this closes them at once, even in the middle of a response.
#[derive(Default)]
pub(crate) struct Connections {
    tasks: JoinSet<()>,
    graceful: GracefulShutdown,
}

/// Sources of connections.
pub(crate) struct Doors {
    pub network: TcpListener,
    /// Connections of the server's user on this machine.
    pub local: Option<UnixListener>,
}

impl Doors {
    /// The next connection, before its handshake. `tls` encrypts those from the network.
    async fn accept(&self, tls: Option<&TlsAcceptor>) -> std::io::Result<Knock> {
        let local = async {
            match &self.local {
                Some(local) => local.accept().await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            accepted = self.network.accept() => {
                let (stream, address) = accepted?;
                // Nagle's algorithm would delay the small packets of a token stream. Failure only
                // costs latency.
                let _ = stream.set_nodelay(true);
                Ok(Knock::Network(stream, address, tls.cloned()))
            }
            accepted = local => Ok(Knock::Local(accepted?.0)),
        }
    }
}

/// A connection before its handshake.
enum Knock {
    Network(TcpStream, SocketAddr, Option<TlsAcceptor>),
    Local(UnixStream),
}

impl Knock {
    /// Maximum number of connections for accepting this one.
    fn most(&self, limits: &ConnectionLimits) -> usize {
        match self {
            Self::Network(..) => limits.most,
            Self::Local(_) => limits.most.saturating_add(LOCAL_BEYOND),
        }
    }

    /// Refuses the connection, without waiting.
    fn refuse(self) {
        // A client that does not receive the response sees a closed connection.
        let _ = match self {
            Self::Local(stream) => stream.try_write(FULL),
            Self::Network(stream, _, None) => stream.try_write(FULL),
            Self::Network(_, _, Some(_)) => Ok(0),
        };
    }

    /// The connection's bytes; `None` if the client does not complete the handshake in time.
    async fn open(self) -> Option<(Box<dyn Socket>, Peer)> {
        match self {
            Self::Local(stream) => Some((Box::new(stream), Peer::Local)),
            Self::Network(stream, address, None) => Some((Box::new(stream), Peer::Network(address))),
            Self::Network(stream, address, Some(tls)) => {
                // The client caused the error: it speaks no TLS, or does not trust the certificate.
                let stream = tokio::time::timeout(HANDSHAKE_LIMIT, tls.accept(stream)).await.ok()?.ok()?;
                Some((Box::new(stream), Peer::Network(address)))
            }
        }
    }
}

impl Connections {
    /// Accepts connections until `until` is ready, and returns its value. A connection is closed if
    /// a request's head is not complete within its time limit, or if it is idle for that long. The
    /// latest of `routers` answers requests.
    pub async fn accept<T>(
        &mut self,
        doors: &Doors,
        tls: Option<TlsAcceptor>,
        routers: &watch::Receiver<Router>,
        limits: ConnectionLimits,
        until: impl Future<Output = T>,
    ) -> T {
        let mut http = http1::Builder::new();
        http.timer(TokioTimer::new()).header_read_timeout(limits.head_timeout).max_buf_size(BUFFER_BYTES);
        let (mut warned, mut ended): (Option<Instant>, usize) = (None, 0);
        let mut warn = |connections: usize, what: &str| {
            if warned.is_none_or(|at| at.elapsed() > WARNING_EVERY) {
                warned = Some(Instant::now());
                tracing::warn!(connections, "{what}");
            }
        };
        let mut until = pin!(until);
        loop {
            let accepted = tokio::select! {
                biased;
                said = &mut until => return said,
                _ = self.tasks.join_next(), if !self.tasks.is_empty() => {
                    ended += 1;
                    if ended.is_multiple_of(GIVE_BACK_AFTER) {
                        tokio::task::spawn_blocking(thunder_compute::memory::give_back);
                    }
                    continue;
                }
                accepted = doors.accept(tls.as_ref()) => accepted,
            };
            match accepted {
                Ok(knock) if self.tasks.len() >= knock.most(&limits) => {
                    knock.refuse();
                    warn(limits.most, "--max-connections is reached: more are refused");
                }
                Ok(knock) => {
                    let (http, routers, watcher) = (http.clone(), routers.clone(), self.graceful.watcher());
                    self.tasks.spawn(async move {
                        let Some((stream, peer)) = knock.open().await else { return };
                        let (client, answers) = client(stream, peer, &limits, routers);
                        let serving = http.serve_connection(TokioIo::new(client), answers);
                        // The client caused an error here: it disconnected or did not speak HTTP.
                        drop(watcher.watch(serving).await);
                    });
                }
                Err(error) if is_client_error(error.kind()) => {}
                Err(error) => {
                    let remedy = "raise the limit of open files (ulimit -n) for more";
                    warn(self.tasks.len(), &format!("cannot accept a connection: {error}; {remedy}"));
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                }
            }
        }
    }

    /// Closes idle connections now and the others when their current response ends.
    pub fn close(&mut self) {
        self.tasks.spawn(std::mem::take(&mut self.graceful).shutdown());
    }

    /// Waits until all connections are closed; false if `limit` passes first.
    pub async fn closed(&mut self, limit: Duration) -> bool {
        let all = async { while self.tasks.join_next().await.is_some() {} };
        tokio::time::timeout(limit, all).await.is_ok()
    }
}

fn is_client_error(kind: ErrorKind) -> bool {
    matches!(kind, ErrorKind::ConnectionAborted | ErrorKind::ConnectionReset | ErrorKind::ConnectionRefused)
}
