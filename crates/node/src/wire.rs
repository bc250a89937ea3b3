//! Frames: a length of 4 bytes, little-endian, and that many bytes of JSON.

use std::io;
use std::time::Duration;

use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

/// Maximum length of a frame between members; a document at its limits fits.
pub const LONGEST_FRAME_BYTES: usize = 4 << 20;
/// Maximum length of a stranger's frame.
pub const LONGEST_JOIN_FRAME_BYTES: usize = 4 << 10;

/// Why a frame was not received or sent.
#[derive(Debug, thiserror::Error)]
pub enum WireError {
    /// The connection failed or ended.
    #[error("the connection failed: {0}")]
    Io(#[from] io::Error),
    /// The announced length exceeds the limit.
    #[error("a message of {length} bytes, but at most {limit} are allowed here")]
    TooLong {
        /// Announced bytes.
        length: usize,
        /// Allowed bytes.
        limit: usize,
    },
    /// The bytes are not a message of this protocol.
    #[error("not a message of this protocol: {0}")]
    Malformed(#[from] serde_json::Error),
    /// Nothing arrived in time.
    #[error("no answer within {0:?}")]
    TimedOut(Duration),
}

/// Encodes a message as a frame.
///
/// # Errors
/// If the message cannot be written as JSON, or exceeds the maximum length of a frame.
pub fn encode(message: &impl Serialize) -> Result<Vec<u8>, WireError> {
    let mut frame = vec![0; 4];
    serde_json::to_writer(&mut frame, message)?;
    let length = frame.len() - 4;
    if length > LONGEST_FRAME_BYTES {
        return Err(WireError::TooLong { length, limit: LONGEST_FRAME_BYTES });
    }
    frame[..4].copy_from_slice(&(length as u32).to_le_bytes());
    Ok(frame)
}

/// Reads a message of at most `limit` bytes. Memory is allocated as bytes arrive, not as announced.
///
/// # Errors
/// If the connection fails, or the bytes are not such a message.
pub async fn receive<T: DeserializeOwned>(
    reader: &mut (impl AsyncRead + Unpin),
    limit: usize,
) -> Result<T, WireError> {
    let length = reader.read_u32_le().await? as usize;
    if length > limit {
        return Err(WireError::TooLong { length, limit });
    }
    let mut bytes = Vec::with_capacity(length.min(16 << 10));
    reader.take(length as u64).read_to_end(&mut bytes).await?;
    if bytes.len() < length {
        return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into());
    }
    Ok(serde_json::from_slice(&bytes)?)
}

/// Writes a message.
///
/// # Errors
/// When the connection fails.
pub async fn send(writer: &mut (impl AsyncWrite + Unpin), message: &impl Serialize) -> Result<(), WireError> {
    writer.write_all(&encode(message)?).await?;
    Ok(writer.flush().await?)
}

/// Waits at most `limit`.
///
/// # Errors
/// Those of the work, and if the time is over.
pub async fn within<T>(
    limit: Duration,
    work: impl Future<Output = Result<T, WireError>>,
) -> Result<T, WireError> {
    tokio::time::timeout(limit, work).await.unwrap_or(Err(WireError::TimedOut(limit)))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
    use proptest::prelude::*;

    use super::*;

    fn run<T>(work: impl Future<Output = T>) -> T {
        tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(work)
    }

    proptest! {
        #[test]
        fn frames_arrive_in_any_pieces(texts in prop::collection::vec(".{0,60}", 0..6), piece in 1usize..9) {
            let bytes: Vec<u8> = texts.iter().flat_map(|text| encode(text).unwrap()).collect();
            let received = run(async {
                let (mut near, mut far) = tokio::io::duplex(piece);
                let write = async { near.write_all(&bytes).await.unwrap(); drop(near); };
                let read = async {
                    let mut received = Vec::new();
                    while let Ok(text) = receive::<String>(&mut far, 1000).await { received.push(text); }
                    received
                };
                tokio::join!(write, read).1
            });
            prop_assert_eq!(received, texts);
        }

        #[test]
        fn any_bytes_are_a_message_or_an_error(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let _ = run(receive::<crate::membership::Message>(&mut &bytes[..], LONGEST_FRAME_BYTES));
        }
    }

    #[test]
    fn a_length_beyond_the_limit_is_refused_before_its_bytes() {
        let error = run(receive::<String>(&mut &u32::MAX.to_le_bytes()[..], 4096)).unwrap_err();
        assert!(error.to_string().contains("4096"), "{error}");
    }
}
