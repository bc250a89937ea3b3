//! The forms of a product, and how its work is divided.

use crate::buffer::BLOCK_COLUMNS;
use crate::format::Format;

/// Numbers of input rows that forms exist for, in ascending order.
pub(crate) const BATCHES: [usize; 3] = [1, 4, 8];

/// Lanes that share an output, except one of an expert's down projection.
pub(super) const LANES: usize = 32;

/// Lanes that share an output of an expert's down projection, if a row has [`FEW_CHOICES`] experts
/// or more: 768 channels are three blocks of each lane. Other numbers were not measured.
pub(super) const EXPERT_LANES: usize = 8;

/// With fewer experts, more lanes share an output of an expert, so that none is idle.
pub(crate) const FEW_CHOICES: usize = 3;

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

impl Leaves {
    /// Outputs as a product reads them.
    pub fn of(input: Input) -> Self {
        match input {
            Input::Pairs => Self::Pairs,
            Input::Bytes => Self::Bytes,
            Input::Floats => Self::Nothing,
        }
    }
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

/// How the work of a product is divided. Results have the same bits for all shapes of a role.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Shape {
    /// Lanes that share an output. A sum over a row's experts divides them among experts.
    pub lanes: usize,
    /// Outputs that these lanes compute.
    pub per: usize,
    /// Blocks of an output that a lane loads before it multiplies.
    pub unroll: usize,
    /// Sets of these lanes in a workgroup.
    pub warps: usize,
    /// A turn's blocks are loaded before those of the turn before are multiplied. Not so in
    /// products with all experts of a row.
    pub ahead: bool,
}

impl Shape {
    pub const fn new(per: usize, unroll: usize, warps: usize) -> Self {
        Self { lanes: LANES, per, unroll, warps, ahead: false }
    }

    pub const fn ahead(self) -> Self {
        Self { ahead: true, ..self }
    }

    /// The same threads, of which fewer share an output.
    const fn of_expert(self) -> Self {
        Self { lanes: EXPERT_LANES, warps: self.warps * LANES / EXPERT_LANES, ..self }
    }

    /// Measured on an H200, with several rows on an H100: docs/lab/2026-11-24-gpu-decode.md,
    /// 2026-11-26-gpu.md and 2026-11-29-gpu.md; several rows of experts on an H200:
    /// 2026-11-29-experts.md.
    pub(super) fn of(format: Format, input: Input, role: Role, sum: Sum, batch: usize) -> Self {
        let bits = format.words().iter().sum::<usize>();
        let shares_down = role == Role::ExpertDown && batch > 1;
        // Drivers that compute on the CPU take seconds to compile unrolled loops. Tests run on
        // them, so that some of these products load ahead too.
        if sum == Sum::Shared {
            let shape = Self { ahead: input == Input::Pairs, ..Self::new(2, 1, 4) };
            return if shares_down { shape.of_expert() } else { shape };
        }
        let few = bits <= 4;
        let shape = match (role, input, batch) {
            (Role::Plain | Role::Gated, Input::Floats, 1) => Self::new(4, 2, 4),
            (Role::Plain | Role::Gated, Input::Floats, _) => Self::new(4, 1, 8),
            (Role::Plain, Input::Bytes, 1) if few => Self::new(2, 4, 4),
            (Role::Plain, Input::Bytes, 1) => Self::new(1, 4, 8),
            (Role::Plain, Input::Pairs, 1) => Self::new(4, 1, 8).ahead(),
            (Role::Plain, _, 4) => Self::new(4, 2, 4),
            (Role::Plain, ..) => Self::new(8, 1, 4),
            (Role::ExpertGated | Role::ExpertUp, Input::Floats, _) => Self::new(2, 2, 4),
            (Role::Gated | Role::ExpertGated | Role::ExpertUp, _, 1) => {
                Self::new(1, if few { 2 } else { 4 }, 8)
            }
            (Role::Gated, _, 4) => Self::new(2, 2, 4),
            (Role::Gated, ..) => Self::new(4, 1, 2),
            (Role::ExpertGated, ..) => Self::new(2, 1, 4),
            // As many rows of weights. Not measured.
            (Role::ExpertUp, ..) => Self::new(4, 1, 4),
            (Role::ExpertDown, _, 1) => Self::new(1, 3, 8),
            (Role::ExpertDown, ..) => Self::new(4, 1, 4).of_expert(),
        };
        // Formats of more than 8 bits take more registers.
        Self { unroll: if bits > 8 { 1 } else { shape.unroll }, ..shape }
    }

    /// For products that store levels: the outputs of a workgroup are one block. Measured on an
    /// H200 with 4 and 8 bits (docs/lab/2026-11-29-gpu.md), those of experts on an H100.
    pub(super) fn of_block(format: Format, input: Input, role: Role, sum: Sum) -> Self {
        if sum == Sum::Shared {
            return Self { ahead: input == Input::Pairs, ..Self::new(2, 1, BLOCK_COLUMNS / 2) };
        }
        let of_two = |unroll| Self::new(2, unroll, BLOCK_COLUMNS / 2);
        let of_four = Self::new(4, 1, BLOCK_COLUMNS / 4);
        let bits = format.words().iter().sum::<usize>();
        match (role, input) {
            (Role::Gated, _) if bits <= 4 => of_two(2),
            (Role::Gated, _) => of_four,
            (Role::ExpertGated, _) => of_two(1),
            // The blocks of eight experts of 768 channels: four experts at a time.
            (Role::ExpertDown, _) => of_two(Self::of(format, input, role, sum, BATCHES[0]).unroll),
            (Role::Plain, Input::Pairs) if bits > 4 => of_four.ahead(),
            (_, Input::Pairs) => of_two(2),
            (Role::Plain, _) if bits > 4 => of_two(2),
            // Few lanes, each with as many blocks as its registers can hold.
            _ => of_two(4),
        }
    }

    pub fn threads(self) -> usize {
        self.warps * self.lanes
    }

    /// Blocks of an output that its lanes take in a turn.
    pub fn blocks_of_turn(self) -> usize {
        self.lanes * self.unroll
    }

    /// Outputs of a workgroup.
    pub fn outputs(self) -> usize {
        self.warps * self.per
    }
}
