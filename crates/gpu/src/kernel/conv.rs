//! WGSL of short convolutions.

use thunder_compute::MAX_DRAFT;

use super::Access;

/// One compiled form of [`super::Kernel::Conv`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Conv {
    /// Inputs and results have gates (LFM2), otherwise results are SiLU's, in place.
    pub gated: bool,
    /// Sequences have drafts: their inputs are kept, and the state does not absorb them.
    pub drafts: bool,
    /// Taps that there is space for, of [`Self::TAPS`].
    pub taps: usize,
}

/// Maximum taps that there is space for.
pub(crate) const MAX_TAPS: usize = 16;

impl Conv {
    /// Nearly all models have 3 or 4 taps. Windows of these stay in registers.
    pub const TAPS: [usize; 2] = [4, MAX_TAPS];

    /// The space for this number of taps.
    pub fn space(kernel: usize) -> usize {
        Self::TAPS.into_iter().find(|taps| *taps >= kernel).unwrap_or(MAX_TAPS)
    }

    /// Every form.
    pub fn all() -> impl Iterator<Item = Self> {
        let both = [false, true];
        let forms = both.into_iter().flat_map(move |gated| both.map(|drafts| (gated, drafts)));
        forms.flat_map(|(gated, drafts)| Self::TAPS.map(|taps| Self { gated, drafts, taps }))
    }

    pub fn bindings(self) -> Vec<Access> {
        let mut all = vec![Access::Read, Access::Read, Access::Write, Access::Write];
        all.push(if self.gated { Access::Write } else { Access::Read });
        all.extend(self.drafts.then_some(Access::Write));
        all
    }

    pub fn source(self) -> String {
        let mut bindings = match self.gated {
            true => "@group(0) @binding(4) var<storage, read_write> out: array<f32>;\n",
            false => "@group(0) @binding(4) var<storage, read> biases: array<f32>;\n",
        }
        .to_owned();
        let [input, sum, keep] = match self.gated {
            // A row has input gates, output gates and inputs.
            true => [
                "x[place] * x[place + 2u * args.channels]",
                "sum",
                "out[out_row] = x[place + args.channels] * result;",
            ],
            false => ["x[place]", "silu(sum, channel)", "x[place] = result;"],
        };
        if !self.gated {
            bindings += "fn silu(sum: f32, channel: u32) -> f32 {
    var biased = sum;
    if (args.biased == 1u) { biased += biases[channel]; }
    return biased / (1.0 + exp(-biased));
}
";
        }
        let row = |note: &str| {
            format!(
                "let place = row * args.stride + channel;
        let out_row = row * args.out_stride + channel;
        let input = {input};
        {note}
        let result = convolve(&inputs, channel, input);
        {keep}"
            )
        };
        let [mut before, mut draft] = [String::new(), String::new()];
        if self.drafts {
            bindings += "// Of each slot and row of a draft: inputs, and results that turned out right.
@group(0) @binding(5) var<storage, read_write> kept: array<f32>;
";
            before = format!(
                "let keeps = sequences[at + 3u] * {MAX_DRAFT}u * 2u * args.channels + channel;
    let accepted = select(0u, sequences[at + 5u], start == begin);
    for (var i = 0u; i < accepted; i++) {{
        let place = keeps + i * 2u * args.channels;
        kept[place + args.channels] = convolve(&inputs, channel, kept[place]);
    }}
    let draft = sequences[at + 1u] - sequences[at + 4u];
    let certain = clamp(draft, start, end);"
            );
            draft = format!(
                "for (; row < end; row++) {{
        {}
    }}",
                row("kept[keeps + (row - draft) * 2u * args.channels] = input;")
            );
        }
        include_str!("conv.wgsl")
            .replace("$BINDINGS", &bindings)
            .replace("$SUM", sum)
            .replace("$BEFORE", &before)
            .replace("$CERTAIN", if self.drafts { "certain" } else { "end" })
            .replace("$ROW", &row(""))
            .replace("$INPUT", input)
            .replace("$KEEP", keep)
            .replace("$TAPS", &self.taps.to_string())
            .replace("$DRAFT", &draft)
    }
}
