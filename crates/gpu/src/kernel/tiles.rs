//! Products of prompts' rows: a workgroup computes a tile of rows and outputs, and reads each block
//! of weights once for all of its rows.
//!
//! An output adds its columns in order, so it depends neither on the other rows nor on the tile's
//! shape.

use super::Access;
use super::decode::{self, group, load, quad};
use super::matrices::ARGUMENTS;
use super::product::ACTIVATE;
use super::{heads, pairs};
use crate::format::Format;

/// Rows of weights of a workgroup: outputs, or their gates and ups.
pub(crate) const TILE_LINES: usize = 64;

const THREADS: usize = 128;
/// Lines that a thread computes, and the distance of two of them.
const PER: usize = 4;
const APART: usize = TILE_LINES / PER;
/// Quads between two rows of a tile. The number is odd, so that threads read different banks.
const PITCH: usize = 9;

/// One compiled form.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Tiles {
    pub format: Format,
    /// Weights are gates and ups, and the output is their activation.
    pub gated: bool,
    /// Rows are pairs of a row and one of its experts. Each tile has pairs of one expert.
    pub pairs: bool,
    /// Tiles of few rows, for experts that few rows have chosen.
    pub few: bool,
}

impl Tiles {
    /// The form for prompts' rows.
    pub const fn of_rows(format: Format) -> Self {
        Self { format, gated: false, pairs: false, few: false }
    }

    /// The form for pairs of a row and one of its experts.
    pub const fn of_pairs(format: Format, gated: bool, few: bool) -> Self {
        Self { format, gated, pairs: true, few }
    }

    /// Every form for a format.
    #[cfg(test)]
    pub fn all(format: Format) -> impl Iterator<Item = Self> {
        let pairs = [(false, false), (false, true), (true, false), (true, true)];
        let pairs = pairs.map(|(gated, few)| Self::of_pairs(format, gated, few));
        [Self::of_rows(format)].into_iter().chain(pairs)
    }

    /// Rows that a thread computes.
    const fn per_thread(self) -> usize {
        if self.few { 1 } else { 4 }
    }

    /// Rows of a workgroup.
    pub const fn rows(self) -> usize {
        THREADS / APART * self.per_thread()
    }

    /// Outputs of a workgroup.
    pub const fn outputs(self) -> usize {
        if self.gated { TILE_LINES / 2 } else { TILE_LINES }
    }

    pub fn bindings(self) -> Vec<Access> {
        // Weights, bias, input; with pairs also the tiles of pairs and a table of experts.
        let mut all = vec![Access::Read; decode::buffers(self.format) + if self.pairs { 4 } else { 2 }];
        all.push(Access::Write);
        all
    }

    pub fn source(self) -> String {
        let (format, first) = (self.format, decode::buffers(self.format));
        let mut text = decode::declare(format, 0);
        text += &format!(
            "@group(0) @binding({first}) var<storage, read> bias: array<f32>;
@group(0) @binding({}) var<storage, read> x: array<vec4<f32>>;
{}@group(0) @binding({}) var<storage, read_write> out: array<f32>;
{ARGUMENTS}{}
var<workgroup> rows_tile: array<vec4<f32>, {}>;
var<workgroup> weights_tile: array<vec4<f32>, {}>;
@compute @workgroup_size({THREADS})
fn main(@builtin(workgroup_id) id: vec3<u32>, @builtin(local_invocation_index) thread: u32) {{
{}let first_output = id.y * {}u;
let my_rows = thread / {APART}u * {}u;
let my_lines = thread % {APART}u;
",
            first + 1,
            if self.pairs { pairs::declare(first + 2) } else { String::new() },
            first + if self.pairs { 4 } else { 2 },
            if self.gated { ACTIVATE } else { "" },
            self.rows() * PITCH,
            TILE_LINES * PITCH,
            self.begin(),
            self.outputs(),
            self.per_thread(),
        );
        for acc in 0..self.per_thread() * PER {
            text += &format!("var acc{acc} = 0.0;\n");
        }
        let slots = (self.rows() * 8).div_ceil(THREADS);
        for i in 0..slots {
            text += &format!(
                "let slot{i} = thread + {}u;
let from{i} = (args.x_row + {}) * args.x_stride{} + slot{i} % 8u;
let to{i} = slot{i} / 8u * {PITCH}u + slot{i} % 8u;
",
                i * THREADS,
                self.source_row(&format!("min(first_row + slot{i} / 8u, count - 1u)")),
                if self.pairs { "" } else { heads::INPUT },
            );
        }
        text += &format!(
            "let line = thread / 2u;
let weights_row = base + ({}) * args.blocks;
for (var b = 0u; b < args.blocks; b++) {{
",
            self.row_of_weights()
        );
        for i in 0..slots {
            let load = format!("rows_tile[to{i}] = x[from{i} + b * 8u];");
            // Few rows have less quads than there are threads.
            text += &match self.rows() * 8 < THREADS {
                true => format!("if (thread < {}u) {{ {load} }}\n", self.rows() * 8),
                false => load + "\n",
            };
        }
        text += "let block = weights_row + b;\n";
        text += &load(format, "w", "block");
        for half in 0..2 {
            text += if half == 0 { "if (thread % 2u == 0u) {\n" } else { "} else {\n" };
            if format.has_scales() {
                text += &format!("let s = scale_of({});\n", group(format, "block", half));
            }
            for q in half * 4..half * 4 + 4 {
                let value = quad(format, "w", q);
                let value = match format.has_scales() {
                    true => format!("fma(vec4<f32>(s.x), {value}, vec4<f32>(s.y))"),
                    false => value,
                };
                text += &format!("weights_tile[line * {PITCH}u + {q}u] = {value};\n");
            }
        }
        text += "}\nworkgroupBarrier();\nfor (var q = 0u; q < 8u; q++) {\n";
        for r in 0..self.per_thread() {
            text += &format!("let r{r} = rows_tile[(my_rows + {r}u) * {PITCH}u + q];\n");
        }
        for l in 0..PER {
            text += &format!("let l{l} = weights_tile[(my_lines + {}u) * {PITCH}u + q];\n", l * APART);
        }
        for (r, l) in (0..self.per_thread()).flat_map(|r| (0..PER).map(move |l| (r, l))) {
            text += &format!("acc{} += dot(r{r}, l{l});\n", r * PER + l);
        }
        text += "}\nworkgroupBarrier();\n}\n";
        for r in 0..self.per_thread() {
            text += &self.store_row(r);
        }
        text + "}\n"
    }

    /// The tile's rows.
    fn begin(self) -> String {
        match self.pairs {
            false => heads::begin(self.rows()),
            true => pairs::BEGIN.to_owned(),
        }
    }

    /// Where row `row` of the product is read from.
    fn source_row(self, row: &str) -> String {
        if self.pairs { pairs::source_row(row) } else { row.to_owned() }
    }

    /// The row of weights of line `line`. The upper half of a gated tile's lines are ups. Outputs
    /// after the last one are computed like the last one, and not stored.
    fn row_of_weights(self) -> String {
        match self.gated {
            false => "min(first_output + line, args.outputs - 1u)".to_owned(),
            true => format!(
                "min(first_output + line % {half}u, args.outputs - 1u) + line / {half}u * args.outputs",
                half = TILE_LINES / 2
            ),
        }
    }

    /// Stores the outputs of row `r` of a thread.
    fn store_row(self, r: usize) -> String {
        let row = format!("first_row + my_rows + {r}u");
        let place = if self.pairs { pairs::place(&row) } else { row.clone() };
        let mut text = format!(
            "if ({row} < count) {{
let first = (args.out_row + {place}) * args.out_stride + args.out_first{};
",
            if self.pairs { "" } else { heads::OUTPUT }
        );
        let (outputs, bias) = match (self.gated, self.pairs) {
            (true, _) => (PER / 2, pairs::FIRST_BIAS),
            (false, true) => (PER, pairs::FIRST_BIAS),
            (false, false) => (PER, "args.bias_first"),
        };
        for o in 0..outputs {
            let sum = |o: usize| format!("acc{}", r * PER + o);
            let value = match self.gated {
                false => format!(
                    "var value = {};
if ((args.flags & 1u) != 0u) {{ value += bias[{bias} + output]; }}
if ((args.flags & 2u) != 0u) {{ value += out[first + output]; }}
if ((args.flags & 4u) != 0u) {{ value = max(value, 0.0); value = value * value; }}
",
                    sum(o)
                ),
                true => format!(
                    "var gate = {};
var up = {};
if ((args.flags & 1u) != 0u) {{ gate += bias[{bias} + output]; up += bias[{bias} + args.outputs + output]; }}
let value = activate(gate, up);
",
                    sum(o),
                    sum(o + PER / 2)
                ),
            };
            text += &format!(
                "{{
let output = first_output + my_lines + {}u;
if (output < args.outputs) {{
{value}out[first + output] = value;
}}
}}
",
                o * APART
            );
        }
        text + "}\n"
    }
}
