//! The shared-memory links between ranks of one host.

use std::fs::File;
use std::io;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::mpsc;

use super::dial::{ConnectionRequest, hello};
use crate::link::Link;
use crate::link::shm::{ShmLink, segment_bytes};
use crate::platform::{self, Mapping};
use crate::rendezvous::{CONNECT_LIMIT, DeadlineStream, Endpoint, HandshakeStream, Listener, handshake};
use crate::{Config, InitError, Observer};

/// Accepts processes of this user (or root) that know the secret.
pub(super) fn listen(
    listener: UnixListener,
    secret: Vec<u8>,
    accepted: mpsc::Sender<(UnixStream, Vec<u8>)>,
    observer: Option<Observer>,
) -> io::Result<Listener> {
    listener.set_nonblocking(true)?;
    let accept = move || match listener.accept() {
        Ok((stream, _)) => {
            stream.set_nonblocking(false)?;
            Ok(platform::peer_is_same_user(&stream)?.then_some(stream))
        }
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(None),
        Err(error) => Err(error),
    };
    Listener::start(accept, secret, accepted, observer)
}

/// The higher rank's side of a pair: gets the pair's memory from the lower rank, and with
/// `gets_board` also the board's.
pub(super) fn connect(
    config: &Config,
    endpoint: &Endpoint,
    request: &ConnectionRequest,
    gets_board: bool,
) -> Result<(Box<dyn Link>, Option<File>), InitError> {
    let hello = hello(request)?;
    let attempt = || {
        let mut stream = platform::connect_local(&endpoint.local)?;
        handshake::connect(&mut DeadlineStream::new(&mut stream, CONNECT_LIMIT), &config.secret, &hello)?;
        stream.set_timeouts(Some(config.rendezvous_limit))?;
        let object = platform::receive_descriptor(&stream)?;
        let board = gets_board.then(|| platform::receive_descriptor(&stream)).transpose()?;
        stream.set_timeouts(None)?;
        let mapping = Mapping::new(&object, segment_bytes(config.ring_bytes))?;
        Ok((ShmLink::new(mapping, config.ring_bytes, false, stream)?, board))
    };
    let (link, board) = attempt().map_err(|source| InitError::Unreachable {
        rank: request.to,
        tried: format!("local socket {}", endpoint.local),
        source,
    })?;
    Ok((Box::new(link), board))
}

/// The lower rank's side of a pair: makes the pair's memory and passes it on. The lowest rank of a
/// host passes its `board` on too.
pub(super) fn accept(
    config: &Config,
    stream: UnixStream,
    board: Option<&File>,
) -> Result<Box<dyn Link>, InitError> {
    let bytes = segment_bytes(config.ring_bytes);
    let attempt = || {
        let object = platform::shared_object(bytes)?;
        let mapping = Mapping::new(&object, bytes)?;
        platform::send_descriptor(&stream, &object)?;
        board.map(|board| platform::send_descriptor(&stream, board)).transpose()?;
        stream.set_timeouts(None)?;
        ShmLink::new(mapping, config.ring_bytes, true, stream)
    };
    Ok(Box::new(attempt().map_err(InitError::system("shared memory cannot be created"))?))
}
