//! WGSL of recurrences whose state is a matrix for each head.

mod held;

use thunder_compute::MAX_DRAFT;

use super::Access;
pub(crate) use held::HeldRecurrence;

/// What is computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Rule {
    /// The delta rule with a decay for each head.
    Delta,
    /// The delta rule with a decay for each column of a key.
    ChannelDelta,
    /// Mamba-2: the values are added whatever the state has.
    StateSpace,
}

/// One compiled form of [`super::Kernel::Recurrence`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Recurrence {
    pub rule: Rule,
    /// Sequences have drafts: the right rows of the last draft come first, and rows of the new one
    /// are computed on a copy of the state.
    pub drafts: bool,
}

/// Inputs of both kernels.
const INPUTS: &str = include_str!("recurrence_inputs.wgsl");
/// Where a thread of either is in the state.
const PLACE: &str = include_str!("recurrence_place.wgsl");

/// Maximum columns of a key that there is space for.
pub(crate) const MAX_KEY_COLUMNS: usize = 512;
/// Columns of the matrix that a workgroup has.
pub(crate) const STATE_COLUMNS: usize = 32;

impl Rule {
    pub const ALL: [Self; 3] = [Self::Delta, Self::ChannelDelta, Self::StateSpace];

    /// Declares what it reads besides.
    fn declare(self) -> &'static str {
        match self {
            Self::Delta => "",
            Self::ChannelDelta => "@group(0) @binding(7) var<storage, read> times: array<f32>;\n",
            Self::StateSpace => "@group(0) @binding(7) var<storage, read> skips: array<f32>;\n",
        }
    }

    /// Computes the decay of a row, unless each column of a key has its own.
    fn token(self) -> &'static str {
        match self {
            Self::Delta => "let keep = decay_of(rate, $GATE_TIME + biases[head]);",
            Self::ChannelDelta => "",
            Self::StateSpace => {
                "let time = clamp(softplus($GATE + biases[head]), args.low, args.high);
        let keep = exp(-rate * time);"
            }
        }
    }

    /// The decay of a row of the state; `of_column` is that of a column of a key.
    fn keep(self, of_column: &str) -> String {
        if self == Self::ChannelDelta { of_column } else { "keep" }.to_owned()
    }

    /// Computes what is added to the state, and the result. Queries and keys are used before they
    /// are made unit vectors.
    fn written(self) -> &'static str {
        match self {
            Self::Delta | Self::ChannelDelta => {
                "let unit = sqrt(all.zw + vec2<f32>(args.unit_eps));
        let strength = 1.0 / (1.0 + exp(-$GATE));
        let written = (value - all.x / unit.y) * strength / unit.y;
        let result = fma(written, both, all.y) / (unit.x * sqrt(f32(args.key_dim)));"
            }
            Self::StateSpace => {
                "let written = value * time;
        let result = fma(skips[head], value, fma(written, both, all.y));"
            }
        }
    }
}

/// Replaces names by texts, one after the other.
fn filled<const N: usize>(text: &str, pairs: [(&str, String); N]) -> String {
    pairs.into_iter().fold(text.to_owned(), |text, (name, by)| text.replace(name, &by))
}

impl Recurrence {
    /// Every form.
    pub fn all() -> impl Iterator<Item = Self> {
        Rule::ALL.into_iter().flat_map(|rule| [false, true].map(|drafts| Self { rule, drafts }))
    }

    pub fn bindings(self) -> Vec<Access> {
        let mut all = vec![Access::Read; 5];
        all.extend([Access::Write; 2]);
        all.extend((self.rule != Rule::Delta).then_some(Access::Read));
        if self.drafts {
            all.extend([Access::Read, Access::Read, Access::Write]);
        }
        all
    }

    pub fn source(self) -> String {
        let (memory, decays) = match self.rule {
            Rule::ChannelDelta => (
                "var<workgroup> decays: array<f32, 512>;",
                "let place = head * args.key_dim + k;
            decays[k] = decay_of(rate, times_of($AGAIN$TIMES_ROW + place) + biases[place]);",
            ),
            Rule::Delta | Rule::StateSpace => ("", ""),
        };
        let of_rows = self.of_rows();
        let pairs = [
            ("$INPUTS", INPUTS.to_owned()),
            ("$PLACE", PLACE.to_owned()),
            ("$BINDINGS", self.rule.declare().to_owned() + &of_rows.declare),
            ("$MEMORY", memory.to_owned()),
            ("$DECAYS", decays.to_owned()),
            ("$TOKEN", self.rule.token().to_owned()),
            ("$WRITTEN", self.rule.written().to_owned()),
            ("$KEEP", self.rule.keep("decays[k]")),
            ("$GATE_TIME", "gates_of($AGAINgate + args.heads)".to_owned()),
            ("$GATE", "gates_of($AGAINgate)".to_owned()),
            ("$ROWS", of_rows.each),
            ("$FIRST_GATE", of_rows.first_gate.to_owned()),
            ("$TIMES_ROW", of_rows.first_time.to_owned()),
            ("$AGAIN", of_rows.again.to_owned()),
            ("$COPY", of_rows.copy.to_owned()),
            ("$IS_FIRST", of_rows.is_first.to_owned()),
            ("$STORE", of_rows.store.to_owned()),
            ("$AND_OUT", of_rows.and_out.to_owned()),
        ];
        filled(include_str!("recurrence.wgsl"), pairs)
    }

    /// What differs with drafts.
    fn of_rows(self) -> OfRows {
        let has_times = self.rule == Rule::ChannelDelta;
        if !self.drafts {
            let read = |name: &str| format!("fn {name}_of(at: u32) -> f32 {{ return {name}[at]; }}\n");
            let mut declare = read("x") + &read("gates") + &read("state");
            declare += &if has_times { read("times") } else { String::new() };
            return OfRows {
                declare,
                each: "for (var row = start; row < end; row++) {
        let fresh = sequences[at + 2u] + row - begin == 0u;
        let source = row * args.x_stride;"
                    .to_owned(),
                first_gate: "row * args.gates_stride",
                first_time: "row * args.decays_stride",
                again: "",
                copy: "",
                is_first: "row == start",
                store: "state[s] = next;",
                and_out: "",
            };
        }
        let first = if self.rule == Rule::Delta { 7 } else { 8 };
        let mut declare = String::new();
        let kept = [("kept", "read"), ("kept_gates", "read"), ("copy", "read_write")];
        for (binding, (name, access)) in (first..).zip(kept) {
            declare += &format!("@group(0) @binding({binding}) var<storage, {access}> {name}: array<f32>;\n");
        }
        let read = |name: &str, kept: &str| {
            format!(
                "fn {name}_of(again: bool, at: u32) -> f32 {{
    if (again) {{ return {kept}[at]; }}
    return {name}[at];
}}
"
            )
        };
        declare += &(read("x", "kept") + &read("gates", "kept_gates"));
        declare += &if has_times { read("times", "kept_gates") } else { String::new() };
        declare += "fn state_of(on_copy: bool, to_copy: u32, at: u32) -> f32 {
    if (on_copy) { return copy[at + to_copy]; }
    return state[at];
}
";
        OfRows {
            declare,
            each: format!(
                "let accepted = select(0u, sequences[at + 5u], start == begin);
    let certain = max(sequences[at + 1u] - sequences[at + 4u], start);
    let turns = select(0u, accepted + end - start, start < end);
    // From a number of the state to that of the copy.
    let to_copy = (id.y * args.heads + head) * args.key_dim * args.value_dim + v - states;
    for (var turn = 0u; turn < turns; turn++) {{
        let again = turn < accepted;
        let row = select(start + turn - accepted, start, again);
        let is_draft = row >= certain && !again;
        let on_copy = row > certain && !again;
        let kept_at = sequences[at + 3u] * {MAX_DRAFT}u + min(turn, {MAX_DRAFT}u - 1u);
        let fresh = sequences[at + 2u] + row - begin == 0u;
        let source = select(row * args.x_stride, (2u * kept_at + 1u) * args.channels, again);"
            ),
            first_gate: "select(row * args.gates_stride, kept_at * args.kept_gates, again)",
            first_time: "select(row * args.decays_stride, kept_at * args.kept_gates + args.heads, again)",
            again: "again, ",
            copy: "on_copy, to_copy, ",
            is_first: "turn == 0u",
            store: "if (is_draft) { copy[s + to_copy] = next; } else { state[s] = next; }",
            and_out: " && !again",
        }
    }
}

/// Parts of the text that say where a row's inputs and the state are.
struct OfRows {
    declare: String,
    /// The beginning of the loop over rows.
    each: String,
    first_gate: &'static str,
    first_time: &'static str,
    again: &'static str,
    copy: &'static str,
    /// Whether the state was not written yet.
    is_first: &'static str,
    store: &'static str,
    and_out: &'static str,
}
