//! Matrix-vector products: WGSL for every format of weights.
//!
//! 32 lanes share an output, fewer one of an expert's down projection ([`choices`]). Each takes a
//! block of 32 columns at a time, and their sums are added in a fixed order, so an output does not
//! depend on the rows that are computed with it. The rows share the weights that a lane has
//! unpacked.

mod choices;
mod choose;
mod ends;
mod lanes;
mod shape;

use super::Access;
use super::{decode, heads};
use crate::format::Format;
pub(crate) use choose::{CHOOSE_OUTPUTS, CHOOSE_ROWS, Choose};
pub(super) use ends::add_over_lanes;
pub(crate) use shape::{BATCHES, FEW_CHOICES, Input, Leaves, Role, Shape, Sum};

/// Maximum buffers of a kernel.
pub(super) const MOST_BUFFERS: usize = 12;

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
    x_of_head: u32,
}
var<immediate> args: Args;
";

pub(super) const ACTIVATE: &str = concat!(
    include_str!("gelu.wgsl"),
    "
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
    if (args.activation == 6u) { return gelu_of(gate) * up; }
    return gate / (1.0 + exp(-gate)) * up;
}
"
);

impl Product {
    pub fn new(format: Format, input: Input, role: Role, sum: Sum, batch: usize) -> Self {
        let shape = Shape::of(format, input, role, sum, batch);
        Self { format, input, role, sum, batch, shape, leaves: Leaves::Nothing }
    }

    /// This product, which also stores its outputs as levels. A workgroup computes a block of
    /// outputs.
    pub fn leaving(self, leaves: Leaves) -> Self {
        let shape = Shape::of_block(self.format, self.input, self.role, self.sum);
        Self { shape, leaves, ..self }
    }

    /// Whether outputs can be stored as levels, which needs one row at a time. With several rows,
    /// workgroups that compute a block of outputs cost as much as the kernel that rounds rows
    /// (docs/lab/2026-11-26-gpu.md).
    pub fn can_leave(self) -> bool {
        self.input.has_levels() && self.batch == BATCHES[0]
    }

    /// Whether all of its buffers can be bound.
    pub fn can_bind(self) -> bool {
        self.bindings().len() <= MOST_BUFFERS
    }

    /// The product of one row at a time. Every other form must give its bits.
    pub fn of_one_row(self) -> Self {
        Self::new(self.format, self.input, self.role, self.sum, BATCHES[0])
    }

    /// True if the input may be levels of rows that are multiplied with a norm's weights and not
    /// yet divided by the norm.
    pub fn takes_norm(self) -> bool {
        self.input.has_levels() && !self.has_experts()
    }

    fn is_gated(self) -> bool {
        self.role.is_gated()
    }

    fn has_experts(self) -> bool {
        self.role.is_of_each_expert() || self.role == Role::ExpertDown
    }

    /// Whether rows are pairs of a row and one of its experts, in the tiles of the kernel
    /// `sort_pairs`. The pairs of a tile share the expert's weights.
    pub fn shares_experts(self) -> bool {
        self.has_experts() && self.batch > 1
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
            text += &match self.shares_experts() {
                true => declare("read", "sorted", "u32"),
                false => declare("read", "choices", "f32"),
            };
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

    pub fn source(self) -> String {
        let mut text = self.declarations();
        text += ARGUMENTS;
        if self.is_gated() {
            text += ACTIVATE;
        }
        text += &self.memory_of_ends();
        let Shape { lanes, per, warps, .. } = self.shape;
        let threads = self.shape.threads();
        text += &self.memory_of_choices();
        // Workgroups that share weights are neighbours, so only one of them reads device memory.
        let group = if self.batch > 1 { "id.y;\nlet turn_of_rows = id.x" } else { "id.x" };
        text += &format!(
            "@compute @workgroup_size({threads})
fn main(@builtin(workgroup_id) id: vec3<u32>, @builtin(local_invocation_index) thread: u32) {{
    let lane = thread % {lanes}u;
    let warp = thread / {lanes}u;
    let group = {group};
    let first = (group * {warps}u + warp) * {per}u;
"
        );
        for sum in 0..self.sums() {
            text += &format!("var acc{sum} = 0.0;\n");
        }
        text += &self.ask_ends();
        match self.role {
            Role::Plain | Role::Gated => {
                text += "let blocks = args.blocks;
let outputs = args.outputs;
";
                text += &format!("let base = {};\n", heads::WEIGHTS);
                text += &self
                    .rows_of_input(&format!("args.x_row + min({} + B, args.rows - 1u)", self.first_row()));
                text += &self.ask_squares();
                text += &self.accumulate();
                text += &self.add_squares();
            }
            Role::ExpertGated | Role::ExpertUp | Role::ExpertDown if self.shares_experts() => {
                text += "let expert = sorted[id.x * 3u];
let first_place = args.choice_row + sorted[id.x * 3u + 1u];
let count = sorted[id.x * 3u + 2u];
if (count == 0u) { return; }
let entry = experts[expert];
let base = entry.x;
";
                text += match self.role {
                    Role::ExpertDown => "let blocks = entry.y;\nlet outputs = args.outputs;\n",
                    _ => "let blocks = args.blocks;\nlet outputs = entry.y;\n",
                };
                // Places after the last pair are computed like it, and not stored.
                let pair = "sorted[first_place + min(B, count - 1u)]";
                text += &match self.role {
                    Role::ExpertDown => self.rows_of_input(pair),
                    _ => self.rows_of_input(&format!("args.x_row + {pair} / args.choices")),
                };
                text += &self.accumulate();
            }
            Role::ExpertGated | Role::ExpertUp => {
                text += "let expert = u32(choices[(args.choice_row + id.z) * args.choice_stride + id.y]);
let entry = experts[expert];
let base = entry.x;
let blocks = args.blocks;
let outputs = entry.y;
";
                text += &self.rows_of_input("args.x_row + id.z");
                text += &self.accumulate();
            }
            Role::ExpertDown => text += &self.add_choices(),
        }
        if !self.adds_choices() {
            text += &self.add_lanes();
        }
        text + &self.finish()
    }

    /// Workgroups of a product with one matrix, in dispatch order.
    pub fn groups(self, outputs: usize, rows: usize) -> [u32; 3] {
        let groups = outputs.div_ceil(self.shape.outputs()) as u32;
        if self.batch > 1 { [rows.div_ceil(self.batch) as u32, groups, 1] } else { [groups, rows as u32, 1] }
    }

    /// The workgroup's first row in a product with one matrix, in WGSL.
    fn first_row(self) -> String {
        if self.batch > 1 { format!("turn_of_rows * {}u", self.batch) } else { "id.y".to_owned() }
    }

    /// Names the rows of input, with `B` replaced.
    fn rows_of_input(self, row: &str) -> String {
        let head = if self.has_experts() { "" } else { heads::INPUT };
        let mut text = String::new();
        for b in 0..self.batch {
            let row = row.replace('B', &format!("{b}u"));
            text += &match self.input {
                Input::Floats => format!("let x{b} = ({row}) * args.x_stride + args.x_first{head};\n"),
                Input::Bytes | Input::Pairs => format!("let x{b} = ({row}) * args.x_stride;\n"),
            };
        }
        text
    }
}
