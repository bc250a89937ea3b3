//! What stands before every message, so that ranks that do different things notice.

use crate::DType;

/// One cache line, so that the payload behind it starts on one.
pub(crate) const HEADER_BYTES: usize = 64;
/// Where the payload of a short message begins, and what fits there.
const INLINE_AT: usize = 24;
pub(crate) const INLINE_BYTES: usize = HEADER_BYTES - INLINE_AT;
/// Steps from here on send their payload while it is being made, so it cannot be in the header.
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

/// The description of a message; both sides must have the same.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Header {
    pub kind: OperationKind,
    /// `DType` as a number, 0 for none.
    pub dtype: u8,
    /// The reduction, 0 for none.
    pub op: u8,
    /// Algorithm and step within the operation.
    pub phase: u8,
    /// The group's count of collectives; 0 for send/recv.
    pub sequence: u32,
    /// Payload bytes.
    pub length: u64,
}

impl Header {
    pub fn encode(&self) -> [u8; HEADER_BYTES] {
        Self::bytes_of_words(self.words())
    }

    /// All that describes the message, in two words.
    pub fn words(&self) -> [u64; 2] {
        let kinds = u32::from_le_bytes([self.kind as u8, self.dtype, self.op, self.phase]);
        [u64::from(kinds) | u64::from(self.sequence) << 32, self.length]
    }

    /// `words` as they would stand in a message.
    pub fn bytes_of_words(words: [u64; 2]) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        bytes[0..4].copy_from_slice(&MAGIC.to_le_bytes());
        bytes[4..12].copy_from_slice(&words[0].to_le_bytes());
        bytes[16..24].copy_from_slice(&words[1].to_le_bytes());
        bytes
    }

    /// Whether the payload travels in the header: one cache line less, which is most of a short message's latency.
    pub fn is_inline(&self) -> bool {
        self.length <= INLINE_BYTES as u64 && self.phase < STREAMED_PHASES
    }

    /// The place of a short message's payload.
    pub fn inline(bytes: &[u8; HEADER_BYTES]) -> &[u8] {
        &bytes[INLINE_AT..]
    }

    /// The same, to be filled.
    pub fn inline_mut(bytes: &mut [u8; HEADER_BYTES]) -> &mut [u8] {
        &mut bytes[INLINE_AT..]
    }

    /// Whether received bytes are this header, whatever its payload.
    pub fn matches(&self, bytes: &[u8; HEADER_BYTES]) -> bool {
        bytes[..INLINE_AT] == self.encode()[..INLINE_AT]
    }

    /// Whether received bytes are the header of an operation of this kind.
    pub fn is_of(bytes: &[u8; HEADER_BYTES], kind: OperationKind) -> bool {
        bytes[4] == kind as u8
    }

    /// A received header in words; it may be anything.
    pub fn describe(bytes: &[u8; HEADER_BYTES]) -> String {
        let [m0, m1, m2, m3, kind, dtype, op, phase, s0, s1, s2, s3, _, _, _, _, length @ ..] = bytes;
        if u32::from_le_bytes([*m0, *m1, *m2, *m3]) != MAGIC {
            return "something that is no message of this version".to_owned();
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
