//! Products of several generated tokens' rows by cooperative matrices of bytes.
//!
//! Levels are multiplied as integers, so the sums of a block are exact. They are scaled and added
//! in the order in which the lanes of a [`Product`] add them, so a row has the bits that it has
//! alone. 32 lanes have each 32nd block, and their sums are added in pairs: lanes that are 16
//! apart, then 8, 4, 2 and one. Here a subgroup computes every fourth lane's sum, one lane after
//! the other, and the workgroup adds the sums of its four subgroups at the end.
//!
//! WGSL has neither matrices of bytes nor products by elements. The text is written with what it
//! has, and [`spirv`](crate::spirv) changes the translation.

mod ends;

use super::matrices::both;
use super::product::{ACTIVATE, ARGUMENTS, add_over_lanes};
use super::{Access, Input, Product, Role, Sum};
use super::{decode, heads};
use crate::format::Format;

/// Lanes of a subgroup, and those that share an output of a [`Product`].
const LANES: usize = 32;
/// Subgroups of a workgroup. Each has a class of a product's lanes: every fourth one.
const CLASSES: usize = 4;
const THREADS: usize = CLASSES * LANES;
/// Rows of weights of a workgroup: outputs, or their gates and ups.
const LINES: usize = 32;
/// Side of a matrix of sums.
const SIDE: usize = 16;
/// Matrices over lines.
const WIDE: usize = LINES / SIDE;
/// Vectors of 16 bytes in a matrix of sums.
const QUADS: usize = SIDE * SIDE / 4;
/// Vectors of 16 bytes between two blocks in workgroup memory: 32 bytes, and 16 so that blocks
/// begin in different banks.
const PITCH: usize = 3;
/// Vectors of 16 bytes after the blocks of a class, for the same reason.
const APART: usize = 2;
/// An H200 runs a few more workgroups than this at once, two on each multiprocessor. If there are
/// no more of 16 rows, those of 32 rows would leave multiprocessors idle.
const AT_ONCE: u32 = 256;
/// Blocks of a row and of a line that a thread loads before the first is used. Compilers wait for
/// all loads together, so both are loaded equally early.
const AHEAD: usize = 2;

/// One compiled form.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Batch {
    pub format: Format,
    /// [`Input::Bytes`] or [`Input::Pairs`].
    pub input: Input,
    /// Weights are gates and ups, and the output is their activation.
    pub gated: bool,
    /// Rows of input of a workgroup: 16 or 32.
    pub rows: usize,
}

impl Batch {
    /// The fastest form for this many outputs and rows on an H200:
    /// docs/lab/2026-11-29-matrices-of-bytes.md, docs/lab/2026-11-30-gpu.md.
    pub fn new(format: Format, input: Input, gated: bool, [outputs, rows]: [usize; 2]) -> Self {
        let [narrow, wide] = Self::all(format, input, gated);
        let [over_rows, over_outputs, _] = narrow.groups(outputs, rows);
        let are_few = input == Input::Pairs && over_rows * over_outputs <= AT_ONCE;
        if rows <= SIDE || are_few { narrow } else { wide }
    }

    /// Both forms: of 16 and of 32 rows.
    pub fn all(format: Format, input: Input, gated: bool) -> [Self; 2] {
        [SIDE, 2 * SIDE].map(|rows| Self { format, input, gated, rows })
    }

    /// Whether there is such a form. A block must have one scale.
    pub fn exists(format: Format, input: Input) -> bool {
        format.has_scales() && !format.halves && input.has_levels()
    }

    /// The product that must give the same bits.
    pub fn of_one_row(self) -> Product {
        let role = if self.gated { Role::Gated } else { Role::Plain };
        Product::new(self.format, self.input, role, Sum::Subgroup, 1)
    }

    pub fn bindings(self) -> Vec<Access> {
        // Weights, bias, levels, their scales and squares.
        let mut all = vec![Access::Read; decode::buffers(self.format) + 4];
        all.push(Access::Write);
        all
    }

    /// Outputs of a workgroup.
    pub fn outputs(self) -> usize {
        if self.gated { LINES / 2 } else { LINES }
    }

    /// Workgroups, in dispatch order: those that share weights are neighbours.
    pub fn groups(self, outputs: usize, rows: usize) -> [u32; 3] {
        [rows.div_ceil(self.rows), outputs.div_ceil(self.outputs()), 1].map(|count| count as u32)
    }

    /// How many of a matrix's rows a proof takes as one, so that lanes load more blocks than those
    /// ahead. `None`: it has too few rows to try more than one workgroup and all lines of one.
    pub fn rows_of_proof(self, lines: usize, blocks: usize) -> Option<usize> {
        let together = AHEAD * LANES / blocks + 1;
        let outputs = lines / together / if self.gated { 2 } else { 1 };
        (outputs > self.outputs()).then_some(together)
    }

    /// Matrices over rows.
    fn high(self) -> usize {
        self.rows / SIDE
    }

    /// Planes of bytes: of the levels, or of their high and their low bytes.
    fn planes(self) -> usize {
        self.input.planes() / 2
    }

    /// The first vector of a plane's rows in workgroup memory.
    fn first_rows(self, plane: usize) -> usize {
        plane * CLASSES * class_pitch(self.rows)
    }

    /// The first vector of the lines.
    fn first_lines(self) -> usize {
        self.first_rows(self.planes())
    }

    /// Where the rows' scales and scaled sums of levels are, and the lines' scales and offsets.
    fn factors(self) -> [usize; 4] {
        let [rows, lines] = [self.rows, LINES].map(|blocks| CLASSES * factor_pitch(blocks));
        [0, rows, 2 * rows, 2 * rows + lines]
    }

    pub fn source(self) -> String {
        let first = decode::buffers(self.format);
        let blocks = self.first_lines() + CLASSES * class_pitch(LINES);
        let mut text = format!(
            "enable wgpu_cooperative_matrix;
{}@group(0) @binding({first}) var<storage, read> bias: array<f32>;
@group(0) @binding({}) var<storage, read> x: array<vec4<u32>>;
@group(0) @binding({}) var<storage, read> x_scales: array<vec2<f32>>;
@group(0) @binding({}) var<storage, read> x_squares: array<f32>;
@group(0) @binding({}) var<storage, read_write> out: array<f32>;
{ARGUMENTS}{}
// Blocks of bytes, by their bits; at the end, sums.
var<workgroup> tile: array<vec4<f32>, {}>;
var<workgroup> factors: array<f32, {}>;
// The rows' squares, if they are a norm's.
var<workgroup> row_squares: array<f32, {rows}>;
@compute @workgroup_size({THREADS})
fn main(@builtin(workgroup_id) id: vec3<u32>, @builtin(local_invocation_index) thread: u32) {{
    let first_row = id.x * {rows}u;
    let first_output = id.y * {}u;
    let lane = thread % {LANES}u;
    let subgroup = thread / {LANES}u;
",
            decode::declare(self.format, 0),
            first + 1,
            first + 2,
            first + 3,
            first + 4,
            if self.gated { ACTIVATE } else { "" },
            blocks.max(CLASSES * WIDE * QUADS),
            2 * CLASSES * (factor_pitch(self.rows) + factor_pitch(LINES)),
            self.outputs(),
            rows = self.rows,
        );
        for (i, j) in both(self.high(), WIDE) {
            for name in ["sum", "one", "two", "four"] {
                text += &format!("var {name}_{i}_{j} = coop_mat{SIDE}x{SIDE}<f32, C>();\n");
            }
        }
        text += &self.places();
        text += &self.squares();
        text += &self.add_blocks();
        text + &self.finish() + "}\n"
    }

    /// The places from which a thread loads a row's and a line's blocks, and variables for what it
    /// loads. Neighbours have the classes' blocks, which are neighbours too.
    fn places(self) -> String {
        let place = |kind: &str, blocks: usize| {
            format!(
                "let slot_{kind} = min(thread / {CLASSES}u, {}u);
let to_{kind} = class_of * {}u + slot_{kind} * {PITCH}u;
let factor_{kind} = class_of * {}u + slot_{kind};
",
                blocks - 1,
                class_pitch(blocks),
                factor_pitch(blocks),
            )
        };
        let mut text = format!("let class_of = thread % {CLASSES}u;\n");
        text += &place("x", self.rows);
        text += &place("w", LINES);
        text += "let from_x = (args.x_row + min(first_row + slot_x, args.rows - 1u)) * args.x_stride;\n";
        // Outputs after the last one are computed like the last one, and not stored. Gates are in
        // the first matrix, ups in the second.
        text += &match self.gated {
            false => "let row_w = min(first_output + slot_w, args.outputs - 1u);\n".to_owned(),
            true => format!(
                "let row_w = min(first_output + slot_w % {SIDE}u, args.outputs - 1u) + slot_w / {SIDE}u * args.outputs;\n"
            ),
        };
        text += &format!("let from_w = {} + row_w * args.blocks;\n", heads::WEIGHTS);
        for d in 0..AHEAD {
            text += &decode::variables(self.format, &format!("w{d}"));
            text += &format!("var has_x{d}: bool;\nvar xs{d}: vec2<f32>;\n");
            for vector in 0..self.input.planes() {
                text += &format!("var x{d}_{vector}: vec4<u32>;\n");
            }
        }
        text
    }

    /// Adds the rows' squares, if the input is a norm's.
    fn squares(self) -> String {
        let of_subgroup = self.rows / CLASSES;
        let names: Vec<_> = (0..of_subgroup).map(|row| format!("square{row}")).collect();
        let mut text = "if ((args.flags & 4u) != 0u) {\n".to_owned();
        for (row, name) in names.iter().enumerate() {
            text += &format!(
                "let from_{name} = (args.x_row + min(first_row + subgroup * {of_subgroup}u + {row}u, args.rows - 1u)) * args.x_stride;
var {name} = 0.0;
"
            );
        }
        text += &format!("for (var i = lane; i < args.blocks; i += {LANES}u) {{\n");
        text.extend(names.iter().map(|name| format!("{name} += x_squares[from_{name} + i];\n")));
        text += "}\n";
        text += &add_over_lanes(LANES, &names, "square");
        text + &format!(
            "if (lane % {apart}u == 0u) {{ row_squares[subgroup * {of_subgroup}u + lane / {apart}u] = square; }}\n}}\n",
            apart = LANES / of_subgroup
        )
    }

    /// Adds the products of all blocks. A turn has one lane of each class.
    ///
    /// Nothing but an end of a loop comes between a load and its use: compilers move loads behind
    /// branches, where they are waited for at once.
    fn add_blocks(self) -> String {
        let mut text = format!(
            "// Each lane's blocks, with zeros after them so that they are a multiple of those loaded ahead.
let turns = ((args.blocks + {}u) / {LANES}u + {}u) / {AHEAD}u * {AHEAD}u;
var turn = 0u;
if (turns > 0u) {{
",
            LANES - 1,
            AHEAD - 1
        );
        for d in 0..AHEAD {
            text += &self.fetch(d, &format!("{d}u"));
        }
        text += &format!("}}\nfor (; turn < {}u; turn++) {{\n", LANES / CLASSES);
        text += &format!("for (var n = 0u; n < turns; n += {AHEAD}u) {{\n");
        for d in 0..AHEAD {
            text += &format!(
                "{{
{{
{}}}
workgroupBarrier();
{}{}workgroupBarrier();
}}
",
                self.put(d),
                self.fetch(d, &format!("n + {}u", d + AHEAD)),
                self.multiply(),
            );
        }
        text + &format!("}}\n{}}}\n", self.add_lanes())
    }

    /// Loads the thread's row and line in block `n` of this turn's lanes, or of the next turn's if
    /// they have no more.
    fn fetch(self, d: usize, n: &str) -> String {
        let vectors = self.input.planes();
        let mut text = format!(
            "{{
{}let block = min(at, args.blocks - 1u);
has_x{d} = at < args.blocks;
xs{d} = x_scales[from_x * 2u + block];
",
            block_at(n)
        );
        for vector in 0..vectors {
            text += &format!("x{d}_{vector} = x[from_x * {vectors}u + {vector}u * args.x_stride + block];\n");
        }
        text + &decode::fetch(self.format, &format!("w{d}"), "(from_w + block)") + "}\n"
    }

    /// Stores the loaded blocks in workgroup memory.
    fn put(self, d: usize) -> String {
        let [scale_x, sum_x, scale_w, offset_w] = self.factors();
        let name = format!("w{d}");
        let mut text = String::new();
        for vector in 0..self.input.planes() {
            let to = self.first_rows(vector / 2) + vector % 2;
            text += &format!("tile[to_x + {to}u] = bitcast<vec4<f32>>(x{d}_{vector});\n");
        }
        for half in 0..2 {
            let of_half = 4 * half..4 * half + 4;
            let words: Vec<_> = of_half.map(|quad| decode::bytes(self.format, &name, quad)).collect();
            text += &format!(
                "tile[to_w + {}u] = bitcast<vec4<f32>>(vec4<u32>({}));\n",
                self.first_lines() + half,
                words.join(", ")
            );
        }
        // Blocks after the last one add zeros.
        text + &format!(
            "let of_row = select(vec2<f32>(), xs{d}, has_x{d});
factors[factor_x + {scale_x}u] = of_row.x;
factors[factor_x + {sum_x}u] = of_row.y;
let of_line = scale_from({name}_stored0);
factors[factor_w + {scale_w}u] = of_line.x;
factors[factor_w + {offset_w}u] = of_line.y;
"
        )
    }

    /// Adds the products of the blocks in workgroup memory to the current lanes' sums.
    fn multiply(self) -> String {
        let [scale_x, sum_x, scale_w, offset_w] = self.factors();
        let load = |name: String, kind: &str, role: &str, from: String, stride: usize| {
            format!("let {name} = {kind}<coop_mat{SIDE}x{SIDE}<f32, {role}>>(&{from}, {stride}u);\n")
        };
        let blocks = |first: usize, all: usize, matrix: usize| {
            format!("tile[{}u + subgroup * {}u]", first + matrix * SIDE * PITCH, class_pitch(all))
        };
        // A stride of 0 gives each column of a row, or each row of a column, the same number.
        let factors = |first: usize, all: usize, matrix: usize| {
            format!("factors[{}u + subgroup * {}u]", first + matrix * SIDE, factor_pitch(all))
        };
        let mut text = String::new();
        for i in 0..self.high() {
            for plane in 0..self.planes() {
                let from = blocks(self.first_rows(plane), self.rows, i);
                text += &load(format!("a_{plane}_{i}"), "coopLoadT", "A", from, PITCH);
            }
            for (name, first) in [("scale_x", scale_x), ("sum_x", sum_x)] {
                text += &load(format!("{name}_{i}"), "coopLoad", "C", factors(first, self.rows, i), 0);
            }
        }
        for j in 0..WIDE {
            text += &load(format!("b_{j}"), "coopLoad", "B", blocks(self.first_lines(), LINES, j), PITCH);
            for (name, first) in [("scale_w", scale_w), ("offset_w", offset_w)] {
                text += &load(format!("{name}_{j}"), "coopLoadT", "C", factors(first, LINES, j), 0);
            }
        }
        for (i, j) in both(self.high(), WIDE) {
            let product = |plane: usize| {
                format!("coopMultiplyAdd(a_{plane}_{i}, b_{j}, coop_mat{SIDE}x{SIDE}<f32, C>())")
            };
            let dots = match self.input {
                // The planes of low bytes follow those of high bytes. Both sums are exact, and so
                // is that of high bytes times 256.
                Input::Pairs => format!("{} * 256.0 + {}", product(0), product(1)),
                _ => product(0),
            };
            // `-` stands for a product by elements: scales times dots, and offsets times sums.
            text += &format!(
                "let dots_{i}_{j} = {dots};
sum_{i}_{j} = sum_{i}_{j} + (((scale_w_{j} - scale_x_{i}) - dots_{i}_{j}) + (offset_w_{j} - sum_x_{i}));
"
            );
        }
        text
    }

    /// Adds the sum of a lane to those of other lanes, as soon as these are complete.
    fn add_lanes(self) -> String {
        let of_all = |line: &dyn Fn(&str) -> String| {
            both(self.high(), WIDE).map(|(i, j)| line(&format!("_{i}_{j}"))).collect::<String>()
        };
        let mut text = String::new();
        for (bit, name) in [(1, "one"), (2, "two"), (4, "four")] {
            text += &format!("if ((turn & {bit}u) == 0u) {{\n");
            text +=
                &of_all(&|at| format!("{name}{at} = sum{at};\nsum{at} = coop_mat{SIDE}x{SIDE}<f32, C>();\n"));
            text += "} else {\n";
            text += &of_all(&|at| format!("sum{at} = {name}{at} + sum{at};\n"));
        }
        text + "}\n}\n}\n"
    }
}

/// Vectors of workgroup memory that the blocks of a class take.
const fn class_pitch(blocks: usize) -> usize {
    blocks * PITCH + APART
}

/// Numbers between two classes' scales, so that each class's scales begin in another bank.
const fn factor_pitch(blocks: usize) -> usize {
    blocks.next_multiple_of(32) + 8
}

/// The block that a thread loads: its class's in block `n` of a turn's lanes. Turns follow in the
/// order in which the lanes' sums are added.
fn block_at(n: &str) -> String {
    format!(
        "let is_over = {n} >= turns;
let of_turn = select(turn, turn + 1u, is_over);
let of_class = (of_turn & 1u) * 4u + (of_turn & 2u) + (of_turn >> 2u & 1u);
let at = of_class * {CLASSES}u + select({n}, {n} - turns, is_over) * {LANES}u + class_of;
"
    )
}
