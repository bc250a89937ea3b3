//! One client's connection for HTTP. A client that reads nothing becomes an error after some time.
//! A client that has closed only its sending side still gets its answer.
//!
//! A client that has closed its connection looks like one that has closed only its sending side,
//! until something is sent to it; then the system of the former answers with an error. So while an
//! answer has not begun, an interim response tests the connection. Clients ignore interim responses
//! (RFC 9110, 15.2).

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

/// The interim response that tests a connection.
const INTERIM: &[u8] = b"HTTP/1.1 100 Continue\r\n\r\n";
/// Time between the first test and the second, which fails if the client is gone. Each later pause
/// is twice as long, up to the maximum.
const FIRST_PAUSE: Duration = Duration::from_millis(25);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);
/// Time in which a completely received body is read. A client that closed its sending side inside
/// its body sends nothing more.
const BODY_LIMIT: Duration = Duration::from_secs(1);

/// State shared by the connection's bytes and its answers. Each incomplete answer holds a clone.
#[derive(Debug, Default)]
struct Answering {
    /// The last request allows interim responses, and nothing of its response was sent.
    takes_interim: AtomicBool,
    /// The last request's body was not read to its end.
    is_receiving: AtomicBool,
}

/// A connection's bytes: plain, encrypted, or from a local socket.
pub(crate) trait Socket: AsyncRead + AsyncWrite + Send + Unpin {}
impl<T: AsyncRead + AsyncWrite + Send + Unpin> Socket for T {}

/// The two halves of one connection: its bytes, and the service that answers its requests, each by
/// the latest of `routers`.
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
    /// Set after the client has closed its sending side.
    ended: Option<Ended>,
    /// HTTP has written everything.
    is_flushed: bool,
}

/// State after a client has closed its sending side.
struct Ended {
    /// Deadline of its answer, if the connection cannot be tested.
    limit: Pin<Box<Sleep>>,
    /// Deadline for reading a body that has arrived.
    body: Pin<Box<Sleep>>,
    /// The time of the next test, and the pause after it.
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
    /// True if an answer is incomplete. `Answers` itself holds one clone.
    fn is_answering(&self) -> bool {
        Arc::strong_count(&self.answering) > 2
    }

    /// Tests the connection of a client that has closed its sending side, when the time has come.
    /// Ready if the client is gone.
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
                    // Encryption holds bytes back until then.
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
        // HTTP treats the end of the stream as the end of the client, so it is told late.
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

/// The body of a request, which counts as read when this ends or is dropped.
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
