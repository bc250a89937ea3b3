//! How the lanes of a product add their sums, and what is done with the results.

use super::shape::LANES;
use super::{Leaves, Product, Role, Sum};
use crate::kernel::{Leaving, heads};

/// Squares of a norm's row that a lane loads before it multiplies.
const SQUARES: usize = 4;

/// Sums that pass through workgroup memory at a time.
const SHARED_SUMS: usize = 8;

impl Product {
    /// Outputs of the lanes that share them, over all rows.
    fn results(self) -> usize {
        self.shape.per * self.batch
    }

    /// Sums of products that a lane computes.
    fn products(self) -> usize {
        self.results() * if self.is_gated() { 2 } else { 1 }
    }

    /// Sums that a lane computes: those of products, then those of rows' squares.
    pub(super) fn sums(self) -> usize {
        self.products() + if self.adds_squares_itself() { self.batch } else { 0 }
    }

    /// Whether each set of 32 lanes adds the squares of all rows; otherwise each adds those of some
    /// rows.
    fn adds_squares_itself(self) -> bool {
        self.takes_norm() && !self.shares_squares()
    }

    fn shares_squares(self) -> bool {
        self.takes_norm() && self.sum == Sum::Subgroup && self.batch > 1
    }

    /// Workgroup memory and functions of this part.
    pub(super) fn memory_of_ends(self) -> String {
        let (threads, warps) = (self.shape.threads(), self.shape.warps);
        let mut text = String::new();
        if self.leaves != Leaves::Nothing {
            text += &Leaving {
                pairs: self.leaves == Leaves::Pairs,
                normed: self.leaves == Leaves::Normed,
                row_blocks: "(args.out_stride / 32u)",
                weight: "left_weight",
                subgroups: self.sum == Sum::Subgroup,
                ..Default::default()
            }
            .source();
            text += "var<private> left_weight: vec4<f32>;\n";
        }
        if self.sum == Sum::Shared {
            text +=
                &format!("var<workgroup> partial: array<f32, {}>;\n", threads * self.sums().min(SHARED_SUMS));
            if !self.adds_choices() {
                text += &format!("var<workgroup> totals: array<f32, {}>;\n", warps * self.sums());
            }
        }
        if self.shares_squares() {
            text += &format!("var<workgroup> row_squares: array<f32, {}>;\n", self.batch);
        }
        text
    }

    /// Whether values that exist are read before the product, if it is added to them.
    fn keeps_values(self) -> bool {
        self.leaves != Leaves::Nothing && matches!(self.role, Role::Plain | Role::ExpertDown)
    }

    /// Reads what the end of a product that stores levels needs, because it would wait for it
    /// there: the values that the product is added to, and the norm's weights.
    pub(super) fn ask_ends(self) -> String {
        let mut text = String::new();
        if self.keeps_values() {
            text += &format!(
                "var kept = 0.0;
if ((args.flags & 2u) != 0u) {{
    let output = min(first + lane / {}u, max(args.outputs, 1u) - 1u);
    kept = out[{}];
}}
",
                LANES / self.results(),
                self.place(&self.first_row())
            );
        }
        if self.leaves == Leaves::Normed {
            text += "left_weight = left_norm[group * 8u + min(thread, 7u)];\n";
        }
        text
    }

    /// Where `output` of a row is, in WGSL.
    fn place(self, row: &str) -> String {
        match self.role {
            Role::ExpertDown => "(args.out_row + id.z) * args.out_stride + output".to_owned(),
            _ => {
                format!("(args.out_row + {row}) * args.out_stride + args.out_first{} + output", heads::OUTPUT)
            }
        }
    }

    /// Names in WGSL of the rows whose squares a set of 32 lanes adds.
    fn rows_of_squares(self) -> Vec<String> {
        if self.shares_squares() {
            let turns = self.batch.div_ceil(self.shape.warps);
            (0..turns).map(|turn| format!("of_row{turn}")).collect()
        } else {
            (0..self.batch).map(|b| format!("x{b}")).collect()
        }
    }

    /// Loads the first squares of a norm's rows, if the input is a norm's. They arrive while the
    /// lanes multiply.
    pub(super) fn ask_squares(self) -> String {
        if !self.takes_norm() {
            return String::new();
        }
        let mut text = "let squares = select(0u, args.blocks, (args.flags & 4u) != 0u);\n".to_owned();
        for (turn, row) in self.rows_of_squares().iter().enumerate() {
            if self.shares_squares() {
                text += &format!(
                    "let {row} = (args.x_row + min({} + warp + {}u, args.rows - 1u)) * args.x_stride;
var squares{turn} = 0.0;
",
                    self.first_row(),
                    turn * self.shape.warps
                );
            }
            for i in 0..SQUARES {
                text += &format!(
                    "var square{turn}_{i} = 0.0;
if (lane + {at}u < squares) {{ square{turn}_{i} = x_squares[{row} + lane + {at}u]; }}
",
                    at = LANES * i
                );
            }
        }
        text
    }

    /// Adds these and the remaining squares.
    pub(super) fn add_squares(self) -> String {
        if !self.takes_norm() {
            return String::new();
        }
        let (products, mut first, mut others) = (self.products(), String::new(), String::new());
        let rows = self.rows_of_squares();
        let sum = |turn: usize| match self.shares_squares() {
            true => format!("squares{turn}"),
            false => format!("acc{}", products + turn),
        };
        for (turn, row) in rows.iter().enumerate() {
            let sum = sum(turn);
            for i in 0..SQUARES {
                first += &format!("{sum} += square{turn}_{i};\n");
            }
            others += &format!("{sum} += x_squares[{row} + i];\n");
        }
        let mut text = format!(
            "{first}for (var i = lane + {}u; i < squares; i += {LANES}u) {{\n{others}}}\n",
            LANES * SQUARES
        );
        if self.shares_squares() {
            for turn in 0..rows.len() {
                let sum = sum(turn);
                text += &add_over_lanes(LANES, &[sum], &format!("all_squares{turn}"));
                text += &format!(
                    "if (lane == 0u && warp + {at}u < {}u) {{ row_squares[warp + {at}u] = all_squares{turn}; }}\n",
                    self.batch,
                    at = turn * self.shape.warps
                );
            }
            text += "workgroupBarrier();\n";
        }
        text
    }

    /// Divides by the root of the mean square, if the input is a norm's.
    fn divide(self) -> String {
        if !self.takes_norm() {
            return String::new();
        }
        let square = match self.sum {
            Sum::Shared => format!("totals[warp * {}u + {}u + b]", self.sums(), self.products()),
            Sum::Subgroup if self.shares_squares() => "row_squares[b]".to_owned(),
            Sum::Subgroup => "square".to_owned(),
        };
        let up = if self.is_gated() { "up = up / root;" } else { "" };
        format!(
            "if ((args.flags & 4u) != 0u) {{
    let root = sqrt({square} / f32(args.norm_width) + args.norm_eps);
    value = value / root;
    {up}
}}
"
        )
    }

    /// Adds the lanes' sums, either to `totals[warp * SUMS + sum]`, or so that lanes hold results
    /// (gates and ups), with a name for as many results as there are lanes.
    pub(super) fn add_lanes(self) -> String {
        let (sums, lanes) = (self.sums(), self.shape.lanes);
        let of_turn = self.results().min(lanes);
        let mut text = String::new();
        match self.sum {
            Sum::Subgroup => {
                for first in (0..self.products()).step_by(of_turn) {
                    let names: Vec<_> = (first..first + of_turn).map(|sum| format!("acc{sum}")).collect();
                    text += &add_over_lanes(lanes, &names, &format!("all{first}"));
                }
                if self.adds_squares_itself() {
                    text += &add_over_lanes(lanes, &[format!("acc{}", self.products())], "square");
                }
            }
            Sum::Shared => {
                for first in (0..sums).step_by(SHARED_SUMS) {
                    let count = SHARED_SUMS.min(sums - first);
                    for i in 0..count {
                        text += &format!(
                            "partial[(warp * {count}u + {i}u) * {lanes}u + lane] = acc{};\n",
                            first + i
                        );
                    }
                    text += &format!(
                        "workgroupBarrier();
for (var sum = thread; sum < {all}u; sum += {threads}u) {{
    var total = 0.0;
    for (var i = 0u; i < {lanes}u; i++) {{ total += partial[sum * {lanes}u + i]; }}
    totals[sum / {count}u * {sums}u + {first}u + sum % {count}u] = total;
}}
workgroupBarrier();
",
                        all = count * self.shape.warps,
                        threads = self.shape.threads(),
                    );
                }
            }
        }
        text
    }

    /// Stores the results: as many as there are lanes by all lanes, fewer by every second, fourth,
    /// … lane.
    pub(super) fn finish(self) -> String {
        let (batch, results, sums) = (self.batch, self.results(), self.sums());
        let of_turn = results.min(self.shape.lanes);
        let lanes = self.shape.lanes / of_turn;
        let mut text = String::new();
        for turn in 0..results / of_turn {
            let take = |first: usize| match self.sum {
                Sum::Shared if !self.adds_choices() => {
                    format!("totals[warp * {sums}u + {first}u + result]")
                }
                _ => format!("all{}", first + turn * of_turn),
            };
            text += &format!(
                "{{
let result = lane / {lanes}u + {}u;
let line = result / {batch}u;
let b = result % {batch}u;
let output = first + line;
if (lane % {lanes}u == 0u && output < outputs) {{
var value = {};
",
                turn * of_turn,
                take(0)
            );
            if self.is_gated() {
                text += &format!("var up = {};\n", take(results));
            }
            text += &self.divide();
            text += &self.store();
            text += "}\n}\n";
        }
        text += &match (self.leaves, self.role) {
            (Leaves::Nothing, _) => String::new(),
            (_, Role::ExpertGated | Role::ExpertUp) => {
                "leave_levels(id.z * args.choices + id.y, group, thread);\n".to_owned()
            }
            (_, Role::ExpertDown) => "leave_levels(args.out_row + id.z, group, thread);\n".to_owned(),
            _ => format!("leave_levels(args.out_row + {}, group, thread);\n", self.first_row()),
        };
        text + "}\n"
    }

    /// Stores a result.
    fn store(self) -> String {
        let keep = match self.leaves {
            Leaves::Nothing => String::new(),
            _ => format!("left[warp * {}u + line] = value;\n", self.shape.per),
        };
        let row = format!("let row = {} + b;\nif (row < args.rows) {{\n", self.first_row());
        let before = if self.keeps_values() { "kept" } else { "out[place]" };
        let (begin, pair, end) = match self.shares_experts() {
            true => ("if (b < count) {\n", "sorted[first_place + b]", "}\n"),
            false => ("", "(id.z * args.choices + id.y)", ""),
        };
        match self.role {
            Role::Plain => format!(
                "{row}    if ((args.flags & 1u) != 0u) {{ value += bias[args.bias_stride + output]; }}
    let place = {};
    if ((args.flags & 2u) != 0u) {{ value += {before}; }}
    out[place] = value;
{keep}}}
",
                self.place("row")
            ),
            Role::Gated => format!(
                "{row}    if ((args.flags & 1u) != 0u) {{ value += bias[output]; up += bias[outputs + output]; }}
    value = activate(value, up);
    out[(args.out_row + row) * args.out_stride + output] = value;
{keep}}}
"
            ),
            Role::ExpertGated => format!(
                "{begin}if ((args.flags & 1u) != 0u) {{ value += bias[entry.z + output]; up += bias[entry.z + outputs + output]; }}
value = activate(value, up);
out[{pair} * args.out_stride + output] = value;
{keep}{end}"
            ),
            Role::ExpertUp => format!(
                "{begin}if ((args.flags & 1u) != 0u) {{ value += bias[entry.z + output]; }}
value = max(value, 0.0);
value = value * value;
out[{pair} * args.out_stride + output] = value;
{keep}{end}"
            ),
            Role::ExpertDown if self.shares_experts() => format!(
                "{begin}if ((args.flags & 1u) != 0u) {{ value += bias[entry.z + output]; }}
out[{pair} * args.out_stride + output] = value;
{end}"
            ),
            Role::ExpertDown => format!(
                "let place = {};
if ((args.flags & 2u) != 0u) {{ value += {before}; }}
out[place] = value;
{keep}",
                self.place("")
            ),
        }
    }
}

/// Adds each of 1, 2, 4, … `lanes` numbers over this many lanes. Afterwards the lanes from
/// `lanes / count * i` on hold sum `i` as `name`. A sum has the same bits for every count: of 32
/// lanes, those are added that are 16 apart, then 8, 4, 2 and 1.
pub(in crate::kernel) fn add_over_lanes(lanes: usize, numbers: &[String], name: &str) -> String {
    debug_assert!(numbers.len().is_power_of_two() && numbers.len() <= lanes, "halves of lanes share halves");
    let (mut numbers, mut text, mut apart) = (numbers.to_vec(), String::new(), lanes / 2);
    while apart > 0 {
        let count = numbers.len().div_ceil(2);
        let mut next = Vec::with_capacity(count);
        for i in 0..count {
            let sum = format!("{name}_{apart}_{i}");
            let (keep, give) = match numbers.len() {
                1 => (numbers[0].clone(), numbers[0].clone()),
                // The upper lanes keep the upper half of the numbers.
                _ => {
                    let (low, high) = (&numbers[i], &numbers[i + count]);
                    let is_upper = format!("(lane & {apart}u) != 0u");
                    (
                        format!("select({low}, {high}, {is_upper})"),
                        format!("select({high}, {low}, {is_upper})"),
                    )
                }
            };
            text += &format!("let {sum} = {keep} + subgroupShuffleXor({give}, {apart}u);\n");
            next.push(sum);
        }
        (numbers, apart) = (next, apart / 2);
    }
    text + &format!("let {name} = {};\n", numbers[0])
}
