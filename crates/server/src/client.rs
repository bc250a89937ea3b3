//! One client's connection as HTTP sees it: a client that reads nothing is an error after a time,
//! and one that has only ended its sending side still gets its answer.
//!
//! A client that has closed its connection looks the same as one that has ended its sending side,
//! until something is sent: the system of the former then answers that nobody is there. So while an
//! answer has not begun, an interim response asks, which clients skip (RFC 9110, 15.2).

use std::convert::Infallible;
use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use axum::Router;
use axum::body::{Body, Bytes};
use axum::response::Response;
use hyper::body::{Body as HttpBody, Frame, Incoming, SizeHint};
use hyper::{Request, Version, service::Service};
use hyper_util::service::TowerToHyperService;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::sync::watch;
use tokio::time::{Instant, Sleep};
use tokio_io_timeout::TimeoutWriter;

use crate::access::Peer;
use crate::connections::ConnectionLimits;

/// What asks whether a client is there.
const INTERIM: &[u8] = b"HTTP/1.1 100 Continue\r\n\r\n";
/// The time between the first question and the second, which fails if nobody was there. Later ones
/// take twice as long each, up to the longest.
const FIRST_PAUSE: Duration = Duration::from_millis(25);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);
/// Time in which a body that has come whole is taken. A client that has ended its sending side
/// within its body sends no more.
const BODY_LIMIT: Duration = Duration::from_secs(1);

/// What the connection's bytes and its answers know of each other. Answers that are not complete
/// yet hold a clone each.
#[derive(Debug, Default)]
struct Answering {
    /// The last request takes interim responses, and nothing of its response was sent.
    takes_interim: AtomicBool,
    /// The last request's body was not taken to its end.
    is_receiving: AtomicBool,
}

/// A connection's bytes: plain, encrypted, or of this machine.
pub(crate) trait Socket: AsyncRead + AsyncWrite + Send + Unpin {}
impl<T: AsyncRead + AsyncWrite + Send + Unpin> Socket for T {}

/// The two ends of one connection: its bytes, and what answers its requests, each by the latest of
/// `routers`.
pub(crate) fn client(
    stream: Box<dyn Socket>,
    peer: Peer,
    limits: &ConnectionLimits,
    routers: watch::Receiver<Router>,
) -> (Client, Answers) {
    let mut stream = TimeoutWriter::new(stream);
    stream.set_timeout(Some(limits.write_timeout));
    let answering = Arc::new(Answering::default());
    let client = Client {
        stream: Box::pin(stream),
        answering: answering.clone(),
        half_closed_limit: limits.half_closed_limit,
        ended: None,
        is_flushed: true,
    };
    (client, Answers { routers, peer, answering })
}

/// The bytes of a connection.
pub(crate) struct Client {
    stream: Pin<Box<TimeoutWriter<Box<dyn Socket>>>>,
    answering: Arc<Answering>,
    half_closed_limit: Duration,
    /// Once the client has ended its sending side.
    ended: Option<Ended>,
    /// HTTP has written all that it wanted to.
    is_flushed: bool,
}

/// A client has ended its sending side.
struct Ended {
    /// Until then its answer may take, if it cannot be asked.
    limit: Pin<Box<Sleep>>,
    /// Until then a body that has come is taken.
    body: Pin<Box<Sleep>>,
    /// The next question, and the pause after it.
    next: Pin<Box<Sleep>>,
    pause: Duration,
}

impl Ended {
    fn new(limit: Duration) -> Self {
        let timer = |time| Box::pin(tokio::time::sleep(time));
        let (limit, body) = (timer(limit), timer(BODY_LIMIT));
        Self { limit, body, next: timer(Duration::ZERO), pause: FIRST_PAUSE }
    }
}

impl Client {
    /// True if an answer is not complete. `Answers` holds one clone itself.
    fn is_answering(&self) -> bool {
        Arc::strong_count(&self.answering) > 2
    }

    /// Asks a client that has ended its sending side whether it is there, when it is time to. Ready
    /// if it is not.
    fn poll_gone(&mut self, context: &mut Context<'_>) -> Poll<()> {
        let limit = self.half_closed_limit;
        let ended = self.ended.get_or_insert_with(|| Ended::new(limit));
        if self.answering.is_receiving.load(Ordering::Relaxed) {
            return ended.body.as_mut().poll(context);
        }
        if !(self.is_flushed && self.answering.takes_interim.load(Ordering::Relaxed)) {
            // Streams end as soon as sending fails.
            return ended.limit.as_mut().poll(context);
        }
        while ended.next.as_mut().poll(context).is_ready() {
            ended.next.as_mut().reset(Instant::now() + ended.pause);
            ended.pause = (2 * ended.pause).min(LONGEST_PAUSE);
            match self.stream.as_mut().poll_write(context, INTERIM) {
                // A connection that is full has a client that reads nothing.
                Poll::Pending => {}
                Poll::Ready(Ok(written)) if written == INTERIM.len() => {
                    // Encryption keeps bytes back until then.
                    if let Poll::Ready(Err(_)) = self.stream.as_mut().poll_flush(context) {
                        return Poll::Ready(());
                    }
                }
                Poll::Ready(_) => return Poll::Ready(()),
            }
        }
        Poll::Pending
    }

    /// Notes that HTTP writes.
    fn note_write(&mut self) {
        self.is_flushed = false;
        self.answering.takes_interim.store(false, Ordering::Relaxed);
    }
}

impl AsyncRead for Client {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = &mut *self;
        if this.ended.is_none() {
            let before = buffer.filled().len();
            ready!(this.stream.as_mut().poll_read(context, buffer))?;
            if buffer.filled().len() > before || buffer.remaining() == 0 {
                return Poll::Ready(Ok(()));
            }
        }
        // HTTP takes the end of the stream for the end of the client, so it learns of it late.
        if !this.is_answering() || this.poll_gone(context).is_ready() {
            return Poll::Ready(Ok(()));
        }
        Poll::Pending
    }
}

impl AsyncWrite for Client {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.note_write();
        self.stream.as_mut().poll_write(cx, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        parts: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.note_write();
        self.stream.as_mut().poll_write_vectored(context, parts)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let flushed = self.stream.as_mut().poll_flush(context);
        self.is_flushed |= matches!(flushed, Poll::Ready(Ok(())));
        flushed
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.stream.as_mut().poll_shutdown(context)
    }
}

/// Answers a connection's requests.
pub(crate) struct Answers {
    routers: watch::Receiver<Router>,
    peer: Peer,
    answering: Arc<Answering>,
}

impl Service<Request<Incoming>> for Answers {
    type Response = Response<AnswerBody>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Infallible>> + Send>>;

    fn call(&self, mut request: Request<Incoming>) -> Self::Future {
        request.extensions_mut().insert(self.peer);
        let takes_interim = request.version() >= Version::HTTP_11;
        self.answering.takes_interim.store(takes_interim, Ordering::Relaxed);
        self.answering.is_receiving.store(!request.body().is_end_stream(), Ordering::Relaxed);
        let answering = self.answering.clone();
        let request = request.map(|body| RequestBody { body, answering: answering.clone() });
        let router = TowerToHyperService::new(self.routers.borrow().clone());
        let response = router.call(request);
        Box::pin(async move {
            let response = response.await?;
            Ok(response.map(|body| AnswerBody { body, _answering: answering }))
        })
    }
}

/// The body of a request, which is taken when this ends or is dropped.
struct RequestBody {
    body: Incoming,
    answering: Arc<Answering>,
}

impl HttpBody for RequestBody {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        let frame = ready!(Pin::new(&mut self.body).poll_frame(context));
        if frame.is_none() || self.body.is_end_stream() {
            self.answering.is_receiving.store(false, Ordering::Relaxed);
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

impl Drop for RequestBody {
    fn drop(&mut self) {
        self.answering.is_receiving.store(false, Ordering::Relaxed);
    }
}

/// The body of an answer, which is complete when this is dropped.
pub(crate) struct AnswerBody {
    body: Body,
    _answering: Arc<Answering>,
}

impl HttpBody for AnswerBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        Pin::new(&mut self.body).poll_frame(context)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
