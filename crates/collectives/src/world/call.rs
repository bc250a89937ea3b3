//! How a rank calls another one.

use std::io;
use std::net::{SocketAddr, TcpStream};
use std::time::Instant;

use serde::{Deserialize, Serialize};

use crate::rendezvous::{CALL_LIMIT, Endpoint, RETRY, Stream, call};
use crate::{Config, InitError};

/// What a connection between two ranks is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(super) enum Purpose {
    Anchor,
    /// With the connection's number, where there are several.
    Data(usize),
}

#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Call {
    pub session: String,
    pub from: usize,
    pub to: usize,
    pub purpose: Purpose,
}

/// Calls a rank at each of its addresses, and again as long as packets may have been lost on the way to one of them.
pub(super) fn dial(
    config: &Config,
    endpoint: &Endpoint,
    to: &Call,
    deadline: Instant,
) -> Result<TcpStream, InitError> {
    let addresses: Vec<SocketAddr> =
        endpoint.addresses.iter().map(|address| SocketAddr::new(*address, endpoint.port)).collect();
    let hello = hello(to)?;
    let mut last = None;
    'calls: loop {
        let mut may_be_lost = false;
        for &address in &addresses {
            let limit = CALL_LIMIT.min(deadline.saturating_duration_since(Instant::now()));
            if limit.is_zero() {
                break 'calls;
            }
            // An address may belong to somebody else here; only the right rank passes the handshake.
            let attempt = call(address, &config.secret, &hello, limit).and_then(|stream| {
                stream.limit(None)?;
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
        std::thread::sleep(RETRY);
    }
    let tried = addresses.iter().map(SocketAddr::to_string).collect::<Vec<_>>().join(", ");
    let source =
        last.unwrap_or_else(|| io::Error::new(io::ErrorKind::TimedOut, "no time was left to call it"));
    Err(InitError::Unreachable { rank: to.to, tried, source })
}

/// Whether nobody answered: the rank, or the question which machine has its address.
fn is_silence(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::TimedOut | io::ErrorKind::WouldBlock | io::ErrorKind::HostUnreachable
    )
}

pub(super) fn hello(call: &Call) -> Result<Vec<u8>, InitError> {
    serde_json::to_vec(call)
        .map_err(|error| InitError::system("a call cannot be written")(io::Error::other(error)))
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::TcpListener;
    use std::sync::mpsc;
    use std::thread;
    use std::time::Duration;

    use super::*;
    use crate::auth;
    use crate::rendezvous::Door;

    const SECRET: &[u8] = b"secret";

    /// A rank that listens, and who calls it.
    fn called() -> (TcpListener, Config, Endpoint, Call) {
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
        };
        let call = Call { session: String::new(), from: 1, to: 0, purpose: Purpose::Anchor };
        (listener, config, endpoint, call)
    }

    #[test]
    fn a_rank_whose_first_answer_is_lost_is_called_again() {
        let (listener, config, endpoint, call) = called();
        let (sender, guests) = mpsc::channel();
        let listener = thread::spawn(move || {
            let unanswered = listener.accept().unwrap();
            (Door::tcp(listener, SECRET.to_vec(), sender).unwrap(), unanswered)
        });
        let stream = dial(&config, &endpoint, &call, Instant::now() + 10 * CALL_LIMIT).unwrap();
        let (guest, hello) = guests.recv_timeout(CALL_LIMIT).unwrap();
        assert_eq!(guest.peer_addr().unwrap(), stream.local_addr().unwrap());
        assert_eq!(hello, super::hello(&call).unwrap());
        drop(listener.join().unwrap());
    }

    #[test]
    fn a_rank_that_never_answers_is_called_until_the_time_is_over() {
        let (_listener, config, endpoint, call) = called();
        let limit = CALL_LIMIT + Duration::from_millis(200);
        let started = Instant::now();
        let error = dial(&config, &endpoint, &call, started + limit).unwrap_err();
        assert!(matches!(&error, InitError::Unreachable { source, .. } if is_silence(source)), "{error}");
        assert!((limit..2 * limit).contains(&started.elapsed()), "{:?}", started.elapsed());
    }

    #[test]
    fn a_rank_that_is_gone_is_not_waited_for() {
        let (listener, config, endpoint, call) = called();
        drop(listener);
        let started = Instant::now();
        let error = dial(&config, &endpoint, &call, started + CALL_LIMIT).unwrap_err();
        assert!(matches!(&error, InitError::Unreachable { rank: 0, .. }), "{error}");
        assert!(started.elapsed() < CALL_LIMIT, "{:?}", started.elapsed());
    }

    /// A caller who says something else than the confirmation, or nothing.
    struct Wavers(TcpStream, Option<u8>);

    impl Read for Wavers {
        fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
            self.0.read(into)
        }
    }

    impl Write for Wavers {
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
    fn only_a_caller_who_confirms_is_a_guest() {
        let (listener, config, endpoint, call) = called();
        let (sender, guests) = mpsc::channel();
        let _door = Door::tcp(listener, SECRET.to_vec(), sender).unwrap();
        for (said, is_sent) in [(None, false), (Some(0), true)] {
            let stream = TcpStream::connect((endpoint.addresses[0], endpoint.port)).unwrap();
            let greeted = auth::greet(&mut Wavers(stream, said), SECRET, &hello(&call).unwrap());
            assert_eq!(greeted.is_ok(), is_sent);
        }
        let last = dial(&config, &endpoint, &call, Instant::now() + CALL_LIMIT).unwrap();
        let (guest, _) = guests.recv_timeout(CALL_LIMIT).unwrap();
        assert_eq!(guest.peer_addr().unwrap(), last.local_addr().unwrap());
        assert!(guests.recv_timeout(Duration::from_millis(50)).is_err());
    }
}
