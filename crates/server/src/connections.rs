//! TCP connections: accepted until shutdown, then closed within a time limit.

use std::future::Future;
use std::io::ErrorKind;
use std::pin::pin;
use std::time::Duration;

use axum::Router;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::GracefulShutdown;
use hyper_util::service::TowerToHyperService;
use tokio::net::TcpListener;
use tokio::task::JoinSet;

/// Pause after an accept failed for lack of a resource, most likely file descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Open connections. Dropping this closes them at once, even in the middle of a response.
#[derive(Default)]
pub(crate) struct Connections {
    tasks: JoinSet<()>,
    graceful: GracefulShutdown,
}

impl Connections {
    /// Accepts connections until `shutdown` is ready. A connection is closed when a request's head
    /// is not complete within `head_timeout`, or when it is idle for that long.
    pub async fn accept(
        listener: TcpListener,
        service: Router,
        head_timeout: Duration,
        shutdown: impl Future<Output = ()>,
    ) -> Self {
        let mut http = http1::Builder::new();
        http.timer(TokioTimer::new()).header_read_timeout(head_timeout);
        let mut open = Self::default();
        let mut shutdown = pin!(shutdown);
        loop {
            let accepted = tokio::select! {
                biased;
                () = &mut shutdown => return open,
                _ = open.tasks.join_next(), if !open.tasks.is_empty() => continue,
                accepted = listener.accept() => accepted,
            };
            match accepted {
                Ok((connection, _)) => {
                    // Nagle's algorithm would delay the small packets of a token stream. Failure
                    // only costs latency.
                    let _ = connection.set_nodelay(true);
                    let service = TowerToHyperService::new(service.clone());
                    let serving = http.serve_connection(TokioIo::new(connection), service);
                    let serving = open.graceful.watch(serving);
                    // An error here is the client's: it disconnected or did not speak HTTP.
                    open.tasks.spawn(async { drop(serving.await) });
                }
                Err(error) if is_client_error(error.kind()) => {}
                Err(_) => tokio::time::sleep(ACCEPT_PAUSE).await,
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
