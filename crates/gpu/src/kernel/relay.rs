//! The device's side of a sum over ranks whose hosts relay partial sums.

use super::{Access, Look};
use crate::relay::{HEADER_VECTORS, SLOT_VECTORS};

/// Numbers of a vector. A thread has one vector.
pub(crate) const RELAY_WORDS: usize = 3;

/// A rank's part of a sum; any number of workgroups.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Relay {
    pub rank: usize,
    pub ranks: usize,
    /// Adds the sums to rows, instead of putting them in the partial sums' place.
    pub adds: bool,
    pub look: Look,
}

impl Relay {
    #[cfg(test)]
    pub fn all() -> Vec<Self> {
        let mut all = Vec::new();
        for (rank, ranks) in [(0, 2), (1, 2), (2, 3), (7, 8)] {
            for look in [Look::Once, Look::Often] {
                all.extend([false, true].map(|adds| Self { rank, ranks, adds, look }));
            }
        }
        all
    }

    /// Threads of a workgroup. Small ones begin sooner; where threads look in turn, many are more
    /// patient.
    pub fn threads(self) -> usize {
        match self.look {
            Look::Once => 256,
            Look::Often => 1024,
        }
    }

    /// The partial sums, the outboxes, the inbox, the state, the host's word, and the rows that
    /// take the sums, unless those are the partial sums.
    pub fn bindings(self) -> Vec<Access> {
        use Access::{Read, Write};
        match self.adds {
            true => vec![Read, Write, Write, Write, Write, Write],
            false => vec![Write; 5],
        }
    }

    pub fn source(self) -> String {
        let others = || (0..self.ranks).filter(|rank| *rank != self.rank);
        let each =
            |text: &str| others().map(|rank| text.replace("$r", &rank.to_string())).collect::<String>();
        let are_whole = others().map(|rank| format!("is_whole(seen{rank})")).collect::<Vec<_>>().join(" && ");
        let part = |rank: usize| match rank == self.rank {
            true => "bitcast<vec3<f32>>(mine)".to_owned(),
            false => format!("bitcast<vec3<f32>>(part{rank}.xyz)"),
        };
        let sum = (0..self.ranks).map(part).collect::<Vec<_>>().join(" + ");
        let (turns, look) = match self.look {
            Look::Once => ("", "if ((looks & 63u) == 63u) { told = atomicLoad(&ended[0]); }".to_owned()),
            Look::Often => {
                (include_str!("relay_turns.wgsl"), "told = atomicAdd(&ended[0], 0u);\n".repeat(64))
            }
        };
        let (access, to, sets) = if self.adds { ("read", "to", "+=") } else { ("read_write", "x", "=") };
        let rows = match self.adds {
            true => "@group(0) @binding(5) var<storage, read_write> to: array<f32>;\n",
            false => "",
        };
        include_str!("relay.wgsl")
            .replace("$TURNS", turns)
            .replace("$ROWS", rows)
            .replace("$ACCESS", access)
            .replace("$KEPT", &each("        var part$r = vec4<u32>();\n"))
            .replace("$SEEN", &each("            let seen$r = inbox[place($ru, i)];\n"))
            .replace("$KEEP", &each("                part$r = seen$r;\n"))
            .replace("$ARE_WHOLE", &are_whole)
            .replace("$SUM", &sum)
            .replace("$LOOK", &look)
            .replace("$TO", to)
            .replace("$SETS", sets)
            .replace("$RANK", &format!("{}u", self.rank))
            .replace("$HEADER", &format!("{HEADER_VECTORS}u"))
            .replace("$SLOT", &format!("{SLOT_VECTORS}u"))
            .replace("$THREADS", &format!("{}u", self.threads()))
    }
}
