//! The device's side of a sum over ranks for which hosts relay partial sums.

use super::{Access, CHECK, Leaving, Look};
use crate::buffer::BLOCK_COLUMNS;
use crate::relay::{HEADER_VECTORS, SLOT_VECTORS};

/// Numbers in a vector. Each thread has one vector.
pub(crate) const RELAY_WORDS: usize = 3;
/// Stands for an exchange's number until the exchange is recorded for the device.
pub(crate) const RELAY_UNNUMBERED: u32 = 0;

/// A rank's part of a sum. May have any number of workgroups.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Relay {
    pub rank: usize,
    pub ranks: usize,
    /// Adds the sums to rows; otherwise they replace the partial sums.
    pub adds: bool,
    /// Also stores the rows that sums were added to as levels, times a norm's weights.
    pub leaves: bool,
    pub look: Look,
}

impl Relay {
    #[cfg(test)]
    pub fn all() -> Vec<Self> {
        let mut all = Vec::new();
        for (rank, ranks) in [(0, 2), (1, 2), (2, 3), (7, 8)] {
            for look in [Look::Once, Look::Often] {
                let forms = [(false, false), (true, false), (true, true)];
                all.extend(forms.map(|(adds, leaves)| Self { rank, ranks, adds, leaves, look }));
            }
        }
        all
    }

    /// Threads of a workgroup. Small workgroups start sooner. If threads take turns to poll, more
    /// threads wait longer.
    pub fn threads(self) -> usize {
        match self.look {
            Look::Once => 256,
            Look::Often => 1024,
        }
    }

    /// The partial sums, the outboxes, the inbox, the state, the host's flag, and the rows that get
    /// the sums, unless these are the partial sums. Then a norm's weights, levels, scales and
    /// squares, if levels are stored.
    pub fn bindings(self) -> Vec<Access> {
        use Access::{Read, Write};
        let mut all = match self.adds {
            true => vec![Read, Write, Write, Write, Write, Write],
            false => vec![Write; 5],
        };
        all.extend([Read, Write, Write, Write].into_iter().filter(|_| self.leaves));
        all
    }

    /// Declarations for storing levels, and the end of the kernel. A workgroup's numbers are whole
    /// blocks of one or several rows.
    fn leaving(self) -> [String; 2] {
        if !self.leaves {
            return [String::new(), String::new()];
        }
        let blocks = self.threads() * RELAY_WORDS / BLOCK_COLUMNS;
        let leaving = Leaving {
            quads: blocks * BLOCK_COLUMNS / 4,
            used: "left_quads",
            normed: true,
            row_blocks: "(args.stride / 32u)",
            ..Default::default()
        };
        let declared = format!(
            "@group(0) @binding(6) var<storage, read> left_norm: array<vec4<f32>>;
@group(0) @binding(7) var<storage, read_write> levels_out: array<u32>;
@group(0) @binding(8) var<storage, read_write> scales_out: array<vec2<f32>>;
@group(0) @binding(9) var<storage, read_write> squares_out: array<f32>;
var<private> left_quads: u32;
{}",
            leaving.source()
        );
        let end = format!(
            "    left_quads = min(LEFT_QUADS, args.words / 4u - id.x * LEFT_QUADS);
    let block = id.x * {blocks}u + thread / 8u;
    let of_row = args.stride / 32u;
    // Only the block of the thread's own quad counts: it may be another row's than the first.
    leave_levels(args.first / args.stride + block / of_row, block % of_row - thread / 8u, thread);
"
        );
        [declared, end]
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
        let (access, take) = match (self.adds, self.leaves) {
            (false, _) => ("read_write", "x[args.first + at] = sum;"),
            (true, false) => ("read", "to[args.first + at] += sum;"),
            (true, true) => (
                "read",
                "let all = to[args.first + at] + sum;
        to[args.first + at] = all;
        left[at % (4u * LEFT_QUADS)] = all;",
            ),
        };
        let rows = match self.adds {
            true => "@group(0) @binding(5) var<storage, read_write> to: array<f32>;\n",
            false => "",
        };
        let [leaving, leave] = self.leaving();
        include_str!("relay.wgsl")
            .replace("$CHECK", CHECK)
            .replace("$TURNS", turns)
            .replace("$ROWS", rows)
            .replace("$LEAVING", &leaving)
            .replace("$LEAVE", &leave)
            .replace("$ACCESS", access)
            .replace("$KEPT", &each("        var part$r = vec4<u32>();\n"))
            .replace("$SEEN", &each("            let seen$r = inbox[place_of($ru, i)];\n"))
            .replace("$KEEP", &each("                part$r = seen$r;\n"))
            .replace("$ARE_WHOLE", &are_whole)
            .replace("$SUM", &sum)
            .replace("$LOOK", &look)
            .replace("$TAKE", take)
            .replace("$RANK", &format!("{}u", self.rank))
            .replace("$HEADER", &format!("{HEADER_VECTORS}u"))
            .replace("$SLOT", &format!("{SLOT_VECTORS}u"))
            .replace("$THREADS", &format!("{}u", self.threads()))
    }
}
