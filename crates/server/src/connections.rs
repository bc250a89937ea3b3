//! Connections: taken in until told to stop, none waited for without end.

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

/// Pause after an accept that failed for want of something, file descriptors most likely.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Connections that are open. Dropping them closes them, whatever they are in the middle of.
#[derive(Default)]
pub(crate) struct Connections {
    tasks: JoinSet<()>,
    graceful: GracefulShutdown,
}

impl Connections {
    /// Takes connections until `shutdown` is ready. One that leaves a request's head unfinished for `head_timeout`, or is
    /// idle for as long, is closed.
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
                    // Tokens are small packets that must not wait for one another; without the option they are late, but
                    // right.
                    let _ = connection.set_nodelay(true);
                    let service = TowerToHyperService::new(service.clone());
                    let serving = http.serve_connection(TokioIo::new(connection), service);
                    let serving = open.graceful.watch(serving);
                    // Errors are the client's: it went away, or spoke something else than HTTP.
                    open.tasks.spawn(async { drop(serving.await) });
                }
                Err(error) if is_the_clients(error.kind()) => {}
                Err(_) => tokio::time::sleep(ACCEPT_PAUSE).await,
            }
        }
    }

    /// Tells all to close once their answers have ended; idle ones close at once.
    pub fn close(&mut self) {
        self.tasks.spawn(std::mem::take(&mut self.graceful).shutdown());
    }

    /// Whether all have closed within the limit.
    pub async fn closed(&mut self, limit: Duration) -> bool {
        let all = async { while self.tasks.join_next().await.is_some() {} };
        tokio::time::timeout(limit, all).await.is_ok()
    }
}

fn is_the_clients(kind: ErrorKind) -> bool {
    matches!(kind, ErrorKind::ConnectionAborted | ErrorKind::ConnectionReset | ErrorKind::ConnectionRefused)
}
