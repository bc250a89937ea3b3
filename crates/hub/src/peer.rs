//! Other machines with models. They answer in the hub's form (see [`serve`](crate::serve())), over
//! connections that the caller opens. This crate knows neither their keys nor their addresses.

use std::{
    fmt,
    io::{self, Read, Write},
    sync::Arc,
    time::Duration,
};

use ureq::{
    Agent, Error,
    config::Config,
    http::Uri,
    unversioned::{
        resolver::{ResolvedSocketAddrs, Resolver},
        transport::{Buffers, ConnectionDetails, Connector, LazyBuffers, NextTimeout, Transport},
    },
};

/// Bytes to read from a connection at a time. Larger pieces need fewer system calls.
const INPUT_BYTES: usize = 256 << 10;
/// Bytes of a request.
const OUTPUT_BYTES: usize = 16 << 10;

/// A machine that may have a model.
pub trait Peer: fmt::Debug + Send + Sync {
    /// Its name, for messages.
    fn name(&self) -> String;

    /// Connects to the peer. The implementation must authenticate the peer.
    ///
    /// # Errors
    /// When it cannot be reached.
    fn open(&self) -> io::Result<Box<dyn PeerStream>>;
}

/// A connection to a [`Peer`].
pub trait PeerStream: Read + Write + fmt::Debug + Send + Sync {
    /// Limits each read and write; `None`: no limit.
    ///
    /// # Errors
    /// When the system refuses.
    fn set_timeout(&mut self, limit: Option<Duration>) -> io::Result<()>;
}

/// An HTTP client whose connections are those of a peer.
pub(crate) fn agent(config: Config, peer: Arc<dyn Peer>) -> Agent {
    Agent::with_parts(config, PeerConnector(peer), NoNames)
}

#[derive(Debug)]
struct PeerConnector(Arc<dyn Peer>);

impl Connector for PeerConnector {
    type Out = PeerTransport;

    fn connect(
        &self,
        _details: &ConnectionDetails<'_>,
        _chained: Option<()>,
    ) -> Result<Option<PeerTransport>, Error> {
        let buffers = LazyBuffers::new(INPUT_BYTES, OUTPUT_BYTES);
        Ok(Some(PeerTransport { stream: self.0.open()?, buffers, limit: None }))
    }
}

#[derive(Debug)]
struct PeerTransport {
    stream: Box<dyn PeerStream>,
    buffers: LazyBuffers,
    /// The limit that the stream has.
    limit: Option<Duration>,
}

impl PeerTransport {
    fn set_limit(&mut self, timeout: NextTimeout) -> Result<(), Error> {
        let limit = timeout.not_zero().map(|limit| *limit);
        if limit != self.limit {
            self.stream.set_timeout(limit)?;
            self.limit = limit;
        }
        Ok(())
    }
}

/// A read that was too slow is [`io::ErrorKind::WouldBlock`] on Linux.
fn explained(error: io::Error, timeout: NextTimeout) -> Error {
    match error.kind() {
        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => Error::Timeout(timeout.reason),
        _ => Error::Io(error),
    }
}

impl Transport for PeerTransport {
    fn buffers(&mut self) -> &mut dyn Buffers {
        &mut self.buffers
    }

    fn transmit_output(&mut self, amount: usize, timeout: NextTimeout) -> Result<(), Error> {
        self.set_limit(timeout)?;
        let output = &self.buffers.output()[..amount];
        let sent = self.stream.write_all(output).and_then(|()| self.stream.flush());
        sent.map_err(|error| explained(error, timeout))
    }

    fn await_input(&mut self, timeout: NextTimeout) -> Result<bool, Error> {
        self.set_limit(timeout)?;
        let amount = loop {
            match self.stream.read(self.buffers.input_append_buf()) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                read => break read.map_err(|error| explained(error, timeout))?,
            }
        };
        self.buffers.input_appended(amount);
        Ok(amount > 0)
    }

    /// If the peer has closed the connection in the meantime, the next request fails and is
    /// repeated.
    fn is_open(&mut self) -> bool {
        true
    }

    fn is_tls(&self) -> bool {
        true
    }
}

/// Resolves nothing, because the connector knows the address of its peer.
#[derive(Debug)]
struct NoNames;

impl Resolver for NoNames {
    fn resolve(
        &self,
        _uri: &Uri,
        _config: &Config,
        _timeout: NextTimeout,
    ) -> Result<ResolvedSocketAddrs, Error> {
        let mut addresses = self.empty();
        // Nobody connects to it.
        addresses.push(([0, 0, 0, 0], 0).into());
        Ok(addresses)
    }
}
