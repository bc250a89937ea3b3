//! How a rank connects to a lower one over TCP.

use std::io;
use std::net::{SocketAddr, TcpStream};
use std::time::Instant;

use serde::{Deserialize, Serialize};

use crate::forming::Reports;
use crate::rendezvous::{CONNECT_LIMIT, Endpoint, HandshakeStream, RETRY_INTERVAL, connect, interfaces};
use crate::{Config, FormingEvent, InitError};

/// What a connection between two ranks is for. The variants' names are part of the wire format.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(super) enum Purpose {
    /// The watch's.
    #[serde(rename = "Anchor")]
    Liveness,
    /// The data link's, with the number of the connection where the link has several.
    Data(usize),
}

/// The hello of a connection between two ranks. The field names are part of the wire format.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct ConnectionRequest {
    pub session: String,
    pub from: usize,
    pub to: usize,
    pub purpose: Purpose,
}

/// Tries each of a rank's addresses, repeatedly as long as packets to one of them may have been
/// lost.
pub(super) fn dial(
    config: &Config,
    endpoint: &Endpoint,
    request: &ConnectionRequest,
    deadline: Instant,
) -> Result<TcpStream, InitError> {
    let has_local = endpoint.addresses.iter().any(interfaces::is_link_local);
    let scopes = if has_local { interfaces::scopes(&config.coordinator) } else { Vec::new() };
    let addresses = endpoint.sockets(&scopes);
    let hello = hello(request)?;
    let tried = || addresses.iter().map(SocketAddr::to_string).collect::<Vec<_>>().join(", ");
    let mut reports = Reports::new(config.observer.as_ref(), deadline);
    let mut last = None;
    'rounds: loop {
        let mut may_be_lost = false;
        for &address in &addresses {
            let limit = CONNECT_LIMIT.min(deadline.saturating_duration_since(Instant::now()));
            if limit.is_zero() {
                break 'rounds;
            }
            // The address may belong to another machine here; only the right rank passes the
            // handshake.
            let attempt = connect(address, &config.secret, &hello, limit).and_then(|stream| {
                stream.set_timeouts(None)?;
                Ok(stream)
            });
            match attempt {
                Ok(stream) => return Ok(stream),
                Err(error) => {
                    may_be_lost |= is_silence(&error);
                    last = Some(error);
                }
            }
        }
        if !may_be_lost {
            break;
        }
        if let Some(why) = last.as_ref().map(io::Error::to_string) {
            let rank = request.to;
            reports.due(false, |left| FormingEvent::Unreachable { rank, tried: tried(), why, left });
        }
        std::thread::sleep(RETRY_INTERVAL);
    }
    let source =
        last.unwrap_or_else(|| io::Error::new(io::ErrorKind::TimedOut, "no time was left to connect"));
    Err(InitError::Unreachable { rank: request.to, tried: tried(), source })
}

/// True when nothing answered: neither the rank nor, on its network, the request for its hardware
/// address.
fn is_silence(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::TimedOut | io::ErrorKind::WouldBlock | io::ErrorKind::HostUnreachable
    )
}

/// The request as it is sent in the handshake.
pub(super) fn hello(request: &ConnectionRequest) -> Result<Vec<u8>, InitError> {
    serde_json::to_vec(request)
        .map_err(|error| InitError::system("a connection request cannot be written")(io::Error::other(error)))
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::TcpListener;
    use std::sync::mpsc;
    use std::thread;
    use std::time::Duration;

    use super::*;
    use crate::rendezvous::{Listener, handshake};

    const SECRET: &[u8] = b"secret";

    /// The listening socket of rank 0, and the request of rank 1 that dials it.
    fn lower_rank() -> (TcpListener, Config, Endpoint, ConnectionRequest) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let mut config = Config::new(1, 2, address.to_string());
        config.secret = SECRET.to_vec();
        let endpoint = Endpoint {
            host: String::new(),
            addresses: vec![address.ip()],
            port: address.port(),
            connections: 1,
            local: String::new(),
            session: String::new(),
            sealed: false,
        };
        let request =
            ConnectionRequest { session: String::new(), from: 1, to: 0, purpose: Purpose::Liveness };
        (listener, config, endpoint, request)
    }

    /// Ranks of different builds must understand each other.
    #[test]
    fn a_request_keeps_its_wire_format() {
        let (.., mut request) = lower_rank();
        let text = |request: &ConnectionRequest| String::from_utf8(hello(request).unwrap()).unwrap();
        assert_eq!(text(&request), r#"{"session":"","from":1,"to":0,"purpose":"Anchor"}"#);
        request.purpose = Purpose::Data(3);
        assert_eq!(text(&request), r#"{"session":"","from":1,"to":0,"purpose":{"Data":3}}"#);
    }

    #[test]
    fn a_rank_whose_first_answer_is_lost_is_dialled_again() {
        let (listener, config, endpoint, request) = lower_rank();
        let (sender, accepted) = mpsc::channel();
        let listener = thread::spawn(move || {
            let unanswered = listener.accept().unwrap();
            (Listener::tcp(listener, SECRET.to_vec(), sender, None).unwrap(), unanswered)
        });
        let stream = dial(&config, &endpoint, &request, Instant::now() + 10 * CONNECT_LIMIT).unwrap();
        let (peer, hello) = accepted.recv_timeout(CONNECT_LIMIT).unwrap();
        assert_eq!(peer.peer_addr().unwrap(), stream.local_addr().unwrap());
        assert_eq!(hello, super::hello(&request).unwrap());
        drop(listener.join().unwrap());
    }

    #[test]
    fn a_rank_that_never_answers_is_dialled_until_the_deadline() {
        let (_listener, config, endpoint, request) = lower_rank();
        let limit = CONNECT_LIMIT + Duration::from_millis(200);
        let started = Instant::now();
        let error = dial(&config, &endpoint, &request, started + limit).unwrap_err();
        assert!(matches!(&error, InitError::Unreachable { source, .. } if is_silence(source)), "{error}");
        assert!((limit..2 * limit).contains(&started.elapsed()), "{:?}", started.elapsed());
    }

    #[test]
    fn a_rank_that_refuses_connections_is_given_up_at_once() {
        let (listener, config, endpoint, request) = lower_rank();
        drop(listener);
        let started = Instant::now();
        let error = dial(&config, &endpoint, &request, started + CONNECT_LIMIT).unwrap_err();
        assert!(matches!(&error, InitError::Unreachable { rank: 0, .. }), "{error}");
        assert!(started.elapsed() < CONNECT_LIMIT, "{:?}", started.elapsed());
    }

    /// A stream that replaces the confirmation by another byte, or loses it.
    struct WithoutConfirmation(TcpStream, Option<u8>);

    impl Read for WithoutConfirmation {
        fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
            self.0.read(into)
        }
    }

    impl Write for WithoutConfirmation {
        fn write(&mut self, from: &[u8]) -> io::Result<usize> {
            match self.1 {
                _ if from.len() > 1 => self.0.write(from),
                Some(byte) => self.0.write(&[byte]),
                None => Err(io::ErrorKind::TimedOut.into()),
            }
        }

        fn flush(&mut self) -> io::Result<()> {
            self.0.flush()
        }
    }

    #[test]
    fn only_confirmed_connections_are_accepted() {
        let (listener, config, endpoint, request) = lower_rank();
        let (sender, accepted) = mpsc::channel();
        let _listener = Listener::tcp(listener, SECRET.to_vec(), sender, None).unwrap();
        for (said, is_sent) in [(None, false), (Some(0), true)] {
            let stream = TcpStream::connect((endpoint.addresses[0], endpoint.port)).unwrap();
            let mut stream = WithoutConfirmation(stream, said);
            let connected = handshake::connect(&mut stream, SECRET, &hello(&request).unwrap());
            assert_eq!(connected.is_ok(), is_sent);
        }
        let last = dial(&config, &endpoint, &request, Instant::now() + CONNECT_LIMIT).unwrap();
        let (peer, _) = accepted.recv_timeout(CONNECT_LIMIT).unwrap();
        assert_eq!(peer.peer_addr().unwrap(), last.local_addr().unwrap());
        assert!(accepted.recv_timeout(Duration::from_millis(50)).is_err());
    }
}
