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
/// Threads of a workgroup.
pub(crate) const CONV_THREADS: usize = 128;

impl Conv {
    /// Nearly all models have 3 or 4 taps.
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
        if !self.gated {
            bindings += "fn silu(sum: f32, channel: u32) -> f32 {
    var biased = sum;
    if (args.biased == 1u) { biased += biases[channel]; }
    return biased / (1.0 + exp(-biased));
}
";
        }
        let [mut before, mut again, mut draft] =
            ["let certain = end;".to_owned(), String::new(), String::new()];
        if self.drafts {
            bindings += "// Of each slot and row of a draft: inputs, and results that turned out right.
@group(0) @binding(5) var<storage, read_write> kept: array<f32>;
";
            before = format!(
                "let keeps = sequences[at + 3u] * {MAX_DRAFT}u * 2u * args.channels + channel;
    let accepted = select(0u, sequences[at + 5u], start == begin && mine < args.channels);
    let draft = sequences[at + 1u] - sequences[at + 4u];
    let certain = clamp(draft, start, end);"
            );
            again = format!(
                "for (var i = 0u; i < accepted; i++) {{
        let place = keeps + i * 2u * args.channels;
        let input = kept[place];
        {}kept[place + args.channels] = result;
    }}",
                self.convolve("input", "result")
            );
            draft = format!(
                "for (row = certain; row < end && mine < args.channels; row++) {{
        {}
    }}",
                self.row("kept[keeps + (row - draft) * 2u * args.channels] = input;")
            );
        }
        let eight: String = (0..8)
            .map(|i| {
                format!(
                    "let input_{i} = {};\n",
                    self.input(&format!("((row + {i}u) * args.stride + channel)"))
                )
            })
            .chain((0..8).map(|i| {
                let (input, result) = (format!("input_{i}"), format!("result_{i}"));
                self.convolve(&input, &result) + &self.keep(&format!("(row + {i}u)"), &result)
            }))
            .collect();
        include_str!("conv.wgsl")
            .replace("$BINDINGS", &bindings)
            .replace("$BEFORE", &before)
            .replace("$WINDOW", &self.window())
            .replace("$AGAIN", &again)
            .replace("$EIGHT", &eight)
            .replace("$ROW", &self.row(""))
            .replace("$STATE", &self.state())
            .replace("$DRAFT", &draft)
            .replace("$TAPS", &self.taps.to_string())
            .replace("$THREADS", &CONV_THREADS.to_string())
    }

    /// An input of the channel, of the row at this place.
    fn input(self, place: &str) -> String {
        // A row has input gates, output gates and inputs.
        if self.gated {
            format!("x[{place}] * x[{place} + 2u * args.channels]")
        } else {
            format!("x[{place}]")
        }
    }

    /// Stores a row's result.
    fn keep(self, row: &str, result: &str) -> String {
        let place = format!("{row} * args.stride + channel");
        match self.gated {
            true => {
                format!("out[{row} * args.out_stride + channel] = x[{place} + args.channels] * {result};\n")
            }
            false => format!("x[{place}] = {result};\n"),
        }
    }

    /// The weights of the channel, and the inputs before row `my_start`: of rows, or of the state.
    fn window(self) -> String {
        let weights = (0..self.taps).map(|k| {
            format!(
                "let weight_{k} = select(0.0, taps[channel * args.kernel + max({k}u, skipped) - skipped], {k}u >= skipped);\n"
            )
        });
        let inputs = (0..self.taps - 1).map(|k| {
            let back = self.taps - 1 - k;
            format!(
                "var in_{k} = 0.0;
    if ({k}u >= skipped && my_start >= start + {back}u) {{
        in_{k} = {};
    }} else if ({k}u >= skipped && !fresh) {{
        in_{k} = state[old_states + (my_start - start + {k}u - skipped) * args.channels];
    }}
",
                self.input(&format!("(my_start - {back}u) * args.stride + channel"))
            )
        });
        weights.chain(inputs).collect()
    }

    /// Defines the result of an input, and forgets the oldest input.
    fn convolve(self, input: &str, result: &str) -> String {
        let last = self.taps - 1;
        let sum = (0..last).fold("0.0".to_owned(), |sum, k| format!("fma(weight_{k}, in_{k}, {sum})"));
        let sum = format!("fma(weight_{last}, {input}, {sum})");
        let result = match self.gated {
            true => format!("let {result} = {sum};\n"),
            false => format!("let {result} = silu({sum}, channel);\n"),
        };
        let moves = (0..last).map(|k| match k + 1 {
            next if next == last => format!("in_{k} = {input};\n"),
            next => format!("in_{k} = in_{next};\n"),
        });
        moves.fold(result, |text, line| text + &line)
    }

    /// The result of row `row`. `note` is told its input.
    fn row(self, note: &str) -> String {
        format!(
            "let input = {};
        {note}
        {}{}",
            self.input("(row * args.stride + channel)"),
            self.convolve("input", "result"),
            self.keep("row", "result")
        )
    }

    /// Stores the window.
    fn state(self) -> String {
        (0..self.taps - 1)
            .map(|k| {
                format!(
                    "if ({k}u >= skipped) {{ state[states + ({k}u - skipped) * args.channels] = in_{k}; }}\n"
                )
            })
            .collect()
    }
}
