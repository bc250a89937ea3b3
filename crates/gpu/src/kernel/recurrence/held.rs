//! Recurrences whose state stays in registers.

use super::{INPUTS, PLACE, Recurrence, Rule, filled};
use crate::kernel::Access;

/// A compiled form of [`crate::kernel::Kernel::HeldRecurrence`]: a sequence's state stays in
/// registers. For sequences without drafts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct HeldRecurrence {
    pub rule: Rule,
    /// Columns of a key that there is space for, of [`Self::KEYS`].
    pub keys: usize,
}

impl HeldRecurrence {
    pub const KEYS: [usize; 3] = [64, 128, 256];

    /// The form for keys of this width.
    pub fn of(rule: Rule, key_dim: usize) -> Option<Self> {
        let keys = Self::KEYS.into_iter().find(|keys| *keys >= key_dim)?;
        Some(Self { rule, keys })
    }

    /// Every form.
    #[cfg(test)]
    pub fn all() -> impl Iterator<Item = Self> {
        Rule::ALL.into_iter().flat_map(|rule| Self::KEYS.map(|keys| Self { rule, keys }))
    }

    pub fn bindings(self) -> Vec<Access> {
        Recurrence { rule: self.rule, drafts: false }.bindings()
    }

    pub fn source(self) -> String {
        let memory = match self.rule {
            Rule::ChannelDelta => "var<workgroup> decays: array<f32, 3 * $KEYSu>;",
            Rule::Delta | Rule::StateSpace => "",
        };
        let time = if self.rule == Rule::Delta { "gates[gate + args.heads]" } else { "0.0" };
        let pairs = [
            ("$INPUTS", INPUTS.to_owned()),
            ("$PLACE", PLACE.to_owned()),
            ("$BINDINGS", self.rule.declare().to_owned()),
            ("$MEMORY", memory.to_owned()),
            ("$TOKEN", self.rule.token().to_owned()),
            ("$WRITTEN", self.rule.written().to_owned()),
            ("$TIME_OF_ROW", time.to_owned()),
            ("$GATE_TIME", "own.time".to_owned()),
            ("$GATE", "own.gate".to_owned()),
            ("$SLOTS", self.slots()),
            ("$ASK", self.ask()),
            ("$PUT_FIRST", self.put("0u")),
            ("$PUT", self.put("turn")),
            ("$STATE", self.state()),
            ("$ADD", self.add()),
            ("$COLLECT", collect()),
            ("$WRITE", self.write()),
            ("$STORE", self.store()),
            ("$KEYS", self.keys.to_string()),
            ("$ROWS", self.rows().to_string()),
        ];
        filled(include_str!("../recurrence_held.wgsl"), pairs)
    }

    /// Rows of the state that a thread has.
    fn rows(self) -> usize {
        self.keys / 8
    }

    /// Quads of a query, or of a key.
    fn quads(self) -> usize {
        self.keys / 4
    }

    /// Which quad of a query or key a thread loads, and variables for it. A quad's columns belong
    /// to one thread's rows of the state, so they are eight apart. Quads are written whole: Metal
    /// may write all of a vector for one number of it.
    fn slots(self) -> String {
        let mut text = format!(
            "let slot = min(thread, {}u);
    let place = slot % QUADS * 4u;
    let k_first = place / ROWS + 8u * (place % ROWS);
    let k = vec4<u32>(k_first) + vec4<u32>(0u, 8u, 16u, 24u);
    let columns = select(args.query_first, args.key_first, slot >= QUADS)
        + key_head * args.key_dim + min(k, vec4<u32>(args.key_dim - 1u));
    var coming: vec4<f32>;
",
            2 * self.quads() - 1
        );
        if self.rule == Rule::ChannelDelta {
            text += &format!(
                "let decay_k = min(thread, {}u);
    let decay_column = head * args.key_dim + min(decay_k, args.key_dim - 1u);
    let decay_bias = biases[decay_column];
    var coming_time: f32;
",
                self.keys - 1
            );
        }
        text
    }

    /// Asks for numbers of row `row_ahead`.
    fn ask(self) -> String {
        let mut text = "{
    let source = row_ahead * args.x_stride + columns;
    coming = vec4<f32>(x[source.x], x[source.y], x[source.z], x[source.w]);
}
"
        .to_owned();
        if self.rule == Rule::ChannelDelta {
            text += "coming_time = times[row_ahead * args.decays_stride + decay_column];\n";
        }
        text
    }

    /// Stores the numbers in the tiles of this turn.
    fn put(self, turn: &str) -> String {
        let mut text = format!(
            "{{
    let numbers = select(vec4<f32>(0.0), coming, k < vec4<u32>(args.key_dim));
    let quad = {turn} * QUADS + slot % QUADS;
    if (thread < QUADS) {{ queries[quad] = numbers; }} else if (thread < 2u * QUADS) {{ keys[quad] = numbers; }}
}}
"
        );
        if self.rule == Rule::ChannelDelta {
            text += &format!(
                "if (thread < {keys}u) {{ decays[{turn} * {keys}u + thread] = decay_of(rate, coming_time + decay_bias); }}\n",
                keys = self.keys
            );
        }
        text
    }

    fn state(self) -> String {
        (0..self.rows())
            .map(|i| {
                format!(
                    "var held_{i} = 0.0;
    if (part + {k}u < args.key_dim && !fresh) {{ held_{i} = state[old_states + (part + {k}u) * args.value_dim]; }}
",
                    k = 8 * i
                )
            })
            .collect()
    }

    /// Adds the thread's rows of the state to its sums, in their order.
    fn add(self) -> String {
        let mut text = String::new();
        for quad in 0..self.rows() / 4 {
            text += &format!(
                "let query_{quad} = queries[first + {quad}u];\nlet key_{quad} = keys[first + {quad}u];\n"
            );
        }
        for (i, quad, c) in self.each_row() {
            let keep = self.rule.keep(&format!("decays[first_decay + {}u]", 8 * i));
            text += &format!(
                "held_{i} *= {keep};
all = fma(vec4<f32>(held_{i}, held_{i}, query_{quad}.{c}, key_{quad}.{c}), \
                 vec4<f32>(key_{quad}.{c}, query_{quad}.{c}, query_{quad}.{c}, key_{quad}.{c}), all);
both = fma(query_{quad}.{c}, key_{quad}.{c}, both);
"
            );
        }
        text
    }

    fn write(self) -> String {
        self.each_row()
            .map(|(i, quad, c)| format!("held_{i} = fma(key_{quad}.{c}, written, held_{i});\n"))
            .collect()
    }

    fn store(self) -> String {
        (0..self.rows())
            .map(|i| {
                format!(
                    "if (part + {k}u < args.key_dim) {{ state[states + (part + {k}u) * args.value_dim] = held_{i}; }}\n",
                    k = 8 * i
                )
            })
            .collect()
    }

    /// Each row of a thread: its number, its quad, and the component there.
    fn each_row(self) -> impl Iterator<Item = (usize, usize, &'static str)> {
        (0..self.rows()).map(|i| (i, i / 4, ["x", "y", "z", "w"][i % 4]))
    }
}

/// Sums over the threads of a column.
fn collect() -> String {
    (0..8)
        .map(|i| {
            format!("all += sums[half + {at}u + line];\nboth += dots[half + {at}u + line];\n", at = 32 * i)
        })
        .collect()
}
