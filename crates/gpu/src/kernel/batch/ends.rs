//! How a workgroup adds its classes' sums, and what is done with the results.

use super::{Batch, QUADS, SIDE, THREADS, WIDE};
use crate::kernel::heads;

impl Batch {
    /// Adds the classes' sums, and stores the results as other products do.
    pub(super) fn finish(self) -> String {
        let results = if self.gated { 1 } else { WIDE };
        let sum = |name: &str, first: usize| {
            let of = |class: usize| format!("tile[quad + {}u]", (class * WIDE + first) * QUADS);
            format!("let {name} = ({} + {}) + ({} + {});\n", of(0), of(2), of(1), of(3))
        };
        let mut text = String::new();
        for i in 0..self.high() {
            for j in 0..WIDE {
                text += &format!(
                    "coopStoreT(sum_{i}_{j}, &tile[subgroup * {}u + {}u], {}u);\n",
                    WIDE * QUADS,
                    j * QUADS,
                    SIDE / 4
                );
            }
            text += &format!(
                "workgroupBarrier();
for (var quad = thread; quad < {}u; quad += {THREADS}u) {{
    let in_tile = {}u + quad % {QUADS}u / {of_row}u;
    let row = first_row + in_tile;
    let first = first_output + quad / {QUADS}u * {SIDE}u + quad % {of_row}u * 4u;
    if (row < args.rows) {{
    let square = row_squares[in_tile];
",
                results * QUADS,
                i * SIDE,
                of_row = SIDE / 4,
            );
            text += &sum("values", 0);
            if self.gated {
                text += &sum("ups", 1);
            }
            for (at, c) in ["x", "y", "z", "w"].into_iter().enumerate() {
                text += &self.store(at, c);
            }
            text += "}\n}\nworkgroupBarrier();\n";
        }
        text
    }

    /// Stores one of four results. The root is computed where it divides, as in other products:
    /// compilers then divide in the same way.
    fn store(self, at: usize, c: &str) -> String {
        let (up, divide_up) = match self.gated {
            false => (String::new(), ""),
            true => (format!("var up = ups.{c};\n"), "up = up / root;"),
        };
        let store = match self.gated {
            false => format!(
                "if ((args.flags & 1u) != 0u) {{ value += bias[args.bias_stride + output]; }}
let place = (args.out_row + row) * args.out_stride + args.out_first{} + output;
if ((args.flags & 2u) != 0u) {{ value += out[place]; }}
out[place] = value;
",
                heads::OUTPUT
            ),
            true => {
                "if ((args.flags & 1u) != 0u) { value += bias[output]; up += bias[args.outputs + output]; }
out[(args.out_row + row) * args.out_stride + output] = activate(value, up);
"
                .to_owned()
            }
        };
        format!(
            "if (first + {at}u < args.outputs) {{
let output = first + {at}u;
var value = values.{c};
{up}if ((args.flags & 4u) != 0u) {{
    let root = sqrt(square / f32(args.norm_width) + args.norm_eps);
    value = value / root;
    {divide_up}
}}
{store}}}
"
        )
    }
}
