//! WGSL of norms: a workgroup computes a row and keeps most of it in registers.

use super::Leaving;
use crate::buffer::BLOCK_COLUMNS;

/// Quads of a row that a workgroup holds at once, and the number of turns.
pub(super) const QUADS: usize = 512;
const TURNS: usize = 4;

/// Maximum blocks of a row that the kernel [`super::Kernel::Norm`] stores as levels.
pub(crate) const MAX_NORM_BLOCKS: usize = QUADS * TURNS * 4 / BLOCK_COLUMNS;

/// The function `root_of` and its memory.
pub(super) const ROOT: &str = include_str!("root_of_row.wgsl");

fn each(turns: usize, line: &dyn Fn(usize, usize) -> String) -> String {
    (0..turns).map(|turn| line(turn, turn * QUADS)).collect()
}

/// Loads a row and the norm's weights.
pub(super) fn read(from: &str, turns: usize) -> String {
    each(turns, &|turn, first| {
        format!(
            "var value{turn} = vec4<f32>(0.0);
var weight{turn} = vec4<f32>(0.0);
if (thread + {first}u < quads) {{
    value{turn} = {from}[source + thread + {first}u];
    weight{turn} = weight[thread + {first}u];
}}
"
        )
    })
}

/// Adds a thread's squares.
pub(super) fn squares(turns: usize) -> String {
    each(turns, &|turn, _| format!("sum += squares_of(value{turn});\n"))
}

/// Norms a thread's numbers.
pub(super) fn norm(turns: usize) -> String {
    each(turns, &|turn, _| format!("value{turn} = value{turn} / rms * weight{turn};\n"))
}

/// Stores the normed numbers.
pub(super) fn write(turns: usize) -> String {
    each(turns, &|turn, first| {
        format!("if (thread + {first}u < quads) {{ out[to + thread + {first}u] = value{turn}; }}\n")
    })
}

/// How a normed row is stored as levels.
pub(super) struct LeftRow {
    pub declared: String,
    pub end: String,
}

/// Expressions in WGSL: the row's `blocks` and `quads`, and its index.
pub(super) fn leaving(blocks: &str, quads: &str, row: &str, turns: usize) -> LeftRow {
    let end = each(turns, &|turn, first| {
        format!(
            "if ({first}u < {quads}) {{
    left_value = value{turn};
    left_quads = min({QUADS}u, {quads} - {first}u);
    leave_levels({row}, {}u, thread);
}}
",
            first * 4 / BLOCK_COLUMNS
        )
    });
    let leaving = Leaving {
        quads: QUADS,
        used: "left_quads",
        value: Some("left_value"),
        row_blocks: blocks,
        ..Default::default()
    };
    let declared =
        format!("var<private> left_quads: u32;\nvar<private> left_value: vec4<f32>;\n{}", leaving.source());
    LeftRow { declared, end }
}

/// The kernel's text; with `levels`, it also stores the row's levels.
pub(super) fn source(levels: bool) -> String {
    let [declared, end] = match levels {
        true => {
            let left = leaving("(args.out_stride / 32u)", "args.out_stride / 4u", "args.row + id.x", TURNS);
            let bindings = "@group(0) @binding(3) var<storage, read_write> levels_out: array<u32>;
@group(0) @binding(4) var<storage, read_write> scales_out: array<vec2<f32>>;
";
            [bindings.to_owned() + &left.declared, left.end]
        }
        false => [String::new(), String::new()],
    };
    include_str!("norm.wgsl")
        .replace("$ROOT", ROOT)
        .replace("$LEAVING", &declared)
        .replace("$READ", &read("x", TURNS))
        .replace("$SQUARES", &squares(TURNS))
        .replace("$WRITE", &(norm(TURNS) + &write(TURNS)))
        .replace("$LEAVE", &end)
}
