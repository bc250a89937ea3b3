//! The options of `thunder serve` that limit connections and bodies.

use std::time::Duration;

use clap::Args;
use thunder_server::ServerConfig;

/// Limits of connections, bodies and the queue.
#[derive(Args)]
pub struct LimitArgs {
    /// Connections at a time; more are answered with 503
    ///
    /// Each takes a file descriptor: see `ulimit -n`.
    #[arg(long, value_name = "N", default_value_t = 10_000, value_parser = clap::value_parser!(u32).range(1..))]
    max_connections: u32,
    /// Requests that may wait for the engine; more are answered with 429. A team may have an eighth
    /// of them. Of a server with a store; without one 1,024 may wait
    #[arg(long, value_name = "N", default_value_t = 4096, value_parser = clap::value_parser!(u32).range(1..))]
    pub max_waiting: u32,
    /// MiB of a request's body; reading it takes 180 times as much memory for a moment
    #[arg(long, value_name = "MIB", default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=1024))]
    body_limit: u32,
    /// Seconds for a request's head, again for its body, and until an idle connection is closed
    #[arg(long, value_name = "SECONDS", default_value_t = 60, value_parser = clap::value_parser!(u32).range(1..=86_400))]
    read_timeout: u32,
    /// Seconds that a request may take from its head to its answer's end; then it ends with an
    /// error (504) [default: no limit]
    ///
    /// Clients may set less, by the header `x-request-timeout`.
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u32).range(1..=86_400))]
    request_timeout: Option<u32>,
    /// Seconds until a client that takes nothing of its answer is disconnected
    #[arg(long, value_name = "SECONDS", default_value_t = 60, value_parser = clap::value_parser!(u32).range(1..=86_400))]
    write_timeout: u32,
}

impl LimitArgs {
    /// The configuration with these limits.
    pub fn apply(&self, config: ServerConfig) -> ServerConfig {
        let seconds = |seconds: u32| Duration::from_secs(seconds.into());
        ServerConfig {
            max_connections: self.max_connections as usize,
            body_limit_bytes: (self.body_limit as usize) << 20,
            read_timeout: seconds(self.read_timeout),
            request_timeout: self.request_timeout.map(seconds),
            write_timeout: seconds(self.write_timeout),
            ..config
        }
    }
}
