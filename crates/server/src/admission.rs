//! Limits the number of bodies that are received and turned into prompts in parallel. Both need
//! many times the memory of the body, and processor time that other requests need.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

use axum::body::{Body, BodyDataStream};
use futures_util::StreamExt;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::account::own::{Moment, Span};
use crate::error::ApiError;

/// A larger body counts as large: it may take more than a tenth of a second and 50 MB to prepare.
const SMALL_BYTES: usize = 256 << 10;
/// A body up to this size is prepared on the thread that received it: moving it to another thread
/// and back takes longer, on busy machines milliseconds. Other connections use the second thread.
const TINY_BYTES: usize = 16 << 10;
/// Maximum bytes of all large bodies that are being received or wait. More are refused.
pub(crate) const LARGE_BODIES_BYTES: usize = 64 << 20;
/// Large bodies that are prepared in parallel: tokenizing 8 MB of text needs 1.5 GB.
const LARGE_AT_ONCE: usize = 1;
/// Bytes of a refused body that are read and dropped, and the time for this. If the connection
/// closed while the client still sends, the client would see a broken connection instead of the
/// refusal.
const DROPPED_BYTES: usize = 64 << 20;
const DROPPED_FOR: Duration = Duration::from_secs(2);
/// Requests that may wait for their preparation. More are refused.
const MAX_QUEUED: usize = 256;

/// Limits for receiving and preparing bodies.
#[derive(Debug)]
pub(crate) struct Admission {
    large_bytes: Arc<Semaphore>,
    large: Arc<Semaphore>,
    /// Small bodies have their own places, so that large ones do not delay them.
    small: Arc<Semaphore>,
    queue: Semaphore,
}

/// The times of the parts of a preparation.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Preparation {
    /// For its turn, while other bodies are prepared.
    pub wait: Duration,
    pub work: Span,
    /// To another thread and back.
    pub switch: Duration,
}

/// A request's body.
#[derive(Debug, Default)]
pub(crate) struct ReceivedBody {
    pub bytes: Vec<u8>,
    /// Its share of `LARGE_BODIES_BYTES`.
    share: Option<OwnedSemaphorePermit>,
}

impl Admission {
    pub fn new() -> Self {
        // Half of the processors at most: the engine needs the others.
        let processors = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        let places = |count| Arc::new(Semaphore::new(count));
        Self {
            large_bytes: places(LARGE_BODIES_BYTES),
            large: places(LARGE_AT_ONCE),
            small: places((processors / 2).max(1)),
            queue: Semaphore::new(MAX_QUEUED),
        }
    }

    /// Reads a body to its end. It has at most `limit` bytes.
    pub async fn receive(&self, body: Body, limit: usize) -> Result<ReceivedBody, ApiError> {
        let mut parts = body.into_data_stream();
        let received = self.read(&mut parts, limit).await;
        if received.is_err() {
            drop_rest(parts).await;
        }
        received
    }

    async fn read(&self, parts: &mut BodyDataStream, limit: usize) -> Result<ReceivedBody, ApiError> {
        let mut received = ReceivedBody::default();
        while let Some(part) = parts.next().await {
            let part = part.map_err(|error| ApiError::invalid(format!("cannot read the body: {error}")))?;
            let bytes = received.bytes.len() + part.len();
            if bytes > limit {
                return Err(ApiError::too_large(limit));
            }
            if bytes > SMALL_BYTES {
                self.extend_share(&mut received, bytes)?;
            }
            received.bytes.extend_from_slice(&part);
        }
        Ok(received)
    }

    /// Sets the body's share to `bytes`. This never waits, because slowly received bodies must not
    /// delay others.
    fn extend_share(&self, received: &mut ReceivedBody, bytes: usize) -> Result<(), ApiError> {
        let missing = bytes - received.share.as_ref().map_or(0, OwnedSemaphorePermit::num_permits);
        let more =
            self.large_bytes.clone().try_acquire_many_owned(u32::try_from(missing).unwrap_or(u32::MAX));
        let more = more.map_err(|_| {
            ApiError::busy(format!(
                "the server holds {LARGE_BODIES_BYTES} bytes of large requests: try again later"
            ))
        })?;
        match &mut received.share {
            Some(share) => share.merge(more),
            share => *share = Some(more),
        }
        Ok(())
    }

    /// Runs work that needs processor time on a thread where no connection waits for it, when it is
    /// the body's turn. For a tiny body it runs here at once. Also returns the times of its parts.
    pub async fn prepare<T: Send + 'static>(
        &self,
        body: ReceivedBody,
        work: impl FnOnce(&[u8]) -> Result<T, ApiError> + Send + 'static,
    ) -> Result<(T, Preparation), ApiError> {
        let began = Moment::now();
        let failed = |error: &dyn std::fmt::Display| {
            ApiError::engine_failed(format!("preparing the prompt failed: {error}"))
        };
        if body.bytes.len() <= TINY_BYTES {
            let result = catch_unwind(AssertUnwindSafe(|| work(&body.bytes)))
                .map_err(|_| failed(&"it panicked; the log says where"))??;
            return Ok((result, Preparation { work: began.elapsed(), ..Preparation::default() }));
        }
        let is_large = body.bytes.len() > SMALL_BYTES;
        let places = if is_large { &self.large } else { &self.small };
        let Ok(queued) = self.queue.try_acquire() else {
            let message = format!("{MAX_QUEUED} requests wait to be read already: try again later");
            return Err(ApiError::busy(message));
        };
        let place = places.clone().acquire_owned().await.map_err(|error| failed(&error))?;
        drop(queued);
        let wait = began.elapsed().time;
        let prepare = move || {
            let begun = Moment::now();
            let result = work(&body.bytes);
            let worked = begun.elapsed();
            drop(body);
            if is_large {
                thunder_compute::memory::give_back();
            }
            // Even if the client has disconnected, the place becomes free only now.
            drop(place);
            result.map(|result| (result, worked))
        };
        let (result, worked) =
            tokio::task::spawn_blocking(prepare).await.map_err(|error| failed(&error))??;
        let switch = began.elapsed().time.saturating_sub(wait + worked.time);
        Ok((result, Preparation { wait, work: worked, switch }))
    }
}

/// Runs work of up to a second that is rare in tiny bodies, such as a grammar. On a thread of the
/// runtime, the thread's other connections first move to another thread.
pub(crate) fn run_long<T>(work: impl FnOnce() -> T) -> T {
    let several = tokio::runtime::RuntimeFlavor::MultiThread;
    match tokio::runtime::Handle::try_current() {
        Ok(handle) if handle.runtime_flavor() == several => tokio::task::block_in_place(work),
        _ => work(),
    }
}

/// Reads the rest of a refused body from the client.
pub(crate) async fn drop_rest(mut parts: BodyDataStream) {
    let dropping = async {
        let mut left = DROPPED_BYTES;
        while let Some(Ok(part)) = parts.next().await {
            match left.checked_sub(part.len()) {
                Some(less) => left = less,
                None => return,
            }
        }
    };
    // The refusal is sent in any case.
    let _ = tokio::time::timeout(DROPPED_FOR, dropping).await;
}
