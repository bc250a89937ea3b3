//! The sockets on which a rank takes connections from the others.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, TcpListener};
use std::os::unix::net::UnixListener;

use crate::config::bind;
use crate::platform;
use crate::rendezvous::{Endpoint, handshake, interfaces};
use crate::{Config, InitError};

/// A rank's two listening sockets, and the endpoint that tells other ranks how to reach them.
pub(crate) struct BoundEndpoint {
    pub(super) tcp: TcpListener,
    pub(super) local: UnixListener,
    pub endpoint: Endpoint,
}

impl BoundEndpoint {
    pub fn bind(config: &Config) -> Result<Self, InitError> {
        let ports = config.ports.as_ref();
        let tcp = bind(Ipv6Addr::UNSPECIFIED.into(), ports)
            .or_else(|_| bind(Ipv4Addr::UNSPECIFIED.into(), ports))
            .map_err(|error| cannot_listen(config, error))?;
        let port = tcp.local_addr().map_err(InitError::system("the listener has no address"))?.port();
        let session = hex(&handshake::random::<16>().map_err(InitError::system("no random numbers"))?);
        let local = format!("thunder-{session}");
        let listener = platform::bind_local(&local)
            .map_err(InitError::system("this rank cannot listen on a local socket"))?;
        let host = config
            .host_identity()
            .map_err(InitError::system("the host's identity cannot be read; set THUNDER_HOST"))?;
        let mut addresses = interfaces::addresses();
        addresses.push(IpAddr::V4(Ipv4Addr::LOCALHOST));
        let connections = config.connections;
        let sealed = config.encrypt;
        let endpoint = Endpoint { host, addresses, port, connections, local, session, sealed };
        Ok(Self { tcp, local: listener, endpoint })
    }
}

fn cannot_listen(config: &Config, error: io::Error) -> InitError {
    match &config.ports {
        Some(ports) if error.kind() == io::ErrorKind::AddrInUse => InitError::Setting {
            name: "the range of ports (THUNDER_PORTS)".to_owned(),
            value: format!("{}-{}", ports.start(), ports.end()),
            remedy: "all of them are in use: give a longer range, or another one".to_owned(),
        },
        _ => InitError::system("this rank cannot listen for others")(error),
    }
}

pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
