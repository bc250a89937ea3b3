//! Options of `thunder serve` and `thunder up` that limit clients, and allow web pages.

use std::time::Duration;

use clap::Args;
use thunder_node::agent::ApiLimits;
use thunder_server::{ServerConfig, ServerError, check_origins};

/// Limits of connections and bodies, and origins.
#[derive(Args)]
pub struct LimitArgs {
    /// Origin whose web pages may use the server, e.g. https://chat.example; may be repeated; *
    /// allows all origins [default: none]
    ///
    /// For browser clients that another machine serves. If the server has no keys, these pages need
    /// no key either.
    #[arg(long = "allow-origin", value_name = "ORIGIN")]
    pub allowed_origins: Vec<String>,
    /// Maximum number of connections; more are answered with 503
    ///
    /// A connection needs a file descriptor, on a node two: see `ulimit -n`.
    #[arg(long, value_name = "N", default_value_t = 10_000, value_parser = clap::value_parser!(u32).range(1..))]
    max_connections: u32,
    /// Maximum MiB of a request's body; tokenizing it briefly needs up to 180 times as much memory
    #[arg(long, value_name = "MIB", default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=64))]
    body_limit: u32,
    /// Seconds to wait for a request's head, for its body, and on an idle connection before closing
    /// it
    #[arg(long, value_name = "SECONDS", default_value_t = 60, value_parser = clap::value_parser!(u32).range(1..=86_400))]
    read_timeout: u32,
    /// Seconds that a request may take, from its head to the end of its answer; then it ends with
    /// an error (504) [default: no limit]
    ///
    /// Clients may set a shorter time with the header `x-request-timeout`.
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u32).range(1..=86_400))]
    request_timeout: Option<u32>,
    /// Seconds after which a client that reads nothing of its answer is disconnected
    #[arg(long, value_name = "SECONDS", default_value_t = 60, value_parser = clap::value_parser!(u32).range(1..=86_400))]
    write_timeout: u32,
}

impl LimitArgs {
    /// Refuses origins that no browser sends.
    ///
    /// # Errors
    /// When one is neither `*` nor a scheme and a host.
    pub fn check(&self) -> Result<(), ServerError> {
        check_origins(&self.allowed_origins)
    }

    /// Limits for clients of a node's API.
    pub fn of_node(&self) -> ApiLimits {
        let seconds = |seconds: u32| Duration::from_secs(seconds.into());
        ApiLimits {
            connections: self.max_connections as usize,
            body_bytes: (self.body_limit as usize) << 20,
            read_timeout: seconds(self.read_timeout),
            request_timeout: self.request_timeout.map(seconds),
            write_timeout: seconds(self.write_timeout),
        }
    }

    /// The configuration of a server with these limits.
    pub fn apply(&self, config: ServerConfig) -> ServerConfig {
        let limits = self.of_node();
        ServerConfig {
            allowed_origins: self.allowed_origins.clone(),
            max_connections: limits.connections,
            body_limit_bytes: limits.body_bytes,
            read_timeout: limits.read_timeout,
            request_timeout: limits.request_timeout,
            write_timeout: limits.write_timeout,
            ..config
        }
    }
}
