//! How a rank calls another one.

use std::io;
use std::net::{SocketAddr, TcpStream};
use std::time::Instant;

use serde::{Deserialize, Serialize};

use crate::rendezvous::{CALL_LIMIT, Endpoint, RETRY, Stream, Until, connect};
use crate::{Config, InitError, auth};

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

/// Calls a rank, and again as long as a network that loses packets may be why it does not answer.
pub(super) fn dial(
    config: &Config,
    endpoint: &Endpoint,
    call: &Call,
    deadline: Instant,
) -> Result<TcpStream, InitError> {
    let addresses: Vec<SocketAddr> =
        endpoint.addresses.iter().map(|address| SocketAddr::new(*address, endpoint.port)).collect();
    let hello = hello(call)?;
    let mut source = io::Error::new(io::ErrorKind::AddrNotAvailable, "it has no address");
    'calls: loop {
        let mut may_be_lost = false;
        for address in &addresses {
            let limit = CALL_LIMIT.min(deadline.saturating_duration_since(Instant::now()));
            if limit.is_zero() {
                source = io::Error::new(io::ErrorKind::TimedOut, "the time for all ranks to come is over");
                break 'calls;
            }
            // An address may belong to somebody else here; only the right rank passes the handshake.
            let attempt = connect(std::slice::from_ref(address), limit).and_then(|mut stream| {
                auth::greet(&mut Until::new(&mut stream, limit), &config.secret, &hello)?;
                stream.limit(None)?;
                Ok(stream)
            });
            match attempt {
                Ok(stream) => return Ok(stream),
                Err(error) => source = error,
            }
            may_be_lost |= matches!(source.kind(), io::ErrorKind::TimedOut | io::ErrorKind::WouldBlock);
        }
        if !may_be_lost {
            break;
        }
        std::thread::sleep(RETRY);
    }
    let tried = addresses.iter().map(SocketAddr::to_string).collect::<Vec<_>>().join(", ");
    Err(InitError::Unreachable { rank: call.to, tried, source })
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
        assert!(error.to_string().contains("the time for all ranks to come is over"), "{error}");
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

    /// A caller who gives up between the other side's proof and its own confirmation.
    struct GivesUp(TcpStream);

    impl Read for GivesUp {
        fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
            self.0.read(into)
        }
    }

    impl Write for GivesUp {
        fn write(&mut self, from: &[u8]) -> io::Result<usize> {
            if from.len() == 1 { Err(io::ErrorKind::TimedOut.into()) } else { self.0.write(from) }
        }

        fn flush(&mut self) -> io::Result<()> {
            self.0.flush()
        }
    }

    #[test]
    fn a_caller_who_gave_up_is_no_guest() {
        let (listener, config, endpoint, call) = called();
        let (sender, guests) = mpsc::channel();
        let _door = Door::tcp(listener, SECRET.to_vec(), sender).unwrap();
        let mut first = GivesUp(TcpStream::connect((endpoint.addresses[0], endpoint.port)).unwrap());
        auth::greet(&mut first, SECRET, &hello(&call).unwrap()).unwrap_err();
        drop(first);
        let second = dial(&config, &endpoint, &call, Instant::now() + CALL_LIMIT).unwrap();
        let (guest, _) = guests.recv_timeout(CALL_LIMIT).unwrap();
        assert_eq!(guest.peer_addr().unwrap(), second.local_addr().unwrap());
        assert!(guests.recv_timeout(Duration::from_millis(50)).is_err());
    }
}
