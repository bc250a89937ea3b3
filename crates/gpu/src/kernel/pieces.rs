//! The device's side of a sum over ranks whose pieces all devices read in the host's memory.

use super::Access;

/// Adds a piece and stores the next one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct AddPieces {
    pub rank: usize,
    pub ranks: usize,
    /// Adds the sums to rows; otherwise they replace the partial sums.
    pub adds: bool,
}

impl AddPieces {
    #[cfg(test)]
    pub fn all() -> impl Iterator<Item = Self> {
        let ranks = [(0, 2), (1, 2), (2, 3), (7, 8)];
        ranks.into_iter().flat_map(|(rank, ranks)| [false, true].map(|adds| Self { rank, ranks, adds }))
    }

    /// The partial sums, the pieces, and the rows that get the sums, unless these are the partial
    /// sums.
    pub fn bindings(self) -> Vec<Access> {
        use Access::{Read, Write};
        if self.adds { vec![Read, Write, Write] } else { vec![Write; 2] }
    }

    pub fn source(self) -> String {
        let part = |rank: usize| match rank == self.rank {
            true => "x[at]".to_owned(),
            false => format!("pieces[args.slot + {rank}u * args.of_rank + i]"),
        };
        let sum = (0..self.ranks).map(part).collect::<Vec<_>>().join(" + ");
        let rows = "@group(0) @binding(2) var<storage, read_write> to: array<vec4<f32>>;";
        let (access, rows, take) = match self.adds {
            false => ("read_write", "", "x[at] = sum;"),
            true => ("read", rows, "to[at] += sum;"),
        };
        include_str!("add_pieces.wgsl")
            .replace("$ACCESS", access)
            .replace("$ROWS", rows)
            .replace("$SUM", &sum)
            .replace("$TAKE", take)
    }
}
