//! The forms of a product, and how its work is divided.

use crate::buffer::BLOCK_COLUMNS;
use crate::format::Format;

/// Numbers of input rows that forms exist for, in ascending order.
pub(crate) const BATCHES: [usize; 3] = [1, 4, 8];

/// Lanes that share an output.
pub(super) const LANES: usize = 32;

/// Format of the input rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Input {
    /// f32.
    Floats,
    /// Bytes with a scale for each block, as the kernel `quantize` stores them.
    Bytes,
    /// 16 bits with a scale for each block, as two planes of bytes. Nearly as exact as f32, and
    /// multiplied by the same instruction as bytes.
    Pairs,
}

impl Input {
    /// The forms for this many rows, the widest first, because it reads weights the fewest times.
    pub fn batches(self, rows: usize) -> impl Iterator<Item = usize> {
        let widest = if self.has_levels() { BATCHES.len() } else { 2 };
        let fitting = (0..widest).take_while(move |&at| at == 0 || rows > BATCHES[at - 1]).count();
        BATCHES[..fitting].iter().rev().copied()
    }

    /// Vectors of 16 bytes in a block.
    pub fn planes(self) -> usize {
        match self {
            Self::Floats => 8,
            Self::Bytes => 2,
            Self::Pairs => 4,
        }
    }

    pub fn has_levels(self) -> bool {
        self != Self::Floats
    }
}

/// What a product stores in addition to its outputs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Leaves {
    Nothing,
    /// The outputs as [`Input::Bytes`].
    Bytes,
    /// The outputs as [`Input::Pairs`].
    Pairs,
    /// The outputs times the weights of a norm, as [`Input::Bytes`], and their squares.
    Normed,
}

/// Where the rows of weights are, and what is done with the sums.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Role {
    /// One matrix.
    Plain,
    /// One matrix of gates and ups; the output is their activation.
    Gated,
    /// The gates and ups of the experts that a row chose.
    ExpertGated,
    /// The ups of the experts that a row chose, which have no gates; the output is `max(up, 0)²`.
    ExpertUp,
    /// The down projections: the weighted sum over a row's experts.
    ExpertDown,
}

impl Role {
    /// The role of experts' first matrix.
    pub fn of_experts(gated: bool) -> Self {
        if gated { Self::ExpertGated } else { Self::ExpertUp }
    }

    /// True if weights come in pairs of a gate's row and an up's row.
    pub fn is_gated(self) -> bool {
        matches!(self, Self::Gated | Self::ExpertGated)
    }

    /// True for the first matrix of each expert that a row chose.
    pub fn is_of_each_expert(self) -> bool {
        matches!(self, Self::ExpertGated | Self::ExpertUp)
    }
}

/// How lanes add their sums.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Sum {
    /// Through workgroup memory.
    Shared,
    /// By the hardware's sum over subgroups of 32.
    Subgroup,
}

/// How the work of a product is divided. Results have the same bits for all shapes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Shape {
    /// Outputs that 32 lanes compute.
    pub per: usize,
    /// Blocks of an output that a lane loads before it multiplies.
    pub unroll: usize,
    /// Sets of 32 lanes in a workgroup.
    pub warps: usize,
}

impl Shape {
    /// Measured on an H200, with several rows on an H100: docs/lab/2026-11-24-gpu-decode.md and
    /// 2026-11-26-gpu.md.
    pub(super) fn of(format: Format, input: Input, role: Role, sum: Sum, batch: usize) -> Self {
        let bits = format.words().iter().sum::<usize>();
        // Drivers that compute on the CPU take seconds to compile unrolled loops.
        if sum == Sum::Shared {
            return Self { per: 2, unroll: 1, warps: 4 };
        }
        let (per, unroll, warps) = match (role, input, batch) {
            (Role::Plain | Role::Gated, Input::Floats, 1) => (4, 2, 4),
            (Role::Plain | Role::Gated, Input::Floats, _) => (4, 1, 8),
            // Measured on an H100: docs/lab/2026-11-26-gpu-fused.md.
            (Role::Plain, Input::Bytes, 1) if bits <= 4 => (1, 2, 8),
            (Role::Plain, Input::Bytes, 1) => (1, 4, 8),
            (Role::Plain, Input::Pairs, 1) if bits <= 4 => (2, 4, 4),
            (Role::Plain, Input::Pairs, 1) => (1, 7, 8),
            (Role::Plain, _, 4) => (4, 2, 4),
            (Role::Plain, ..) => (8, 1, 4),
            (Role::Gated, _, 1) => (1, if bits > 4 { 4 } else { 2 }, 8),
            (Role::Gated, _, 4) => (2, 2, 4),
            (Role::Gated, ..) => (4, 1, 2),
            (Role::ExpertGated | Role::ExpertUp, Input::Floats, _) => (2, 2, 4),
            (Role::ExpertGated | Role::ExpertUp, _, _) => (1, if bits > 4 { 4 } else { 2 }, 8),
            (Role::ExpertDown, _, _) => (1, 3, 8),
        };
        // Formats of more than 8 bits take more registers.
        Self { per, unroll: if bits > 8 { 1 } else { unroll }, warps }
    }

    /// For products that store levels: the outputs of a workgroup are one block.
    pub(super) fn of_block(format: Format, input: Input, role: Role, sum: Sum) -> Self {
        match sum {
            Sum::Shared => Self { per: 2, unroll: 1, warps: BLOCK_COLUMNS / 2 },
            // Two workgroups fit on a multiprocessor, so that one computes while the other stores
            // its results.
            Sum::Subgroup if role.is_gated() => {
                // Measured on an H100: docs/lab/2026-11-25-gpu-attention.md.
                let few = role == Role::Gated && format.words().iter().sum::<usize>() <= 4;
                Self { per: 2, unroll: if few { 2 } else { 1 }, warps: BLOCK_COLUMNS / 2 }
            }
            // The blocks of eight experts of 768 channels, in two turns.
            Sum::Subgroup if role == Role::ExpertDown => {
                let unroll = Self::of(format, input, role, sum, BATCHES[0]).unroll;
                Self { per: 2, unroll, warps: BLOCK_COLUMNS / 2 }
            }
            Sum::Subgroup if input == Input::Pairs => Self { per: 2, unroll: 2, warps: BLOCK_COLUMNS / 2 },
            // Few lanes, each with as many blocks as its registers can hold.
            Sum::Subgroup => {
                let unroll = if format.words().iter().sum::<usize>() > 8 { 1 } else { 4 };
                Self { per: 2, unroll, warps: BLOCK_COLUMNS / 2 }
            }
        }
    }

    pub fn threads(self) -> usize {
        self.warps * LANES
    }

    /// Outputs of a workgroup.
    pub fn outputs(self) -> usize {
        self.warps * self.per
    }
}
