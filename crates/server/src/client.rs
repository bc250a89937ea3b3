//! One client's connection as HTTP sees it: a client that reads nothing is an error after a time,
//! and one that has only ended its sending side still gets its answer.

use std::convert::Infallible;
use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use axum::Router;
use axum::body::{Body, Bytes};
use axum::response::Response;
use hyper::body::{Body as HttpBody, Frame, Incoming, SizeHint};
use hyper::{Request, service::Service};
use hyper_util::service::TowerToHyperService;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::Sleep;
use tokio_io_timeout::TimeoutWriter;

use crate::access::Peer;
use crate::connections::ConnectionLimits;

/// Answers that are not complete yet: each holds a clone.
type Answering = Arc<()>;

/// A connection's bytes: plain, encrypted, or of this machine.
pub(crate) trait Socket: AsyncRead + AsyncWrite + Send + Unpin {}
impl<T: AsyncRead + AsyncWrite + Send + Unpin> Socket for T {}

/// The two ends of one connection: its bytes, and the service that answers its requests.
pub(crate) fn client(
    stream: Box<dyn Socket>,
    peer: Peer,
    limits: &ConnectionLimits,
    router: Router,
) -> (Client, Answers) {
    let mut stream = TimeoutWriter::new(stream);
    stream.set_timeout(Some(limits.write_timeout));
    let answering = Answering::default();
    let client = Client {
        stream: Box::pin(stream),
        answering: answering.clone(),
        half_closed_limit: limits.half_closed_limit,
        ended: None,
    };
    (client, Answers { router: TowerToHyperService::new(router), peer, answering })
}

/// The bytes of a connection.
pub(crate) struct Client {
    stream: Pin<Box<TimeoutWriter<Box<dyn Socket>>>>,
    answering: Answering,
    half_closed_limit: Duration,
    /// The client has ended its sending side; until then its answer may take.
    ended: Option<Pin<Box<Sleep>>>,
}

impl Client {
    /// True if an answer is not complete. `Answers` holds one clone itself.
    fn is_answering(&self) -> bool {
        Arc::strong_count(&self.answering) > 2
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
        let limit = this.half_closed_limit;
        let ended = this.ended.get_or_insert_with(|| Box::pin(tokio::time::sleep(limit)));
        let is_over = ended.as_mut().poll(context).is_ready();
        if is_over || !this.is_answering() { Poll::Ready(Ok(())) } else { Poll::Pending }
    }
}

impl AsyncWrite for Client {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.stream.as_mut().poll_write(cx, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        parts: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.stream.as_mut().poll_write_vectored(context, parts)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.stream.as_mut().poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.stream.as_mut().poll_shutdown(context)
    }
}

/// Answers a connection's requests.
pub(crate) struct Answers {
    router: TowerToHyperService<Router>,
    peer: Peer,
    answering: Answering,
}

impl Service<Request<Incoming>> for Answers {
    type Response = Response<AnswerBody>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Infallible>> + Send>>;

    fn call(&self, mut request: Request<Incoming>) -> Self::Future {
        request.extensions_mut().insert(self.peer);
        let (answering, response) = (self.answering.clone(), self.router.call(request));
        Box::pin(async move {
            let response = response.await?;
            Ok(response.map(|body| AnswerBody { body, _answering: answering }))
        })
    }
}

/// The body of an answer, which is complete when this is dropped.
pub(crate) struct AnswerBody {
    body: Body,
    _answering: Answering,
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
