//! WGSL of norms: a workgroup has a row, most of it in registers.

use super::Leaving;
use crate::buffer::BLOCK_COLUMNS;

/// Quads of a row that a workgroup has at once, and how often.
const QUADS: usize = 512;
const TURNS: usize = 4;

/// Blocks of a row at most that the kernel [`super::Kernel::Norm`] leaves as levels.
pub(crate) const MAX_NORM_BLOCKS: usize = QUADS * TURNS * 4 / BLOCK_COLUMNS;

/// The text; with `levels`, the row's levels are left too.
pub(super) fn source(levels: bool) -> String {
    let each = |line: &dyn Fn(usize, usize) -> String| -> String {
        (0..TURNS).map(|turn| line(turn, turn * QUADS)).collect()
    };
    let read = each(&|turn, first| {
        format!(
            "var value{turn} = vec4<f32>(0.0);
var weight{turn} = vec4<f32>(0.0);
if (thread + {first}u < quads) {{
    value{turn} = x[source + thread + {first}u];
    weight{turn} = weight[thread + {first}u];
}}
"
        )
    });
    let write = each(&|turn, first| {
        format!(
            "value{turn} = value{turn} / rms * weight{turn};
if (thread + {first}u < quads) {{ out[to + thread + {first}u] = value{turn}; }}
"
        )
    });
    let leave = each(&|turn, first| {
        format!(
            "if ({first}u < args.out_stride / 4u) {{
    left_value = value{turn};
    left_quads = min({QUADS}u, args.out_stride / 4u - {first}u);
    leave_levels(args.row + id.x, {}u, thread);
}}
",
            first * 4 / BLOCK_COLUMNS
        )
    });
    let leaving = Leaving {
        quads: QUADS,
        used: "left_quads",
        value: Some("left_value"),
        row_blocks: "(args.out_stride / 32u)",
        ..Default::default()
    };
    let leaving = format!(
        "@group(0) @binding(3) var<storage, read_write> levels_out: array<u32>;
@group(0) @binding(4) var<storage, read_write> scales_out: array<vec2<f32>>;
var<private> left_quads: u32;
var<private> left_value: vec4<f32>;
{}",
        leaving.source()
    );
    let [leaving, leave] = if levels { [leaving, leave] } else { [String::new(), String::new()] };
    include_str!("norm.wgsl")
        .replace("$LEAVING", &leaving)
        .replace("$READ", &read)
        .replace("$SQUARES", &each(&|turn, _| format!("sum += squares_of(value{turn});\n")))
        .replace("$WRITE", &write)
        .replace("$LEAVE", &leave)
}
