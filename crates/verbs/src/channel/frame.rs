//! The header of a frame.

/// Size of the header. 32 bytes keep the payload aligned for vector loads.
pub(super) const HEADER_BYTES: usize = 32;

/// The purpose of a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum FrameKind {
    /// Carries bytes of the stream.
    Data,
    /// Carries credits only.
    Credit,
    /// Asks the peer to send a frame.
    Probe,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Header {
    /// The sender's session, which identifies the connection.
    pub(super) session: u32,
    /// The frame's number in its lane. A gap shows a loss.
    pub(super) lane_seq: u32,
    /// The frame's number in the stream, over all lanes. Used in data frames only.
    pub(super) stream_seq: u32,
    /// Total of frames that the sender has received on this lane and freed.
    pub(super) freed: u32,
    /// Payload bytes.
    pub(super) len: u32,
    pub(super) kind: FrameKind,
}

impl Header {
    pub(super) fn write(&self, to: &mut [u8]) {
        let kind = match self.kind {
            FrameKind::Data => 0,
            FrameKind::Credit => 1,
            FrameKind::Probe => 2,
        };
        let words = [self.session, self.lane_seq, self.stream_seq, self.freed, self.len, kind, 0, 0];
        for (bytes, word) in to[..HEADER_BYTES].chunks_exact_mut(4).zip(words) {
            bytes.copy_from_slice(&word.to_le_bytes());
        }
    }

    /// Reads the header of a frame. The error says what is wrong with it.
    pub(super) fn read(frame: &[u8]) -> Result<Self, String> {
        let Some(head) = frame.get(..HEADER_BYTES) else {
            return Err(format!("{} bytes are less than a header", frame.len()));
        };
        let word = |at: usize| u32::from_le_bytes([head[at], head[at + 1], head[at + 2], head[at + 3]]);
        let kind = match word(20) {
            0 => FrameKind::Data,
            1 => FrameKind::Credit,
            2 => FrameKind::Probe,
            other => return Err(format!("unknown kind {other}")),
        };
        let len = word(16);
        if len as usize > frame.len() - HEADER_BYTES {
            return Err(format!("a payload of {len} bytes in a frame of {}", frame.len()));
        }
        Ok(Self { session: word(0), lane_seq: word(4), stream_seq: word(8), freed: word(12), len, kind })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_header_is_read_as_written_and_a_bad_one_is_refused() {
        let header = Header {
            session: 7,
            lane_seq: u32::MAX,
            stream_seq: 3,
            freed: 4,
            len: 8,
            kind: FrameKind::Probe,
        };
        let mut frame = [0xee; 40];
        header.write(&mut frame);
        assert_eq!(Header::read(&frame), Ok(header));

        assert!(Header::read(&frame[..31]).unwrap_err().contains("31 bytes"));
        assert!(Header::read(&frame[..39]).unwrap_err().contains("payload of 8"));
        frame[20] = 9;
        assert!(Header::read(&frame).unwrap_err().contains("kind 9"));
    }
}
