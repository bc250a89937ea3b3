//! Matrix-vector products: WGSL for every format of weights.
//!
//! 32 lanes share an output: each takes a block of 32 columns at a time, and their sums are added
//! in one order. So an output does not depend on the rows that it is computed with.

use std::fmt::Write;

use super::Access;
use super::decode::{self, bytes, group, load, quad};
use crate::format::Format;

/// What the rows of the input are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Input {
    /// f32.
    Floats,
    /// Bytes with a scale for each block, as the kernel `quantize` leaves them.
    Bytes,
}

/// Where the rows of weights are, and what becomes of the sums.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Role {
    /// One matrix.
    Plain,
    /// One matrix of gates and ups, whose activation is the output.
    Gated,
    /// The gates and ups of the experts that a row chose.
    ExpertGated,
    /// From the experts' channels back: the weighted sum over a row's experts.
    ExpertDown,
}

/// How lanes add their sums.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Sum {
    /// Through workgroup memory.
    Shared,
    /// By the hardware's sum over subgroups of 32.
    Subgroup,
}

/// One compiled form of a product.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Product {
    pub format: Format,
    pub input: Input,
    pub role: Role,
    pub sum: Sum,
    /// Rows of input that are computed together.
    pub batch: usize,
}

/// Numbers of input rows that forms exist for, fewest first.
pub(crate) const BATCHES: [usize; 2] = [1, 4];

/// Lanes that share an output.
const LANES: usize = 32;
/// Outputs of 32 lanes.
const PER: usize = 2;
/// Threads of a workgroup.
const THREADS: usize = 128;
/// Outputs of a workgroup.
pub(crate) const OUTPUTS_PER_GROUP: usize = THREADS / LANES * PER;

/// The arguments, in this order; `first_column` and `stride`s of floats are in quads.
pub(super) const ARGUMENTS: &str = "
struct Args {
    blocks: u32, shift: u32, outputs: u32, flags: u32,
    rows: u32, x_row: u32, x_stride: u32, x_first: u32,
    out_row: u32, out_stride: u32, out_first: u32, activation: u32,
    alpha: f32, limit: f32, choices: u32, choice_stride: u32,
    choice_row: u32, bias_stride: u32,
}
var<immediate> args: Args;
";

pub(super) const ACTIVATE: &str = "
fn activate(gate: f32, up: f32) -> f32 {
    if (args.activation == 1u) {
        let inner = 0.7978845608 * fma(0.044715 * gate * gate, gate, gate);
        // tanh(x) = 1 - 2 / (e^2x + 1), which is right where e^2x is infinite.
        let tanh_inner = 1.0 - 2.0 / (exp(2.0 * inner) + 1.0);
        return 0.5 * gate * (1.0 + tanh_inner) * up;
    }
    if (args.activation == 2u) {
        let g = min(gate, args.limit);
        let u = clamp(up, -args.limit, args.limit);
        return g / (1.0 + exp(-args.alpha * g)) * (u + 1.0);
    }
    if (args.activation == 3u) { return up / (1.0 + exp(-gate)); }
    return gate / (1.0 + exp(-gate)) * up;
}
";

impl Product {
    /// True if the rows of weights come in pairs of a gate's and an up's.
    fn is_gated(self) -> bool {
        matches!(self.role, Role::Gated | Role::ExpertGated)
    }

    fn has_experts(self) -> bool {
        matches!(self.role, Role::ExpertGated | Role::ExpertDown)
    }

    pub fn bindings(self) -> Vec<Access> {
        // Weights, bias, input.
        let mut reads = decode::buffers(self.format) + 2;
        reads += usize::from(self.input == Input::Bytes);
        reads += if self.has_experts() { 2 } else { 0 };
        let mut all = vec![Access::Read; reads];
        all.push(Access::Write);
        all
    }

    fn declarations(self) -> String {
        let mut text = decode::declare(self.format, 0);
        let mut binding = decode::buffers(self.format);
        let mut declare = |kind: &str, name: &str, element: &str| {
            let line =
                format!("@group(0) @binding({binding}) var<storage, {kind}> {name}: array<{element}>;\n");
            binding += 1;
            line
        };
        text += &declare("read", "bias", "f32");
        match self.input {
            Input::Floats => text += &declare("read", "x", "vec4<f32>"),
            Input::Bytes => {
                text += &declare("read", "x", "vec4<u32>");
                text += &declare("read", "x_scales", "vec4<f32>");
            }
        }
        if self.has_experts() {
            text += &declare("read", "experts", "vec4<u32>");
            text += &declare("read", "choices", "f32");
        }
        text + &declare("read_write", "out", "f32")
    }

    /// Sums that a lane has.
    fn sums(self) -> usize {
        PER * self.batch * if self.is_gated() { 2 } else { 1 }
    }

    pub fn source(self) -> String {
        let sums = self.sums();
        let mut text = self.declarations();
        text += ARGUMENTS;
        if self.is_gated() {
            text += ACTIVATE;
        }
        text += &format!("var<workgroup> partial: array<f32, {}>;\n", THREADS * sums);
        text += &format!(
            "@compute @workgroup_size({THREADS})
fn main(@builtin(workgroup_id) id: vec3<u32>, @builtin(local_invocation_index) thread: u32) {{
    let lane = thread % {LANES}u;
    let warp = thread / {LANES}u;
    let first = (id.x * {}u + warp) * {PER}u;
",
            THREADS / LANES
        );
        for sum in 0..sums {
            text += &format!("var acc{sum} = 0.0;\n");
        }
        match self.role {
            Role::Plain | Role::Gated => {
                text += "let base = 0u;\nlet blocks = args.blocks;\nlet outputs = args.outputs;\n";
                text += &self.rows_of_input("args.x_row + min(id.y * BATCH + B, args.rows - 1u)");
                text += &self.accumulate("1.0");
            }
            Role::ExpertGated => {
                text += "let expert = u32(choices[(args.choice_row + id.z) * args.choice_stride + id.y]);
let entry = experts[expert];
let base = entry.x;
let blocks = args.blocks;
let outputs = entry.y;
";
                text += &self.rows_of_input("args.x_row + id.z");
                text += &self.accumulate("1.0");
            }
            Role::ExpertDown => {
                text += "let outputs = args.outputs;
for (var choice = 0u; choice < args.choices; choice++) {
let choice_at = (args.choice_row + id.z) * args.choice_stride + choice;
let expert = u32(choices[choice_at]);
let entry = experts[expert];
let weight = select(0.0, choices[choice_at + args.choices], entry.z == 1u);
let base = entry.x;
let blocks = select(0u, entry.y, entry.z == 1u);
";
                text += &self.rows_of_input("id.z * args.choices + choice");
                text += &self.accumulate("weight");
                text += "}\n";
            }
        }
        text += &self.add_lanes();
        text + &self.finish()
    }

    /// Names the rows of input. `BATCH` and `B` are put in.
    fn rows_of_input(self, row: &str) -> String {
        let mut text = String::new();
        for b in 0..self.batch {
            let row = row.replace("BATCH", &format!("{}u", self.batch)).replace('B', &format!("{b}u"));
            text += &match self.input {
                Input::Floats => format!("let x{b} = ({row}) * args.x_stride + args.x_first;\n"),
                Input::Bytes => format!("let x{b} = ({row}) * args.x_stride;\n"),
            };
        }
        text
    }

    /// The lanes' loop over blocks.
    fn accumulate(self, weight: &str) -> String {
        let mut text = String::new();
        let lines = if self.is_gated() { 2 * PER } else { PER };
        for line in 0..lines {
            // Outputs beyond the last one are computed as the last one, and not stored.
            let output = format!("min(first + {}u, max(outputs, 1u) - 1u)", line % PER);
            let up = if line < PER { "" } else { " + outputs" };
            text += &format!("let row{line} = base + ({output}{up}) * blocks;\n");
        }
        // Experts without channels here have no weights to read.
        let blocks =
            if self.role == Role::ExpertGated { "select(0u, blocks, outputs > 0u)" } else { "blocks" };
        text += &format!("let end = {blocks};\nfor (var b = lane; b < end; b += {LANES}u) {{\n");
        for line in 0..lines {
            text += &format!("let block{line} = row{line} + b;\n");
            text += &load(self.format, &format!("w{line}"), &format!("block{line}"));
            if self.format.has_scales() {
                for half in 0..=usize::from(self.format.halves) {
                    let group = group(self.format, &format!("block{line}"), half);
                    text += &format!("let s{line}_{half} = scale_of({group});\n");
                }
            }
        }
        for b in 0..self.batch {
            text += "{\n";
            text += &match self.input {
                Input::Floats => self.floats(b, lines, weight),
                Input::Bytes => self.bytes(b, lines, weight),
            };
            text += "}\n";
        }
        text + "}\n"
    }

    fn floats(self, b: usize, lines: usize, weight: &str) -> String {
        let mut text = String::new();
        for q in 0..8 {
            text += &format!("let v{q} = x[x{b} + b * 8u + {q}u];\n");
        }
        let halves = if self.format.halves { 2 } else { 1 };
        let quads = |half: usize| half * 8 / halves..(half + 1) * 8 / halves;
        if self.format.has_scales() {
            for half in 0..halves {
                let all: Vec<_> = quads(half).map(|q| format!("v{q}")).collect();
                text += &format!("let t{half} = dot({}, vec4<f32>(1.0));\n", all.join(" + "));
            }
        }
        for line in 0..lines {
            let acc = self.accumulator(line, b);
            for half in 0..halves {
                let products: Vec<_> = quads(half)
                    .map(|q| format!("dot({}, v{q})", quad(self.format, &format!("w{line}"), q)))
                    .collect();
                let sum = products.join(" + ");
                let s = format!("s{line}_{half}");
                let value = if self.format.has_scales() {
                    format!("fma({s}.x, {sum}, {s}.y * t{half})")
                } else {
                    sum
                };
                let _ = writeln!(text, "{acc} = fma({weight}, {value}, {acc});");
            }
        }
        text
    }

    fn bytes(self, b: usize, lines: usize, weight: &str) -> String {
        let mut text = format!(
            "let xs = x_scales[x{b} + b];\nlet v0 = x[(x{b} + b) * 2u];\nlet v1 = x[(x{b} + b) * 2u + 1u];\n"
        );
        let halves = if self.format.halves { 2 } else { 1 };
        for line in 0..lines {
            let acc = self.accumulator(line, b);
            for half in 0..halves {
                let products: Vec<_> = (half * 8 / halves..(half + 1) * 8 / halves)
                    .map(|q| {
                        let component = ["x", "y", "z", "w"][q % 4];
                        let levels = bytes(self.format, &format!("w{line}"), q);
                        format!("dot4I8Packed({levels}, v{}.{component})", q / 4)
                    })
                    .collect();
                let sum = products.join(" + ");
                let s = format!("s{line}_{half}");
                // The scale times the sum of the bytes, of the half or of the block.
                let t = if self.format.halves { ["xs.y", "xs.z"][half] } else { "(xs.y + xs.z)" };
                let value = format!("fma({s}.x * xs.x, f32({sum}), {s}.y * {t})");
                let _ = writeln!(text, "{acc} = fma({weight}, {value}, {acc});");
            }
        }
        text
    }

    fn accumulator(self, line: usize, b: usize) -> String {
        format!("acc{}", line * self.batch + b)
    }

    /// Adds the lanes' sums and leaves all of them at `partial[warp * SUMS * 32 + sum * 32]`.
    fn add_lanes(self) -> String {
        let sums = self.sums();
        let at = |sum: usize| format!("partial[(warp * {sums}u + {sum}u) * {LANES}u + lane]");
        let mut text = String::new();
        match self.sum {
            Sum::Subgroup => {
                for sum in 0..sums {
                    text += &format!("let all{sum} = subgroupAdd(acc{sum});\n");
                }
                text += "if (lane == 0u) {\n";
                for sum in 0..sums {
                    text += &format!("{} = all{sum};\n", at(sum));
                }
                text += "}\nworkgroupBarrier();\n";
            }
            Sum::Shared => {
                for sum in 0..sums {
                    text += &format!("{} = acc{sum};\n", at(sum));
                }
                text += &format!(
                    "workgroupBarrier();
for (var sum = thread; sum < {all}u; sum += {THREADS}u) {{
    var total = 0.0;
    for (var i = 0u; i < {LANES}u; i++) {{ total += partial[sum * {LANES}u + i]; }}
    partial[sum * {LANES}u] = total;
}}
workgroupBarrier();
",
                    all = sums * THREADS / LANES
                );
            }
        }
        text
    }

    /// Lane `i` of 32 stores the output `i % PER` of the row of input `i / PER`.
    fn finish(self) -> String {
        let (batch, sums) = (self.batch, self.sums());
        let mut text = format!(
            "let per = lane % {PER}u;
let b = lane / {PER}u;
let output = first + per;
if (b < {batch}u && output < outputs) {{
    let at = warp * {sums}u + per * {batch}u + b;
    var value = partial[at * {LANES}u];
"
        );
        let second = PER * batch;
        match self.role {
            Role::Plain => {
                text += "let row = id.y * BATCHu + b;
if (row < args.rows) {
    if ((args.flags & 1u) != 0u) { value += bias[args.bias_stride + output]; }
    let place = (args.out_row + row) * args.out_stride + args.out_first + output;
    if ((args.flags & 2u) != 0u) { value += out[place]; }
    out[place] = value;
}
";
            }
            Role::Gated => {
                text += &format!("var up = partial[(at + {second}u) * {LANES}u];\n");
                text += "let row = id.y * BATCHu + b;
if (row < args.rows) {
    if ((args.flags & 1u) != 0u) { value += bias[output]; up += bias[outputs + output]; }
    out[(args.out_row + row) * args.out_stride + output] = activate(value, up);
}
";
            }
            Role::ExpertGated => {
                text += &format!("var up = partial[(at + {second}u) * {LANES}u];\n");
                text += "if ((args.flags & 1u) != 0u) { value += bias[entry.z + output]; up += bias[entry.z + outputs + output]; }
out[(id.z * args.choices + id.y) * args.out_stride + output] = activate(value, up);
";
            }
            Role::ExpertDown => {
                text += "for (var choice = 0u; choice < args.choices; choice++) {
    let choice_at = (args.choice_row + id.z) * args.choice_stride + choice;
    let expert = u32(choices[choice_at]);
    if ((args.flags & 1u) != 0u && experts[expert].z == 1u) {
        value = fma(choices[choice_at + args.choices], bias[expert * args.bias_stride + output], value);
    }
}
let place = (args.out_row + id.z) * args.out_stride + output;
if ((args.flags & 2u) != 0u) { value += out[place]; }
out[place] = value;
";
            }
        }
        text.replace("BATCHu", &format!("{batch}u")) + "}\n}\n"
    }
}
