//! Products of prompts' rows by cooperative matrices: f16 factors, f32 sums.
//!
//! A workgroup computes a tile of rows and outputs. Rows (as [`super::Kernel::Halve`] stores them)
//! and weights go through workgroup memory as f16; the next columns are loaded while the current
//! ones are multiplied. An output adds its columns in order, 16 (or 8) at a time, so it depends
//! neither on the other rows nor on the tile's shape.
//!
//! What NVIDIA's compiler makes of the text decides its speed (`docs/lab/2026-11-27-matrices.md`):
//! a condition around the loads makes it wait for them at once, and an unrolled loop takes more
//! registers.

mod finish;

use super::Access;
use super::product::ACTIVATE;
use super::{decode, heads, pairs};
use crate::buffer::BLOCK_COLUMNS;
use crate::format::Format;

/// Lanes of a subgroup, which share the matrices.
const LANES: usize = 32;

/// How workgroups divide a product.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Shape {
    /// For many rows.
    Large,
    /// For few rows.
    Small,
    /// For rows that many experts share.
    Middle,
    /// For matrices of 8 columns, as on Metal.
    Eights,
}

/// A workgroup's part of a product.
#[derive(Clone, Copy)]
pub(crate) struct Tile {
    /// Side of the hardware's matrices: 16, or 8 on Metal.
    pub side: usize,
    /// Rows of input.
    pub rows: usize,
    /// Rows of weights: outputs, or their gates and ups.
    pub lines: usize,
    /// Columns in workgroup memory at a time: blocks of 32.
    depth: usize,
    /// Number of subgroups, over the tile's rows and over its lines.
    subgroups: [usize; 2],
}

impl Shape {
    /// The shapes for many and for few rows, for matrices of this side.
    pub const fn of_side(side: usize) -> [Self; 2] {
        if side == 16 { [Self::Large, Self::Small] } else { [Self::Eights, Self::Eights] }
    }

    /// The best of 100 on an H200: `docs/lab/2026-11-27-matrices.md`.
    pub const fn tile(self) -> Tile {
        match self {
            Self::Large => Tile { side: 16, rows: 128, lines: 128, depth: 64, subgroups: [2, 4] },
            Self::Small => Tile { side: 16, rows: 32, lines: 128, depth: 64, subgroups: [1, 4] },
            // Two of these run on a multiprocessor of NVIDIA's, of the others one.
            Self::Middle => Tile { side: 16, rows: 64, lines: 128, depth: 32, subgroups: [2, 2] },
            Self::Eights => Tile { side: 8, rows: 64, lines: 64, depth: 32, subgroups: [2, 2] },
        }
    }
}

impl Tile {
    const fn threads(self) -> usize {
        self.subgroups[0] * self.subgroups[1] * LANES
    }

    /// Matrices of a subgroup, over rows and over lines.
    const fn matrices(self) -> [usize; 2] {
        [self.rows / self.subgroups[0] / self.side, self.lines / self.subgroups[1] / self.side]
    }

    /// Columns in one element of a tile's array. Vulkan loads matrices from vectors twice as fast;
    /// Metal loads them from scalars only.
    const fn unit(self) -> usize {
        if self.side == 16 { 4 } else { 1 }
    }

    /// Array elements between two rows of a tile. 16 bytes more than the columns need, so that rows
    /// begin in different banks.
    const fn pitch(self) -> usize {
        (self.depth + 8) / self.unit()
    }
}

/// One compiled form.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Matrices {
    pub format: Format,
    pub shape: Shape,
    /// Weights are gates and ups, and the output is their activation.
    pub gated: bool,
    /// Rows are pairs of a row and one of its experts. Each tile has pairs of one expert.
    pub pairs: bool,
}

/// Columns of input rows are padded to a multiple of this.
pub(crate) const PADDED_COLUMNS: usize = 64;

/// The arguments of products of prompts' rows; distances of input rows are in quads.
pub(super) const ARGUMENTS: &str = "
struct Args {
    blocks: u32, shift: u32, outputs: u32, flags: u32,
    rows: u32, x_row: u32, x_stride: u32, out_row: u32,
    out_stride: u32, out_first: u32, bias_first: u32, activation: u32,
    alpha: f32, limit: f32, factor: f32, inverse: f32,
    places: u32, of_row: u32, x_of_head: u32,
}
var<immediate> args: Args;
";

impl Matrices {
    pub const fn tile(self) -> Tile {
        self.shape.tile()
    }

    pub fn bindings(self) -> Vec<Access> {
        // Weights, bias, rows and their scales; with pairs also the tiles of pairs and a table of
        // experts.
        let count = decode::buffers(self.format) + if self.pairs { 5 } else { 3 };
        let mut all = vec![Access::Read; count];
        all.push(Access::Write);
        all
    }

    /// Outputs of a workgroup.
    pub fn outputs(self) -> usize {
        let lines = self.tile().lines;
        if self.gated { lines / 2 } else { lines }
    }

    pub fn source(self) -> String {
        let Tile { side, rows, lines, subgroups, .. } = self.tile();
        let (threads, outputs) = (self.tile().threads(), self.outputs());
        let [high, wide] = self.tile().matrices();
        let first = decode::buffers(self.format);
        let element = if self.tile().unit() == 4 { "vec4<f16>" } else { "f16" };
        let mut text = format!(
            "enable f16;
enable wgpu_cooperative_matrix;
{}@group(0) @binding({first}) var<storage, read> bias: array<f32>;
@group(0) @binding({}) var<storage, read> x: array<vec4<f16>>;
@group(0) @binding({}) var<storage, read> x_scales: array<f32>;
{}@group(0) @binding({}) var<storage, read_write> out: array<vec4<f32>>;
{ARGUMENTS}{}
var<workgroup> rows_tile: array<{element}, {}>;
var<workgroup> lines_tile: array<{element}, {}>;
var<workgroup> sums: array<f32, {}>;
",
            decode::declare(self.format, 0),
            first + 1,
            first + 2,
            if self.pairs { pairs::declare(first + 3) } else { String::new() },
            first + if self.pairs { 5 } else { 3 },
            if self.gated { ACTIVATE } else { "" },
            rows * self.tile().pitch(),
            lines * self.tile().pitch(),
            threads / LANES * side * side,
        );
        text += &format!(
            "@compute @workgroup_size({threads})
fn main(@builtin(workgroup_id) id: vec3<u32>, @builtin(local_invocation_index) thread: u32) {{
{begin}    let first_output = id.y * {outputs}u;
    let lane = thread % {LANES}u;
    let subgroup = thread / {LANES}u;
    let my_rows = subgroup % {}u * {}u;
    let my_lines = subgroup / {}u * {}u;
    let my_outputs = subgroup / {}u * {}u;
    let my_sums = subgroup * {}u;
",
            subgroups[0],
            high * side,
            subgroups[0],
            wide * side,
            subgroups[0],
            outputs / subgroups[1],
            side * side,
            begin = self.begin(),
        );
        for (i, j) in both(high, wide) {
            text += &format!("var c_{i}_{j} = coop_mat{side}x{side}<f32, C>();\n");
        }
        let depth = self.tile().depth;
        text += &self.declare_loads();
        text += &format!(
            "let steps = (args.blocks + {}u) / {}u;
if (steps > 0u) {{
let at = 0u;
{fetch}}}
for (var step = 0u; step < steps; step++) {{
{put}workgroupBarrier();
{{
let at = min(step + 1u, steps - 1u);
{fetch}}}
{multiply}workgroupBarrier();
}}
",
            depth / BLOCK_COLUMNS - 1,
            depth / BLOCK_COLUMNS,
            fetch = self.fetch(),
            put = self.put(),
            multiply = self.multiply(),
        );
        text + &self.finish() + "}\n"
    }

    /// The tile's rows.
    fn begin(self) -> String {
        match self.pairs {
            false => heads::begin(self.tile().rows),
            true => pairs::BEGIN.to_owned(),
        }
    }

    /// Where row `row` of the product is read from.
    fn source_row(self, row: &str) -> String {
        if self.pairs { pairs::source_row(row) } else { row.to_owned() }
    }

    /// How many quads of rows and how many blocks of weights a thread loads at a time, and whether
    /// all threads load weights.
    fn loads(self) -> ([usize; 2], bool) {
        let Tile { rows, lines, depth, .. } = self.tile();
        let (quads, blocks) = (rows * depth / 4, lines * depth / BLOCK_COLUMNS);
        let threads = self.tile().threads();
        debug_assert!(quads.is_multiple_of(threads), "{quads} loads by {threads} threads");
        ([quads / threads, blocks.div_ceil(threads)], blocks >= threads)
    }

    /// The places from which a thread loads, and variables for the loaded values.
    fn declare_loads(self) -> String {
        let Tile { depth, subgroups, lines, .. } = self.tile();
        let ([quads, blocks], _) = self.loads();
        let threads = self.tile().threads();
        let mut text = String::new();
        for i in 0..quads {
            text += &format!(
                "let slot_x{i} = thread + {}u;
let row_x{i} = args.x_row + {};
let from_x{i} = row_x{i} * args.x_stride{head} + slot_x{i} % {per}u;
let to_x{i} = slot_x{i} / {per}u * {}u + slot_x{i} % {per}u * {}u;
var x{i}: vec4<f16>;
",
                i * threads,
                self.source_row(&format!("min(first_row + slot_x{i} / {}u, count - 1u)", depth / 4)),
                self.tile().pitch(),
                4 / self.tile().unit(),
                per = depth / 4,
                head = if self.pairs { "" } else { heads::INPUT },
            );
        }
        // Each subgroup has both gates and ups of its outputs.
        let share = lines / subgroups[1];
        for i in 0..blocks {
            let slot = format!("min(thread + {}u, {}u)", i * threads, lines * depth / BLOCK_COLUMNS - 1);
            text += &format!(
                "let slot_w{i} = {slot};
let line_w{i} = slot_w{i} / {per}u;
let block_w{i} = slot_w{i} % {per}u;
let to_w{i} = line_w{i} * {}u + block_w{i} * {}u;
",
                self.tile().pitch(),
                BLOCK_COLUMNS / self.tile().unit(),
                per = depth / BLOCK_COLUMNS,
            );
            // Outputs after the last one are computed like the last one, and not stored.
            text += &match self.gated {
                false => format!("let row_w{i} = min(first_output + line_w{i}, args.outputs - 1u);\n"),
                true => format!(
                    "let output_w{i} = first_output + line_w{i} / {share}u * {half}u + line_w{i} % {half}u;
let row_w{i} = min(output_w{i}, args.outputs - 1u) + line_w{i} % {share}u / {half}u * args.outputs;
",
                    half = share / 2,
                ),
            };
            text += &format!("let from_w{i} = base + row_w{i} * args.blocks;\n");
            text += &decode::variables(self.format, &format!("w{i}"));
        }
        text
    }

    /// Loads the columns of step `at` into variables.
    fn fetch(self) -> String {
        let ([quads, blocks], _) = self.loads();
        let depth = self.tile().depth;
        let mut text = String::new();
        for i in 0..quads {
            text += &format!("x{i} = x[from_x{i} + at * {}u];\n", depth / 4);
        }
        for i in 0..blocks {
            // After the last block, rows are zero, so the weights do not matter.
            text += &format!(
                "let b{i} = from_w{i} + min(at * {}u + block_w{i}, args.blocks - 1u);\n",
                depth / BLOCK_COLUMNS
            );
            text += &decode::fetch(self.format, &format!("w{i}"), &format!("b{i}"));
        }
        text
    }

    /// Stores the loaded values as f16 in workgroup memory.
    fn put(self) -> String {
        let ([quads, blocks], all) = self.loads();
        let mut text = String::new();
        for i in 0..quads {
            text += &self.store("rows_tile", &format!("to_x{i}"), 0, &format!("x{i}"));
        }
        for i in 0..blocks {
            let name = format!("w{i}");
            text += if all { "{\n" } else { "if (thread == slot_w0) {\n" };
            text += &decode::scales(self.format, &name, "args.factor");
            for quad in 0..BLOCK_COLUMNS / 4 {
                let value = decode::weights(self.format, &name, quad, "args.factor");
                text += &format!("let {name}_f16_{quad} = vec4<f16>({value});\n");
                text += &self.store("lines_tile", &format!("to_w{i}"), quad, &format!("{name}_f16_{quad}"));
            }
            text += "}\n";
        }
        text
    }

    /// Stores four columns of a tile.
    fn store(self, tile: &str, at: &str, quad: usize, value: &str) -> String {
        if self.tile().unit() == 4 {
            return format!("{tile}[{at} + {quad}u] = {value};\n");
        }
        let store = |(i, c)| format!("{tile}[{at} + {}u] = {value}.{c};\n", 4 * quad + i);
        ["x", "y", "z", "w"].into_iter().enumerate().map(store).collect()
    }

    /// Multiplies the tiles in workgroup memory.
    fn multiply(self) -> String {
        let Tile { side, depth, .. } = self.tile();
        let [high, wide] = self.tile().matrices();
        let (pitch, unit) = (self.tile().pitch(), self.tile().unit());
        let at = |first: &str, matrix: usize| {
            format!("({first} + {}u) * {pitch}u + k * {}u", matrix * side, side / unit)
        };
        let mut text = format!("for (var k = 0u; k < {}u; k++) {{\n", depth / side);
        for i in 0..high {
            text += &format!(
                "let a_{i} = coopLoadT<coop_mat{side}x{side}<f16, A>>(&rows_tile[{}], {pitch}u);\n",
                at("my_rows", i)
            );
        }
        for j in 0..wide {
            text += &format!(
                "let b_{j} = coopLoad<coop_mat{side}x{side}<f16, B>>(&lines_tile[{}], {pitch}u);\n",
                at("my_lines", j)
            );
        }
        for (i, j) in both(high, wide) {
            text += &format!("c_{i}_{j} = coopMultiplyAdd(a_{i}, b_{j}, c_{i}_{j});\n");
        }
        text + "}\n"
    }
}

/// All pairs of numbers below `high` and `wide`.
pub(super) fn both(high: usize, wide: usize) -> impl Iterator<Item = (usize, usize)> {
    (0..high).flat_map(move |i| (0..wide).map(move |j| (i, j)))
}
