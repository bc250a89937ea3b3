//! Accepts connections in the background and runs the handshake on each.

use std::collections::{BTreeSet, VecDeque};
use std::io;
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::thread::JoinHandle;
use std::time::Duration;

use super::handshake;
use super::stream::{DeadlineStream, HandshakeStream};
use crate::{FormingEvent, Observer};

/// A connection that has not authenticated and confirmed within this time is dropped. Its peer gave
/// up long before. A confirmation that takes longer is lost, and the group does not form.
const HANDSHAKE_LIMIT: Duration = Duration::from_secs(10);
/// Concurrent handshakes. Beyond this the oldest is dropped; a peer that knows the secret finishes
/// in milliseconds.
const MAX_HANDSHAKES: usize = 64;

/// Refusals that are reported. Strangers could cause any number of them.
const MAX_REFUSALS: usize = 20;

/// Reports each refused connection and the reason, once.
struct Refusals {
    observer: Option<Observer>,
    reported: Mutex<BTreeSet<(String, String)>>,
}

impl Refusals {
    fn report(&self, address: String, error: &io::Error) {
        let why = match error.kind() {
            io::ErrorKind::TimedOut => "it did not introduce itself as a rank".to_owned(),
            io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe => {
                "it hung up: it is no rank, or one of another version".to_owned()
            }
            _ => error.to_string(),
        };
        let Some(observer) = &self.observer else { return };
        let mut reported = self.reported.lock().unwrap_or_else(PoisonError::into_inner);
        if reported.len() < MAX_REFUSALS && reported.insert((address.clone(), why.clone())) {
            observer.tell(&FormingEvent::Refused { address, why });
        }
    }
}

/// The handshakes under way, oldest first, each with its number.
struct Handshakes<S>(Mutex<(u64, VecDeque<(u64, S)>)>);

impl<S> Default for Handshakes<S> {
    fn default() -> Self {
        Self(Mutex::new((0, VecDeque::new())))
    }
}

impl<S: HandshakeStream> Handshakes<S> {
    /// Records a new handshake and returns its number.
    fn begin(&self, stream: &S) -> io::Result<u64> {
        let duplicate = stream.duplicate()?;
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let (number, under_way) = &mut *state;
        if under_way.len() >= MAX_HANDSHAKES
            && let Some((_, oldest)) = under_way.pop_front()
        {
            // Fails if the peer has already closed the connection.
            let _ = oldest.shut_down();
        }
        *number += 1;
        under_way.push_back((*number, duplicate));
        Ok(*number)
    }

    /// Ends a handshake. False if it was dropped in the meantime.
    fn end(&self, number: u64) -> bool {
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let before = state.1.len();
        state.1.retain(|(other, _)| *other != number);
        state.1.len() < before
    }
}

/// Accepts connections on a thread, and runs each handshake on a thread of its own so that no peer
/// can delay another. Dropping the listener ends it and frees its address.
pub(crate) struct Listener {
    open: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Listener {
    /// `accept` polls for a connection without blocking. Connections whose peer knows the secret
    /// are sent to `accepted`, each with its hello.
    pub fn start<S: HandshakeStream>(
        accept: impl Fn() -> io::Result<Option<S>> + Send + 'static,
        secret: Vec<u8>,
        accepted: mpsc::Sender<(S, Vec<u8>)>,
        observer: Option<Observer>,
    ) -> io::Result<Self> {
        let refusals = Arc::new(Refusals { observer, reported: Mutex::default() });
        let open = Arc::new(AtomicBool::new(true));
        let still_open = open.clone();
        let secret: Arc<[u8]> = secret.into();
        let thread = std::thread::Builder::new().name("thunder-accept".to_owned()).spawn(move || {
            let handshakes = Arc::new(Handshakes::default());
            while still_open.load(Ordering::Relaxed) {
                let Ok(Some(mut stream)) = accept() else {
                    std::thread::sleep(Duration::from_millis(1));
                    continue;
                };
                let Ok(number) = handshakes.begin(&stream) else { continue };
                let (handshakes, accepted, secret) = (handshakes.clone(), accepted.clone(), secret.clone());
                let refusals = refusals.clone();
                let handshake = move || {
                    let peer = stream.peer();
                    let mut limited = DeadlineStream::new(&mut stream, HANDSHAKE_LIMIT);
                    let hello = handshake::accept(&mut limited, &secret);
                    // From here on the handshake cannot be dropped: a peer that knows the secret
                    // may rely on the connection.
                    if !handshakes.end(number) {
                        return;
                    }
                    match hello {
                        Ok(hello)
                            if handshake::await_confirmation(&mut limited).is_ok()
                                && stream.set_timeouts(Some(HANDSHAKE_LIMIT)).is_ok() =>
                        {
                            // Fails if nothing more is expected; the stream then closes.
                            let _ = accepted.send((stream, hello));
                        }
                        Ok(_) => {}
                        Err(error) => refusals.report(peer, &error),
                    }
                };
                // Without a thread the peer gets no answer and tries again.
                let _ = std::thread::Builder::new().name("thunder-handshake".to_owned()).spawn(handshake);
            }
        })?;
        Ok(Self { open, thread: Some(thread) })
    }

    /// [`Listener::start`] on a TCP listener.
    pub fn tcp(
        listener: TcpListener,
        secret: Vec<u8>,
        accepted: mpsc::Sender<(TcpStream, Vec<u8>)>,
        observer: Option<Observer>,
    ) -> io::Result<Self> {
        listener.set_nonblocking(true)?;
        let accept = move || match listener.accept() {
            Ok((stream, _)) => {
                stream.set_nonblocking(false)?;
                stream.set_nodelay(true)?;
                Ok(Some(stream))
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(None),
            Err(error) => Err(error),
        };
        Self::start(accept, secret, accepted, observer)
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        self.open.store(false, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            // A thread that panicked has closed its listener too.
            let _ = thread.join();
        }
    }
}
