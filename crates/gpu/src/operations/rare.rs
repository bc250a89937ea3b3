//! Operations that few families need. Those that are missing here run on the host.

use thunder_compute::{Extra, RareOperations};

use crate::backend::GpuBackend;

/// Whether GPUs have an operation that some backends lack.
pub fn offers(operation: Extra) -> bool {
    match operation {
        Extra::Scoring => true,
        Extra::LaterTokens
        | Extra::UngatedExperts
        | Extra::ChannelDeltaRule
        | Extra::StateSpace
        | Extra::GatedConv
        | Extra::Selection
        | Extra::Compression
        | Extra::Pooling
        | Extra::RecentTokens
        | Extra::StateDrafts => false,
    }
}

impl RareOperations for GpuBackend {
    fn offers(&self, operation: Extra) -> bool {
        offers(operation)
    }
}
