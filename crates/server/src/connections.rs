//! TCP connections: accepted until shutdown, then closed within a time limit.

use std::future::Future;
use std::io::ErrorKind;
use std::pin::pin;
use std::time::{Duration, Instant};

use axum::Router;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::GracefulShutdown;
use tokio::net::TcpListener;
use tokio::task::JoinSet;

use crate::client::client;
use crate::config::ServerConfig;

/// Pause after an accept failed for lack of a resource, most likely file descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// While accepting fails, it is logged this often.
const ACCEPT_WARNING_EVERY: Duration = Duration::from_secs(10);
/// Ended connections after which freed memory is given back to the system.
const GIVE_BACK_AFTER: usize = 100;
/// The longest head of a request, and the most bytes of a response that wait in the server.
const BUFFER_BYTES: usize = 64 << 10;

/// Times that a connection may take.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ConnectionLimits {
    head_timeout: Duration,
    pub write_timeout: Duration,
    pub half_closed_limit: Duration,
}

impl ConnectionLimits {
    pub fn of(config: &ServerConfig) -> Self {
        Self {
            head_timeout: config.read_timeout,
            write_timeout: config.write_timeout,
            half_closed_limit: config.half_closed_limit,
        }
    }
}

/// Open connections. Dropping this closes them at once, even in the middle of a response.
#[derive(Default)]
pub(crate) struct Connections {
    tasks: JoinSet<()>,
    graceful: GracefulShutdown,
}

impl Connections {
    /// Accepts connections until `shutdown` is ready. A connection is closed when a request's head
    /// is not complete within its time limit, or when it is idle for that long.
    pub async fn accept(
        listener: TcpListener,
        service: Router,
        limits: ConnectionLimits,
        shutdown: impl Future<Output = ()>,
    ) -> Self {
        let mut http = http1::Builder::new();
        http.timer(TokioTimer::new()).header_read_timeout(limits.head_timeout).max_buf_size(BUFFER_BYTES);
        let (mut warned, mut ended): (Option<Instant>, usize) = (None, 0);
        let mut open = Self::default();
        let mut shutdown = pin!(shutdown);
        loop {
            let accepted = tokio::select! {
                biased;
                () = &mut shutdown => return open,
                _ = open.tasks.join_next(), if !open.tasks.is_empty() => {
                    ended += 1;
                    if ended.is_multiple_of(GIVE_BACK_AFTER) {
                        tokio::task::spawn_blocking(thunder_compute::memory::give_back);
                    }
                    continue;
                }
                accepted = listener.accept() => accepted,
            };
            match accepted {
                Ok((connection, _)) => {
                    // Nagle's algorithm would delay the small packets of a token stream. Failure
                    // only costs latency.
                    let _ = connection.set_nodelay(true);
                    let (client, answers) = client(connection, &limits, service.clone());
                    let serving = http.serve_connection(TokioIo::new(client), answers);
                    let serving = open.graceful.watch(serving);
                    // An error here is the client's: it disconnected or did not speak HTTP.
                    open.tasks.spawn(async { drop(serving.await) });
                }
                Err(error) if is_client_error(error.kind()) => {}
                Err(error) => {
                    if warned.is_none_or(|at| at.elapsed() > ACCEPT_WARNING_EVERY) {
                        warned = Some(Instant::now());
                        let connections = open.tasks.len();
                        tracing::warn!(
                            connections,
                            "cannot accept a connection: {error}; raise the limit of open files (ulimit -n) for more"
                        );
                    }
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
