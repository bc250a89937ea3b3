//! Sums over the experts that a row chose.
//!
//! Lanes first add an expert's product, then the products of a row's experts in the order of the
//! choices. So rows that share an expert's weights can compute its product, with the same bits.

use super::shape::{EXPERT_LANES, FEW_CHOICES, LANES};
use super::{Product, Role, Shape, Sum};

/// Maximum experts of a row, including the shared one.
const MAX_CHOICES: usize = 65;

/// Experts whose products are computed at a time.
const TOGETHER: usize = LANES / EXPERT_LANES;

/// With fewer choices than [`FEW_CHOICES`], each has a power of two of lanes.
const _: () = assert!(FEW_CHOICES == 3 && LANES.is_power_of_two());

impl Product {
    /// Whether it adds the products of all experts of a row.
    pub(super) fn adds_choices(self) -> bool {
        self.role == Role::ExpertDown && !self.shares_experts()
    }

    pub(super) fn memory_of_choices(self) -> String {
        if !self.adds_choices() {
            return String::new();
        }
        format!(
            "// Of each choice: the first block, the blocks of a row, the first bias, and whether the expert is
// in this set.
var<workgroup> chosen: array<vec4<u32>, {MAX_CHOICES}>;
var<workgroup> shares: array<f32, {MAX_CHOICES}>;
"
        )
    }

    /// The loop over a row's experts. Afterwards, lanes hold results as `all0`.
    pub(super) fn add_choices(self) -> String {
        let Shape { per, unroll, .. } = self.shape;
        let mut text = format!(
            "for (var i = thread; i < args.choices; i += {threads}u) {{
    let choice_at = (args.choice_row + id.z) * args.choice_stride + i;
    let entry = experts[u32(choices[choice_at])];
    chosen[i] = vec4<u32>(entry.x, select(0u, entry.y, entry.w == 1u), entry.zw);
    shares[i] = choices[choice_at + args.choices];
}}
workgroupBarrier();
let outputs = args.outputs;
// Lanes of an expert.
let span = select({EXPERT_LANES}u, {LANES}u / max(args.choices, 1u), args.choices < {FEW_CHOICES}u);
let together = {LANES}u / span;
",
            threads = self.shape.threads()
        );
        for line in 0..per {
            text += &format!(
                "let output{line} = min(first + {line}u, max(outputs, 1u) - 1u);\nvar total{line} = 0.0;\n"
            );
        }
        text += "for (var choice = 0u; choice < args.choices; choice += together) {
let own = choice + lane / span;
let of_own = chosen[min(own, args.choices - 1u)];
let blocks = select(0u, of_own.y, own < args.choices);
";
        text += &self.rows_of_input("id.z * args.choices + min(own, args.choices - 1u)");
        for line in 0..per {
            text += &format!("let row{line} = of_own.x + output{line} * of_own.y;\nacc{line} = 0.0;\n");
        }
        text += &format!("for (var turn = lane % span; turn < blocks; turn += {unroll}u * span) {{\n");
        for u in 0..unroll {
            text += &format!("let b{u} = min(turn + {u}u * span, blocks - 1u);\n");
            for line in 0..per {
                text += &format!("let block{line}_{u} = row{line} + b{u};\n{}", self.load_block(line, u));
            }
        }
        for u in 0..unroll {
            text += &format!("if (turn + {u}u * span < blocks) {{\n{}", self.unpack(u, per));
            text += &self.multiply(u, 0, per);
            text += "}\n";
        }
        text += "}\n";
        text += &match self.sum {
            Sum::Subgroup => self.add_products(),
            Sum::Shared => self.add_shared_products(),
        };
        text += "}\nvar all0 = total0;\n";
        for line in 1..per {
            text += &format!("if (lane / {}u == {line}u) {{ all0 = total{line}; }}\n", LANES / per);
        }
        text
    }

    /// Adds the products of the experts from `choice` on, by the hardware's exchange of lanes. The
    /// order is that of [`super::add_over_lanes`].
    fn add_products(self) -> String {
        let mut text = String::new();
        let lines = 0..self.shape.per;
        let mut apart = LANES / 2;
        while apart > 0 {
            let add = |line| format!("acc{line} += subgroupShuffleXor(acc{line}, {apart}u);\n");
            let all: String = lines.clone().map(add).collect();
            text += &if apart < EXPERT_LANES { all } else { format!("if (span > {apart}u) {{\n{all}}}\n") };
            apart /= 2;
        }
        for i in 0..TOGETHER {
            for line in lines.clone() {
                text +=
                    &format!("var product{line}_{i} = subgroupShuffle(acc{line}, {i}u * span % {LANES}u);\n");
            }
        }
        for i in 0..TOGETHER {
            text += &format!("if ({i}u < together && choice + {i}u < args.choices) {{\n");
            let add = |line| add_product(&format!("product{line}_{i}"), line, &format!("{i}u"));
            text.extend(lines.clone().map(add));
            text += "}\n";
        }
        text
    }

    /// The same through workgroup memory.
    fn add_shared_products(self) -> String {
        let mut text = String::new();
        let place = |line| format!("(warp * {}u + {line}u) * {LANES}u", self.shape.per);
        for line in 0..self.shape.per {
            text += &format!("partial[{} + lane] = acc{line};\n", place(line));
        }
        text += "workgroupBarrier();\nfor (var i = 0u; i < min(together, args.choices - choice); i++) {\n";
        for line in 0..self.shape.per {
            text += &format!(
                "var product{line} = 0.0;
for (var j = 0u; j < span; j++) {{ product{line} += partial[{} + i * span + j]; }}
{}",
                place(line),
                add_product(&format!("product{line}"), line, "i")
            );
        }
        text + "}\nworkgroupBarrier();\n"
    }
}

/// Adds the product of expert `choice + i`, with its bias, to a row's total.
fn add_product(product: &str, line: usize, i: &str) -> String {
    format!(
        "{{
    let of_choice = chosen[choice + {i}];
    if ((args.flags & 1u) != 0u && of_choice.w == 1u) {{ {product} += bias[of_choice.z + output{line}]; }}
    total{line} = fma(shares[choice + {i}], {product}, total{line});
}}
"
    )
}
