//! The header of every message, by which ranks notice that they are in different operations.

use crate::DType;

/// One cache line, so that the payload behind it starts on a cache line.
pub(crate) const HEADER_BYTES: usize = 64;
/// Where the payload of a short message begins in the header, and its maximum length.
const INLINE_AT: usize = 24;
pub(crate) const INLINE_BYTES: usize = HEADER_BYTES - INLINE_AT;
/// Phases from this number on send their payload while it is being computed, so it cannot be in the
/// header.
pub(crate) const STREAMED_PHASES: u8 = 16;
const MAGIC: u32 = 0x7468_6431;

/// The operations, as they are named on the wire and in errors.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[repr(u8)]
pub(crate) enum OperationKind {
    #[default]
    SendReceive = 1,
    Barrier,
    Broadcast,
    AllReduce,
    AllGather,
    ReduceScatter,
    Gather,
    Scatter,
    AllToAll,
}

impl OperationKind {
    pub fn name(self) -> &'static str {
        match self {
            Self::SendReceive => "send/recv",
            Self::Barrier => "barrier",
            Self::Broadcast => "broadcast",
            Self::AllReduce => "all_reduce",
            Self::AllGather => "all_gather",
            Self::ReduceScatter => "reduce_scatter",
            Self::Gather => "gather",
            Self::Scatter => "scatter",
            Self::AllToAll => "all_to_all",
        }
    }

    fn from_wire(value: u8) -> Option<Self> {
        const ALL: [OperationKind; 9] = [
            OperationKind::SendReceive,
            OperationKind::Barrier,
            OperationKind::Broadcast,
            OperationKind::AllReduce,
            OperationKind::AllGather,
            OperationKind::ReduceScatter,
            OperationKind::Gather,
            OperationKind::Scatter,
            OperationKind::AllToAll,
        ];
        ALL.into_iter().find(|kind| *kind as u8 == value)
    }
}

/// The description of a message; sender and receiver must have the same.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Header {
    pub kind: OperationKind,
    /// The `DType` as a number, 0 for none.
    pub dtype: u8,
    /// The reduction, 0 for none.
    pub op: u8,
    /// The algorithm and the step within the operation.
    pub phase: u8,
    /// The group's number of collectives so far; 0 for send/recv.
    pub sequence: u32,
    /// Length of the payload in bytes.
    pub length: u64,
}

impl Header {
    pub fn encode(&self) -> [u8; HEADER_BYTES] {
        Self::bytes_of_words(self.words())
    }

    /// The whole header in two words.
    pub fn words(&self) -> [u64; 2] {
        let kinds = u32::from_le_bytes([self.kind as u8, self.dtype, self.op, self.phase]);
        [u64::from(kinds) | u64::from(self.sequence) << 32, self.length]
    }

    /// The header of a message from its `words`.
    pub fn bytes_of_words(words: [u64; 2]) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        bytes[0..4].copy_from_slice(&MAGIC.to_le_bytes());
        bytes[4..12].copy_from_slice(&words[0].to_le_bytes());
        bytes[16..24].copy_from_slice(&words[1].to_le_bytes());
        bytes
    }

    /// True when the payload travels in the header: one cache line less, which is most of a short
    /// message's latency.
    pub fn is_inline(&self) -> bool {
        self.length <= INLINE_BYTES as u64 && self.phase < STREAMED_PHASES
    }

    /// The payload of a short message.
    pub fn inline(bytes: &[u8; HEADER_BYTES]) -> &[u8] {
        &bytes[INLINE_AT..]
    }

    /// The same, for writing.
    pub fn inline_mut(bytes: &mut [u8; HEADER_BYTES]) -> &mut [u8] {
        &mut bytes[INLINE_AT..]
    }

    /// True when received bytes are this header, whatever the payload.
    pub fn matches(&self, bytes: &[u8; HEADER_BYTES]) -> bool {
        bytes[..INLINE_AT] == self.encode()[..INLINE_AT]
    }

    /// True when received bytes are the header of an operation of this kind.
    pub fn is_of(bytes: &[u8; HEADER_BYTES], kind: OperationKind) -> bool {
        bytes[4] == kind as u8
    }

    /// Describes a received header, which may be any bytes, for an error.
    pub fn describe(bytes: &[u8; HEADER_BYTES]) -> String {
        let [m0, m1, m2, m3, kind, dtype, op, phase, s0, s1, s2, s3, _, _, _, _, length @ ..] = bytes;
        if u32::from_le_bytes([*m0, *m1, *m2, *m3]) != MAGIC {
            return "bytes that are not a message of this version".to_owned();
        }
        let kind = OperationKind::from_wire(*kind).map_or("an unknown operation", OperationKind::name);
        let dtype =
            DType::from_wire(*dtype).map_or(String::new(), |dtype| format!(" of {dtype:?}").to_lowercase());
        let sequence = u32::from_le_bytes([*s0, *s1, *s2, *s3]);
        let mut count = [0; 8];
        count.copy_from_slice(&length[..8]);
        let length = u64::from_le_bytes(count);
        format!("{kind}{dtype}, {length} bytes (operation {sequence}, reduction {op}, step {phase})")
    }
}
