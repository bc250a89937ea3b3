//! Matrix-vector products: WGSL for every format of weights.
//!
//! 32 lanes share an output: each takes a block of 32 columns at a time, and their sums are added
//! in one order. So an output does not depend on the rows that it is computed with.

mod shape;

use std::fmt::Write;

use super::Access;
use super::decode::{self, bytes, group, load, quad};
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

    /// The lanes' loop over blocks: all weights of a turn are asked for before any is used.
    fn accumulate(self, weight: &str) -> String {
        let Shape { per, unroll, .. } = self.shape;
        let mut text = String::new();
        let lines = if self.is_gated() { 2 * per } else { per };
        for line in 0..lines {
            // Outputs beyond the last one are computed as the last one, and not stored.
            let output = format!("min(first + {}u, max(outputs, 1u) - 1u)", line % per);
            let up = if line < per { "" } else { " + outputs" };
            text += &format!("let row{line} = base + ({output}{up}) * blocks;\n");
        }
        // Experts without channels here have no weights to read.
        let blocks =
            if self.role == Role::ExpertGated { "select(0u, blocks, outputs > 0u)" } else { "blocks" };
        text += &format!(
            "let end = {blocks};\nfor (var turn = lane; turn < end; turn += {}u) {{\n",
            LANES * unroll
        );
        for u in 0..unroll {
            // Blocks beyond the last one are read as the last one, and not added.
            text += &match u {
                0 => "let b0 = turn;\n".to_owned(),
                _ => format!("let b{u} = min(turn + {}u, end - 1u);\n", LANES * u),
            };
            for line in 0..lines {
                text += &format!("let block{line}_{u} = row{line} + b{u};\n");
                text += &self.load_block(line, u);
            }
        }
        let add = |is_whole: bool| {
            let mut text = String::new();
            for u in 0..unroll {
                text += &match u {
                    _ if u == 0 || is_whole => "{\n".to_owned(),
                    _ => format!("if (turn + {}u < end) {{\n", LANES * u),
                };
                for b in 0..self.batch {
                    text += "{\n";
                    text += &match self.input {
                        Input::Floats => self.floats(u, b, lines, weight),
                        Input::Bytes | Input::Pairs => self.levels(u, b, lines, weight),
                    };
                    text += "}\n";
                }
                text += "}\n";
            }
            text
        };
        if unroll == 1 {
            return text + &add(true) + "}\n";
        }
        if self.leaves == Leaves::Nothing || unroll > 2 {
            return text + &add(false) + "}\n";
        }
        // Two blocks without a branch: compilers ask for the input of both before it is needed.
        // More blocks were slower on an H100.
        text + &format!(
            "if (turn - lane + {}u <= end) {{\n{}}} else {{\n{}}}\n}}\n",
            LANES * unroll,
            add(true),
            add(false)
        )
    }

    /// The lanes' loop over the blocks of all experts of a row, one behind the other.
    fn accumulate_choices(self) -> String {
        let Shape { per, unroll, .. } = self.shape;
        let width = if self.input == Input::Floats { "args.x_stride / 8u" } else { "args.x_stride" };
        let mut text = format!(
            "for (var i = thread; i < args.choices; i += {threads}u) {{
    let choice_at = (args.choice_row + id.z) * args.choice_stride + i;
    let entry = experts[u32(choices[choice_at])];
    chosen[i] = vec2<u32>(entry.x, select(0u, entry.y, entry.z == 1u));
    shares[i] = choices[choice_at + args.choices];
}}
workgroupBarrier();
let outputs = args.outputs;
let width = {width};
let end = args.choices * width;
",
            threads = self.shape.threads()
        );
        for line in 0..per {
            text += &format!("let output{line} = min(first + {line}u, max(outputs, 1u) - 1u);\n");
        }
        text += &format!("for (var turn = lane; turn < end; turn += {}u) {{\n", LANES * unroll);
        for u in 0..unroll {
            text += &format!(
                "let item{u} = min(turn + {}u, end - 1u);
let choice{u} = item{u} / width;
let b{u} = item{u} % width;
let chosen{u} = chosen[choice{u}];
",
                LANES * u
            );
            for line in 0..per {
                text += &format!(
                    "let block{line}_{u} = chosen{u}.x + output{line} * chosen{u}.y + min(b{u}, max(chosen{u}.y, 1u) - 1u);\n"
                );
                text += &self.load_block(line, u);
            }
        }
        for u in 0..unroll {
            text += &format!(
                "if (turn + {}u < end && b{u} < chosen{u}.y) {{
let weight = shares[choice{u}];
",
                LANES * u
            );
            text += &self.rows_of_input(&format!("id.z * args.choices + choice{u}"));
            text += &match self.input {
                Input::Floats => self.floats(u, 0, per, "weight"),
                Input::Bytes | Input::Pairs => self.levels(u, 0, per, "weight"),
            };
            text += "}\n";
        }
        text + "}\n"
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

    /// Asks for a block's weights and scales.
    fn load_block(self, line: usize, u: usize) -> String {
        let mut text = load(self.format, &format!("w{line}_{u}"), &format!("block{line}_{u}"));
        if self.format.has_scales() {
            for half in 0..self.halves() {
                let group = group(self.format, &format!("block{line}_{u}"), half);
                text += &format!("let s{line}_{u}_{half} = scale_of({group});\n");
            }
        }
        text
    }

    /// Groups of weights that a block touches.
    fn halves(self) -> usize {
        if self.format.halves { 2 } else { 1 }
    }

    /// The quads of one of these groups.
    fn quads(self, half: usize) -> std::ops::Range<usize> {
        half * 8 / self.halves()..(half + 1) * 8 / self.halves()
    }

    fn floats(self, u: usize, b: usize, lines: usize, weight: &str) -> String {
        let mut text = String::new();
        for q in 0..8 {
            text += &format!("let v{q} = x[x{b} + b{u} * 8u + {q}u];\n");
        }
        if self.format.has_scales() {
            for half in 0..self.halves() {
                let all: Vec<_> = self.quads(half).map(|q| format!("v{q}")).collect();
                text += &format!("let t{half} = dot({}, vec4<f32>(1.0));\n", all.join(" + "));
            }
        }
        for line in 0..lines {
            let acc = self.accumulator(line, b);
            for half in 0..self.halves() {
                let products: Vec<_> = self
                    .quads(half)
                    .map(|q| format!("dot({}, v{q})", quad(self.format, &format!("w{line}_{u}"), q)))
                    .collect();
                let sum = products.join(" + ");
                let s = format!("s{line}_{u}_{half}");
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

    fn levels(self, u: usize, b: usize, lines: usize, weight: &str) -> String {
        let planes = self.input.planes();
        let mut text = format!("let xs = x_scales[x{b} * 2u + b{u}];\n");
        if self.format.halves {
            text += &format!("let xh = x_scales[x{b} * 2u + args.x_stride + b{u}];\n");
        }
        for plane in 0..planes {
            text += &format!("let v{plane} = x[x{b} * {planes}u + {plane}u * args.x_stride + b{u}];\n");
        }
        for line in 0..lines {
            let acc = self.accumulator(line, b);
            for half in 0..self.halves() {
                // The planes of low bytes come after those of high ones.
                let dots = |first: usize| {
                    let of = |q: usize| {
                        let component = ["x", "y", "z", "w"][q % 4];
                        let levels = bytes(self.format, &format!("w{line}_{u}"), q);
                        format!("dot4I8Packed({levels}, v{}.{component})", first + q / 4)
                    };
                    self.quads(half).map(of).collect::<Vec<_>>().join(" + ")
                };
                let sum = match self.input {
                    Input::Pairs => format!("({}) * 256 + {}", dots(0), dots(2)),
                    _ => dots(0),
                };
                let s = format!("s{line}_{u}_{half}");
                // The scale times the sum of the levels, of the half or of the block.
                let t = if self.format.halves { ["xh.x", "xh.y"][half] } else { "xs.y" };
                let value = format!("fma({s}.x * xs.x, f32({sum}), {s}.y * {t})");
                let _ = writeln!(text, "{acc} = fma({weight}, {value}, {acc});");
            }
        }
        text
    }

    fn accumulator(self, line: usize, b: usize) -> String {
        format!("acc{}", line * self.batch + b)
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
