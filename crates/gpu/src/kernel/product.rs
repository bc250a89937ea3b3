//! Matrix-vector products: WGSL for every format of weights.
//!
//! 32 lanes share an output: each takes a block of 32 columns at a time, and their sums are added
//! in one order. So an output does not depend on the rows that it is computed with.

mod lanes;
mod shape;

use super::Access;
use super::decode;
use crate::format::Format;
use shape::LANES;
pub(crate) use shape::{BATCHES, Input, Leaves, Role, Shape, Sum};

/// Squares of a norm's row that a lane asks for before it multiplies.
const SQUARES: usize = 4;

/// Experts of a row at most, the shared one included.
const MAX_CHOICES: usize = 65;

/// One compiled form of a product.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Product {
    pub format: Format,
    pub input: Input,
    pub role: Role,
    pub sum: Sum,
    /// Rows of input that are computed together.
    pub batch: usize,
    pub shape: Shape,
    pub leaves: Leaves,
}

/// The arguments, in this order; `first_column` and `stride`s of floats are in quads.
pub(super) const ARGUMENTS: &str = "
struct Args {
    blocks: u32, shift: u32, outputs: u32, flags: u32,
    rows: u32, x_row: u32, x_stride: u32, x_first: u32,
    out_row: u32, out_stride: u32, out_first: u32, activation: u32,
    alpha: f32, limit: f32, choices: u32, choice_stride: u32,
    choice_row: u32, bias_stride: u32, norm_width: u32, norm_eps: f32,
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
    if (args.activation == 4u) {
        let g = min(gate, args.limit);
        return g / (1.0 + exp(-g)) * clamp(up, -args.limit, args.limit);
    }
    if (args.activation == 5u) {
        var u = up;
        if (args.limit > 0.0) { u = args.limit * (1.0 - 2.0 / (exp(2.0 * up / args.limit) + 1.0)); }
        let g = args.alpha * (1.0 - 2.0 / (exp(2.0 * gate / args.alpha) + 1.0));
        return g / (1.0 + exp(-gate)) * u;
    }
    return gate / (1.0 + exp(-gate)) * up;
}
";

impl Product {
    pub fn new(format: Format, input: Input, role: Role, sum: Sum, batch: usize) -> Self {
        let shape = Shape::of(format, input, role, sum, batch);
        Self { format, input, role, sum, batch, shape, leaves: Leaves::Nothing }
    }

    /// A product of one row at a time that leaves its outputs as levels too. A workgroup has a
    /// block of them.
    pub fn leaving(format: Format, input: Input, role: Role, sum: Sum, leaves: Leaves) -> Self {
        let shape = Shape::of_block(format, input, role, sum);
        Self { shape, leaves, ..Self::new(format, input, role, sum, BATCHES[0]) }
    }

    /// True if the input may be levels of rows times a norm's weights, not yet divided by the norm.
    pub fn takes_norm(self) -> bool {
        self.input.has_levels() && !self.has_experts()
    }

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
        reads += usize::from(self.input.has_levels()) + usize::from(self.takes_norm());
        reads += if self.has_experts() { 2 } else { 0 };
        let mut all = vec![Access::Read; reads];
        all.push(Access::Write);
        match self.leaves {
            Leaves::Nothing => {}
            Leaves::Bytes | Leaves::Pairs => all.extend([Access::Write; 2]),
            Leaves::Normed => all.extend([Access::Read, Access::Write, Access::Write, Access::Write]),
        }
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
            Input::Bytes | Input::Pairs => {
                text += &declare("read", "x", "vec4<u32>");
                text += &declare("read", "x_scales", "vec2<f32>");
            }
        }
        if self.takes_norm() {
            text += &declare("read", "x_squares", "f32");
        }
        if self.has_experts() {
            text += &declare("read", "experts", "vec4<u32>");
            text += &declare("read", "choices", "f32");
        }
        text += &declare("read_write", "out", "f32");
        if self.leaves == Leaves::Normed {
            text += &declare("read", "left_norm", "vec4<f32>");
        }
        if self.leaves != Leaves::Nothing {
            text += &declare("read_write", "levels_out", "u32");
            text += &declare("read_write", "scales_out", "vec2<f32>");
        }
        if self.leaves == Leaves::Normed {
            text += &declare("read_write", "squares_out", "f32");
        }
        text
    }

    /// Sums of products that a lane has.
    fn products(self) -> usize {
        self.shape.per * self.batch * if self.is_gated() { 2 } else { 1 }
    }

    /// All sums that a lane has: behind those of products, of each row's squares.
    fn sums(self) -> usize {
        self.products() + if self.takes_norm() { self.batch } else { 0 }
    }

    pub fn source(self) -> String {
        let sums = self.sums();
        let mut text = self.declarations();
        text += ARGUMENTS;
        if self.is_gated() {
            text += ACTIVATE;
        }
        let (pairs, normed) = (self.leaves == Leaves::Pairs, self.leaves == Leaves::Normed);
        if self.leaves != Leaves::Nothing {
            text += &super::Leaving {
                pairs,
                normed,
                row_blocks: "(args.out_stride / 32u)",
                ..Default::default()
            }
            .source();
        }
        let Shape { per, warps, .. } = self.shape;
        let threads = self.shape.threads();
        if self.sum == Sum::Shared {
            text += &format!("var<workgroup> partial: array<f32, {}>;\n", threads * sums);
        }
        if self.role == Role::ExpertDown {
            text += &format!(
                "var<workgroup> chosen: array<vec2<u32>, {MAX_CHOICES}>;
var<workgroup> shares: array<f32, {MAX_CHOICES}>;
"
            );
        }
        text += &format!(
            "@compute @workgroup_size({threads})
fn main(@builtin(workgroup_id) id: vec3<u32>, @builtin(local_invocation_index) thread: u32) {{
    let lane = thread % {LANES}u;
    let warp = thread / {LANES}u;
    let first = (id.x * {warps}u + warp) * {per}u;
"
        );
        for sum in 0..sums {
            text += &format!("var acc{sum} = 0.0;\n");
        }
        match self.role {
            Role::Plain | Role::Gated => {
                text += "let base = 0u;\nlet blocks = args.blocks;\nlet outputs = args.outputs;\n";
                text += &self.rows_of_input("args.x_row + min(id.y * BATCH + B, args.rows - 1u)");
                text += &self.ask_squares();
                text += &self.accumulate("1.0");
                text += &self.add_squares();
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
            Role::ExpertDown => text += &self.accumulate_choices(),
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
                Input::Bytes | Input::Pairs => format!("let x{b} = ({row}) * args.x_stride;\n"),
            };
        }
        text
    }

    /// Asks for the first squares of a norm's rows, where the input is a norm's: they arrive while
    /// the lanes multiply.
    fn ask_squares(self) -> String {
        if !self.takes_norm() {
            return String::new();
        }
        let mut text = "let squares = select(0u, args.blocks, (args.flags & 4u) != 0u);\n".to_owned();
        for b in 0..self.batch {
            for i in 0..SQUARES {
                text += &format!(
                    "var square{b}_{i} = 0.0;
if (lane + {at}u < squares) {{ square{b}_{i} = x_squares[x{b} + lane + {at}u]; }}
",
                    at = LANES * i
                );
            }
        }
        text
    }

    /// Adds them and the others.
    fn add_squares(self) -> String {
        if !self.takes_norm() {
            return String::new();
        }
        let (products, mut first, mut others) = (self.products(), String::new(), String::new());
        for b in 0..self.batch {
            let acc = format!("acc{}", products + b);
            for i in 0..SQUARES {
                first += &format!("{acc} += square{b}_{i};\n");
            }
            others += &format!("{acc} += x_squares[x{b} + i];\n");
        }
        format!(
            "{first}for (var i = lane + {}u; i < squares; i += {LANES}u) {{\n{others}}}\n",
            LANES * SQUARES
        )
    }

    /// Divides by the root of the mean square, where the input is a norm's.
    fn divide(self) -> String {
        if !self.takes_norm() {
            return String::new();
        }
        let (products, sums, batch) = (self.products(), self.sums(), self.batch);
        let mut text = match self.sum {
            Sum::Shared => {
                format!("let square = partial[(warp * {sums}u + {products}u + b) * {LANES}u];\n")
            }
            Sum::Subgroup => format!("var square = all{products};\n"),
        };
        for b in (1..batch).filter(|_| self.sum == Sum::Subgroup) {
            text += &format!("if (b == {b}u) {{ square = all{}; }}\n", products + b);
        }
        let up = if self.is_gated() { "up = up / root;" } else { "" };
        text + &format!(
            "if ((args.flags & 4u) != 0u) {{
    let root = sqrt(square / f32(args.norm_width) + args.norm_eps);
    value = value / root;
    {up}
}}
"
        )
    }

    /// Adds the lanes' sums: to `all0`, …, or to `partial[(warp * SUMS + sum) * 32]`.
    fn add_lanes(self) -> String {
        let sums = self.sums();
        let mut text = String::new();
        match self.sum {
            Sum::Subgroup => {
                for sum in 0..sums {
                    text += &format!("let all{sum} = subgroupAdd(acc{sum});\n");
                }
            }
            Sum::Shared => {
                for sum in 0..sums {
                    text += &format!("partial[(warp * {sums}u + {sum}u) * {LANES}u + lane] = acc{sum};\n");
                }
                text += &format!(
                    "workgroupBarrier();
for (var sum = thread; sum < {all}u; sum += {threads}u) {{
    var total = 0.0;
    for (var i = 0u; i < {LANES}u; i++) {{ total += partial[sum * {LANES}u + i]; }}
    partial[sum * {LANES}u] = total;
}}
workgroupBarrier();
",
                    all = sums * self.shape.warps,
                    threads = self.shape.threads(),
                );
            }
        }
        text
    }

    /// Takes the sums from `first` on, of the lane's output and row, as `name`.
    fn take(self, name: &str, first: usize) -> String {
        let (batch, sums, per) = (self.batch, self.sums(), self.shape.per);
        match self.sum {
            Sum::Shared => {
                format!(
                    "var {name} = partial[(warp * {sums}u + {first}u + per * {batch}u + b) * {LANES}u];\n"
                )
            }
            Sum::Subgroup => {
                let mut text = format!("var {name} = all{first};\n");
                for lane in 1..per * batch {
                    let sum = first + lane % per * batch + lane / per;
                    text += &format!("if (lane == {lane}u) {{ {name} = all{sum}; }}\n");
                }
                text
            }
        }
    }

    /// Lane `i` of 32 stores the output `i % per` of the row of input `i / per`.
    fn finish(self) -> String {
        let (batch, per) = (self.batch, self.shape.per);
        let mut text = format!(
            "let per = lane % {per}u;
let b = lane / {per}u;
let output = first + per;
if (b < {batch}u && output < outputs) {{
"
        );
        text += &self.take("value", 0);
        if self.is_gated() {
            text += &self.take("up", per * batch);
        }
        text += &self.divide();
        let keep = if self.leaves == Leaves::Nothing { "" } else { "left[warp * PERu + per] = value;\n" };
        match self.role {
            Role::Plain => {
                text += "let row = id.y * BATCHu + b;
if (row < args.rows) {
    if ((args.flags & 1u) != 0u) { value += bias[args.bias_stride + output]; }
    let place = (args.out_row + row) * args.out_stride + args.out_first + output;
    if ((args.flags & 2u) != 0u) { value += out[place]; }
    out[place] = value;
";
                text += keep;
                text += "}\n";
            }
            Role::Gated => {
                text += "let row = id.y * BATCHu + b;
if (row < args.rows) {
    if ((args.flags & 1u) != 0u) { value += bias[output]; up += bias[outputs + output]; }
    value = activate(value, up);
    out[(args.out_row + row) * args.out_stride + output] = value;
";
                text += keep;
                text += "}\n";
            }
            Role::ExpertGated => {
                text += "if ((args.flags & 1u) != 0u) { value += bias[entry.z + output]; up += bias[entry.z + outputs + output]; }
value = activate(value, up);
out[(id.z * args.choices + id.y) * args.out_stride + output] = value;
";
                text += keep;
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
        let leave = match (self.leaves, self.role) {
            (Leaves::Nothing, _) => "",
            (_, Role::ExpertGated) => "leave_levels(id.z * args.choices + id.y, id.x, thread);\n",
            _ => "leave_levels(args.out_row + id.y, id.x, thread);\n",
        };
        text.replace("BATCHu", &format!("{batch}u")).replace("PERu", &format!("{per}u"))
            + &format!("}}\n{leave}}}\n")
    }
}
