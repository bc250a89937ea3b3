//! What becomes of the sums of a tile.

use super::{LANES, Matrices};
use crate::kernel::{heads, pairs};

impl Matrices {
    /// Scales the sums to the output's units, adds bias or previous values, and stores the results.
    /// Sums go through workgroup memory, because no thread knows which sums of a matrix it holds.
    /// A thread stores four outputs at a time. Those after the last one keep their values if
    /// results are added, and become zero otherwise.
    pub(super) fn finish(self) -> String {
        let side = self.tile().side;
        let [high, wide] = self.tile().matrices();
        let wide = if self.gated { wide / 2 } else { wide };
        let quads = side * side / 4;
        let mut text = String::new();
        for i in 0..high {
            text += "{\n";
            for e in 0..quads.div_ceil(LANES) {
                text += &format!(
                    "let quad{e} = lane + {}u;
let row{e} = first_row + my_rows + {}u + quad{e} / {per}u;
let safe{e} = min(row{e}, count - 1u);
let scale{e} = x_scales[args.x_row + {}] * args.inverse;
let first{e} = (args.out_row + {}) * args.out_stride + args.out_first{};
",
                    e * LANES,
                    i * side,
                    self.source_row(&format!("safe{e}")),
                    if self.pairs { pairs::place(&format!("safe{e}")) } else { format!("safe{e}") },
                    if self.pairs { "" } else { heads::OUTPUT },
                    per = side / 4,
                );
            }
            for j in 0..wide {
                text += "{\n";
                if self.gated {
                    text += &self.through(&format!("c_{i}_{j}"), "gate");
                    text += &self.through(&format!("c_{i}_{}", j + wide), "up");
                } else {
                    text += &self.through(&format!("c_{i}_{j}"), "sum");
                }
                for e in 0..quads.div_ceil(LANES) {
                    text += &self.store_quad(e, quads, j * side);
                }
                text += "}\n";
            }
            text += "}\n";
        }
        text
    }

    /// Stores a matrix of sums in workgroup memory, and defines a thread's quads of them.
    fn through(self, sums: &str, name: &str) -> String {
        let side = self.tile().side;
        let quads = side * side / 4;
        let mut text = format!("coopStoreT({sums}, &sums[my_sums], {side}u);\nworkgroupBarrier();\n");
        for e in 0..quads.div_ceil(LANES) {
            text += &format!(
                "let from_{name}{e} = my_sums + min(quad{e}, {}u) * 4u;
let {name}{e} = vec4<f32>(sums[from_{name}{e}], sums[from_{name}{e} + 1u], \
                 sums[from_{name}{e} + 2u], sums[from_{name}{e} + 3u]) * scale{e};
",
                quads - 1
            );
        }
        text + "workgroupBarrier();\n"
    }

    /// Stores quad `e` of a thread: four outputs of a row, in a matrix whose first output is
    /// `first` after those of the subgroup.
    fn store_quad(self, e: usize, quads: usize, first: usize) -> String {
        let within = if quads < LANES { format!(" && quad{e} < {quads}u") } else { String::new() };
        let mut text = format!(
            "{{
let output = first_output + my_outputs + {first}u + quad{e} % {}u * 4u;
if (row{e} < count && output < args.outputs{within}) {{
let place = (first{e} + output) / 4u;
let columns = output + vec4<u32>(0u, 1u, 2u, 3u);
var before = vec4<f32>();
",
            self.tile().side / 4
        );
        let bias = |first: &str| {
            let of =
                ["x", "y", "z", "w"].map(|c| format!("bias[{first} + min(columns.{c}, args.outputs - 1u)]"));
            format!("vec4<f32>({})", of.join(", "))
        };
        text += &match self.gated {
            false => format!(
                "var value = sum{e};
if ((args.flags & 1u) != 0u) {{ value += {}; }}
if ((args.flags & 2u) != 0u) {{ before = out[place]; value += before; }}
if ((args.flags & 4u) != 0u) {{ value = max(value, vec4<f32>(0.0)); value = value * value; }}
",
                bias(if self.pairs { pairs::FIRST_BIAS } else { "args.bias_first" })
            ),
            true => format!(
                "var gate = gate{e};
var up = up{e};
if ((args.flags & 1u) != 0u) {{ gate += {}; up += {}; }}
let value = vec4<f32>(activate(gate.x, up.x), activate(gate.y, up.y), \
                 activate(gate.z, up.z), activate(gate.w, up.w));
",
                bias(if self.pairs { pairs::FIRST_BIAS } else { "0u" }),
                bias(&if self.pairs {
                    format!("{} + args.outputs", pairs::FIRST_BIAS)
                } else {
                    "args.outputs".to_owned()
                })
            ),
        };
        text + "out[place] = select(before, value, columns < vec4<u32>(args.outputs));\n}\n}\n"
    }
}
