//! The header of a frame.

/// Bytes of the header, so that the payload keeps the alignment of vector loads.
pub(super) const HEADER_BYTES: usize = 32;

/// What a frame is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// It carries bytes of the stream.
    Data,
    /// It carries nothing but credits.
    Credit,
    /// It carries nothing, and asks for a frame back.
    Probe,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Header {
    /// The connection that it belongs to.
    pub(super) session: u32,
    /// Its number on its lane, by which a loss shows.
    pub(super) lane_seq: u32,
    /// Its number in the stream over all lanes. Of meaning for data alone.
    pub(super) stream_seq: u32,
    /// Frames of the opposite direction, same lane, that its sender has freed, in all.
    pub(super) freed: u32,
    /// Bytes that follow.
    pub(super) len: u32,
    pub(super) kind: Kind,
}

impl Header {
    pub(super) fn write(&self, to: &mut [u8]) {
        let kind = match self.kind {
            Kind::Data => 0,
            Kind::Credit => 1,
            Kind::Probe => 2,
        };
        let words = [self.session, self.lane_seq, self.stream_seq, self.freed, self.len, kind, 0, 0];
        for (bytes, word) in to[..HEADER_BYTES].chunks_exact_mut(4).zip(words) {
            bytes.copy_from_slice(&word.to_le_bytes());
        }
    }

    /// The header at the start of a frame, or what is wrong with it.
    pub(super) fn read(frame: &[u8]) -> Result<Self, String> {
        let Some(head) = frame.get(..HEADER_BYTES) else {
            return Err(format!("{} bytes, less than a header", frame.len()));
        };
        let word = |at: usize| u32::from_le_bytes([head[at], head[at + 1], head[at + 2], head[at + 3]]);
        let kind = match word(20) {
            0 => Kind::Data,
            1 => Kind::Credit,
            2 => Kind::Probe,
            other => return Err(format!("kind {other}")),
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
    fn a_header_survives_the_wire_and_a_bad_one_is_refused() {
        let header =
            Header { session: 7, lane_seq: u32::MAX, stream_seq: 3, freed: 4, len: 8, kind: Kind::Probe };
        let mut frame = [0xee; 40];
        header.write(&mut frame);
        assert_eq!(Header::read(&frame), Ok(header));

        assert!(Header::read(&frame[..31]).unwrap_err().contains("31 bytes"));
        assert!(Header::read(&frame[..39]).unwrap_err().contains("payload of 8"));
        frame[20] = 9;
        assert!(Header::read(&frame).unwrap_err().contains("kind 9"));
    }
}
