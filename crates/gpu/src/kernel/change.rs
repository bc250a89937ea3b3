//! WGSL of changes of rows that few families need.

use super::Access;

/// One compiled form.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Change {
    /// Subtracts the mean of some columns.
    Center,
    /// Adds to columns.
    Shift,
    /// The tokens of selected compressed tokens.
    Members,
    /// Rotates pairs of columns.
    Rotate,
    /// Weights of residual streams.
    WeighStreams,
    /// The weighted sum of residual streams.
    Collapse,
    /// Mixes residual streams and adds to them.
    Expand,
    /// Multiplies the weights of chosen experts.
    WeighChoices,
    /// Scores of the sums that are mixed.
    MixScores,
    /// Adds one of these sums.
    MixAdd,
    /// Subtracts the mean, divides by the deviation, multiplies and adds.
    LayerNorm,
    /// Multiplies heads with their gates.
    GateHeads,
    /// Rounds groups of columns to few bits.
    Round,
    /// Sets rows to zero.
    Clear,
    /// Adds values to residual streams, by the products of streams and keys.
    AddValues,
}

/// Threads of a workgroup.
pub(crate) const CHANGED: usize = 256;

/// Maximum residual streams, and rows of their weights that a workgroup computes.
pub(crate) const MAX_STREAMS: usize = 8;
pub(crate) const WEIGHED: usize = 64;

impl Change {
    pub const ALL: [Self; 15] = [
        Self::Center,
        Self::Shift,
        Self::Members,
        Self::Rotate,
        Self::WeighStreams,
        Self::Collapse,
        Self::Expand,
        Self::WeighChoices,
        Self::MixScores,
        Self::MixAdd,
        Self::LayerNorm,
        Self::GateHeads,
        Self::Round,
        Self::Clear,
        Self::AddValues,
    ];

    pub fn bindings(self) -> Vec<Access> {
        let reads = match self {
            Self::Center | Self::Round | Self::Clear => 0,
            Self::Shift
            | Self::Rotate
            | Self::WeighStreams
            | Self::WeighChoices
            | Self::LayerNorm
            | Self::GateHeads => 1,
            Self::Members
            | Self::Collapse
            | Self::Expand
            | Self::MixScores
            | Self::MixAdd
            | Self::AddValues => 2,
        };
        let mut all = vec![Access::Read; reads];
        all.push(Access::Write);
        all
    }

    /// False if its table changes from step to step.
    pub fn can_repeat(self) -> bool {
        !matches!(self, Self::Members | Self::Rotate)
    }

    pub fn source(self) -> String {
        match self {
            Self::Center => include_str!("change/center.wgsl"),
            Self::Shift => include_str!("change/shift.wgsl"),
            Self::Members => include_str!("change/members.wgsl"),
            Self::Rotate => include_str!("change/rotate.wgsl"),
            Self::WeighStreams => include_str!("change/weigh_streams.wgsl"),
            Self::Collapse => include_str!("change/collapse.wgsl"),
            Self::Expand => include_str!("change/expand.wgsl"),
            Self::WeighChoices => include_str!("change/weigh_choices.wgsl"),
            Self::MixScores => include_str!("change/mix_scores.wgsl"),
            Self::MixAdd => include_str!("change/mix_add.wgsl"),
            Self::LayerNorm => include_str!("change/layer_norm.wgsl"),
            Self::GateHeads => include_str!("change/gate_heads.wgsl"),
            Self::Round => include_str!("change/round.wgsl"),
            Self::Clear => include_str!("change/clear.wgsl"),
            Self::AddValues => include_str!("change/add_values.wgsl"),
        }
        .replace("$MIXED", &(MAX_STREAMS * MAX_STREAMS).to_string())
        .replace("$STREAMS", &MAX_STREAMS.to_string())
    }
}
