//! The trace that a request belongs to: W3C Trace Context, the header `traceparent`.

/// The ids of a trace and of the span that its next span belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TraceContext {
    /// Id of the trace.
    pub trace: u128,
    /// Span of the caller; `None`: the trace begins here.
    pub parent: Option<u64>,
    /// Whether the caller wants the trace kept.
    pub is_sampled: bool,
}

impl TraceContext {
    /// Reads `traceparent`. An invalid header is ignored, as the standard requires.
    pub fn parse(header: &str) -> Option<Self> {
        let mut parts = header.trim().split('-');
        let (version, trace, parent, flags) = (parts.next()?, parts.next()?, parts.next()?, parts.next()?);
        let is_hex = |text: &str, length: usize| {
            text.len() == length && text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
        };
        if !(is_hex(version, 2) && is_hex(trace, 32) && is_hex(parent, 16) && is_hex(flags, 2)) {
            return None;
        }
        // Version 00 has four parts; later ones may have more, ff is none.
        if version == "ff" || (version == "00" && parts.next().is_some()) {
            return None;
        }
        let trace = u128::from_str_radix(trace, 16).ok().filter(|trace| *trace != 0)?;
        let parent = u64::from_str_radix(parent, 16).ok().filter(|parent| *parent != 0)?;
        let flags = u8::from_str_radix(flags, 16).ok()?;
        Some(Self { trace, parent: Some(parent), is_sampled: flags & 1 == 1 })
    }

    /// A new trace.
    pub fn new() -> Self {
        let (high, low) = (new_id(), new_id());
        Self { trace: u128::from(high) << 64 | u128::from(low), parent: None, is_sampled: true }
    }
}

impl Default for TraceContext {
    fn default() -> Self {
        Self::new()
    }
}

/// A random id, never 0. If the system has no random numbers, ids of one process still differ.
pub(crate) fn new_id() -> u64 {
    use std::sync::atomic::{AtomicU64, Ordering};
    static NEXT: AtomicU64 = AtomicU64::new(1);
    let count = NEXT.fetch_add(1, Ordering::Relaxed);
    let mut bytes = [0; 8];
    match getrandom::fill(&mut bytes) {
        Ok(()) => u64::from_le_bytes(bytes).max(1),
        Err(_) => count,
    }
}
