//! Recurrences whose state stays in registers.

use super::{INPUTS, PLACE, Recurrence, Rule, filled};
use crate::kernel::Access;

/// Threads of a workgroup.
const THREADS: usize = 256;

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
            Rule::ChannelDelta => "var<workgroup> decays: array<vec4<f32>, 3u * QUADS>;",
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

    /// Numbers of queries and keys that a thread loads of a row.
    fn loads(self) -> usize {
        (2 * self.keys).div_ceil(THREADS)
    }

    /// Which numbers of queries and keys a thread loads, and variables for them.
    fn slots(self) -> String {
        let keys = self.keys;
        let mut text: String = (0..self.loads())
            .map(|i| {
                format!(
                    "let slot_{i} = min(thread + {}u, {}u);
    let k_{i} = slot_{i} % {keys}u;
    let from_{i} = select(args.query_first, args.key_first, slot_{i} >= {keys}u)
        + key_head * args.key_dim + min(k_{i}, args.key_dim - 1u);
    let to_{i} = place_of(k_{i});
    var coming_{i}: f32;
",
                    i * THREADS,
                    2 * keys - 1
                )
            })
            .collect();
        if self.rule == Rule::ChannelDelta {
            text += &format!(
                "let decay_k = min(thread, {}u);
    let decay_column = head * args.key_dim + min(decay_k, args.key_dim - 1u);
    let decay_bias = biases[decay_column];
    let decay_to = place_of(decay_k);
    var coming_time: f32;
",
                keys - 1
            );
        }
        text
    }

    /// Asks for numbers of row `row_ahead`.
    fn ask(self) -> String {
        let mut text: String = (0..self.loads())
            .map(|i| format!("coming_{i} = x[row_ahead * args.x_stride + from_{i}];\n"))
            .collect();
        if self.rule == Rule::ChannelDelta {
            text += "coming_time = times[row_ahead * args.decays_stride + decay_column];\n";
        }
        text
    }

    /// Stores the numbers in the tiles of this turn. Threads beyond the last number have that, too.
    fn put(self, turn: &str) -> String {
        let mut text: String = (0..self.loads())
            .map(|i| {
                format!(
                    "{{
    let number = select(0.0, coming_{i}, k_{i} < args.key_dim);
    let place = {turn} * QUADS + to_{i} / 4u;
    if (slot_{i} < {}u) {{ queries[place][to_{i} % 4u] = number; }} else {{ keys[place][to_{i} % 4u] = number; }}
}}
",
                    self.keys
                )
            })
            .collect();
        if self.rule == Rule::ChannelDelta {
            text += &format!(
                "decays[{turn} * QUADS + decay_to / 4u][decay_to % 4u] = decay_of(rate, coming_time + decay_bias);\n"
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
            if self.rule == Rule::ChannelDelta {
                text += &format!("let decay_{quad} = decays[first + {quad}u];\n");
            }
        }
        for (i, quad, c) in self.each_row() {
            let keep = self.rule.keep(&format!("decay_{quad}.{c}"));
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
