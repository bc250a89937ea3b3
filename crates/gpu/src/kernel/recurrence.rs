//! WGSL of recurrences whose state is a matrix for each head.

use super::Access;

/// One compiled form of [`super::Kernel::Recurrence`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Recurrence {
    /// The delta rule with a decay for each head.
    Delta,
    /// The delta rule with a decay for each column of a key.
    ChannelDelta,
    /// Mamba-2: the values are added whatever the state has.
    StateSpace,
}

/// Maximum columns of a key that there is space for.
pub(crate) const MAX_KEY_COLUMNS: usize = 512;
/// Columns of the matrix that a workgroup has.
pub(crate) const STATE_COLUMNS: usize = 32;

impl Recurrence {
    /// Every form.
    pub const ALL: [Self; 3] = [Self::Delta, Self::ChannelDelta, Self::StateSpace];

    pub fn bindings(self) -> Vec<Access> {
        let mut all = vec![Access::Read; 5];
        all.extend([Access::Write; 2]);
        all.extend((self != Self::Delta).then_some(Access::Read));
        all
    }

    pub fn source(self) -> String {
        let [bindings, memory, decays, token, keep] = match self {
            Self::Delta => {
                ["", "", "", "let keep = decay_of(rate, gates[gate + args.heads] + biases[head]);", "keep"]
            }
            Self::ChannelDelta => [
                "@group(0) @binding(7) var<storage, read> times: array<f32>;",
                "var<workgroup> decays: array<f32, 512>;",
                "let place = head * args.key_dim + k;
            decays[k] = decay_of(rate, times[row * args.decays_stride + place] + biases[place]);",
                "",
                "decays[k]",
            ],
            Self::StateSpace => [
                "@group(0) @binding(7) var<storage, read> skips: array<f32>;",
                "",
                "",
                "let time = clamp(softplus(gates[gate] + biases[head]), args.low, args.high);
        let keep = exp(-rate * time);",
                "keep",
            ],
        };
        // Queries and keys are used before they are made unit vectors.
        let written = match self {
            Self::Delta | Self::ChannelDelta => {
                "let unit = sqrt(all.zw + vec2<f32>(args.unit_eps));
        let written = (value - all.x / unit.y) / (1.0 + exp(-gates[gate])) / unit.y;
        let result = fma(written, both, all.y) / (unit.x * sqrt(f32(args.key_dim)));"
            }
            Self::StateSpace => {
                "let written = value * time;
        let result = fma(skips[head], value, fma(written, both, all.y));"
            }
        };
        include_str!("recurrence.wgsl")
            .replace("$BINDINGS", bindings)
            .replace("$MEMORY", memory)
            .replace("$DECAYS", decays)
            .replace("$TOKEN", token)
            .replace("$KEEP", keep)
            .replace("$WRITTEN", written)
    }
}
