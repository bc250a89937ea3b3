//! Products of prompts' rows: a workgroup computes a tile of rows and outputs, and reads each block
//! of weights once for all of its rows.
//!
//! An output adds its columns in order, so it does not depend on the other rows.

use super::Access;
use super::decode::{self, group, load, quad};
use super::product::ARGUMENTS;
use crate::format::Format;

/// Rows and outputs of a workgroup.
pub(crate) const TILE_ROWS: usize = 32;
pub(crate) const TILE_OUTPUTS: usize = 64;

const THREADS: usize = 128;
/// Rows, and outputs, that a thread computes.
const PER: usize = 4;
/// Quads between two rows of a tile. The number is odd, so that threads read different banks.
const PITCH: usize = 9;

pub(super) fn bindings(format: Format) -> Vec<Access> {
    // Weights, bias, input.
    let mut all = vec![Access::Read; decode::buffers(format) + 2];
    all.push(Access::Write);
    all
}

pub(super) fn source(format: Format) -> String {
    let first = decode::buffers(format);
    let mut text = decode::declare(format, 0);
    text += &format!(
        "@group(0) @binding({first}) var<storage, read> bias: array<f32>;
@group(0) @binding({}) var<storage, read> x: array<vec4<f32>>;
@group(0) @binding({}) var<storage, read_write> out: array<f32>;
{ARGUMENTS}
var<workgroup> rows_tile: array<vec4<f32>, {}>;
var<workgroup> weights_tile: array<vec4<f32>, {}>;
@compute @workgroup_size({THREADS})
fn main(@builtin(workgroup_id) id: vec3<u32>, @builtin(local_invocation_index) thread: u32) {{
    let first_row = id.y * {TILE_ROWS}u;
    let first_output = id.x * {TILE_OUTPUTS}u;
    let my_rows = thread / 16u * {PER}u;
    let my_outputs = thread % 16u;
",
        first + 1,
        first + 2,
        TILE_ROWS * PITCH,
        TILE_OUTPUTS * PITCH,
    );
    for acc in 0..PER * PER {
        text += &format!("var acc{acc} = 0.0;\n");
    }
    text += &format!(
        "let line = thread / 2u;
let weights_row = min(first_output + line, args.outputs - 1u) * args.blocks;
for (var b = 0u; b < args.blocks; b++) {{
    for (var slot = thread; slot < {}u; slot += {THREADS}u) {{
        let row = min(first_row + slot / 8u, args.rows - 1u);
        rows_tile[slot / 8u * {PITCH}u + slot % 8u] = x[(args.x_row + row) * args.x_stride + b * 8u + slot % 8u];
    }}
    let block = weights_row + b;
",
        TILE_ROWS * 8
    );
    text += &load(format, "w", "block");
    for half in 0..2 {
        text += if half == 0 { "if (thread % 2u == 0u) {\n" } else { "} else {\n" };
        if format.has_scales() {
            text += &format!("let s = scale_of({});\n", group(format, "block", half));
        }
        for q in half * 4..half * 4 + 4 {
            let value = quad(format, "w", q);
            let value = match format.has_scales() {
                true => format!("fma(vec4<f32>(s.x), {value}, vec4<f32>(s.y))"),
                false => value,
            };
            text += &format!("weights_tile[line * {PITCH}u + {q}u] = {value};\n");
        }
    }
    text += "}\nworkgroupBarrier();\nfor (var q = 0u; q < 8u; q++) {\n";
    for r in 0..PER {
        text += &format!("let r{r} = rows_tile[(my_rows + {r}u) * {PITCH}u + q];\n");
    }
    for o in 0..PER {
        text += &format!("let o{o} = weights_tile[(my_outputs + {}u) * {PITCH}u + q];\n", o * 16);
    }
    for (r, o) in (0..PER).flat_map(|r| (0..PER).map(move |o| (r, o))) {
        text += &format!("acc{} += dot(r{r}, o{o});\n", r * PER + o);
    }
    text += "}\nworkgroupBarrier();\n}\n";
    for (r, o) in (0..PER).flat_map(|r| (0..PER).map(move |o| (r, o))) {
        text += &format!(
            "{{
    let row = first_row + my_rows + {r}u;
    let output = first_output + my_outputs + {}u;
    if (row < args.rows && output < args.outputs) {{
        var value = acc{};
        if ((args.flags & 1u) != 0u) {{ value += bias[args.bias_stride + output]; }}
        let place = (args.out_row + row) * args.out_stride + args.out_first + output;
        if ((args.flags & 2u) != 0u) {{ value += out[place]; }}
        out[place] = value;
    }}
}}
",
            o * 16,
            r * PER + o
        );
    }
    text + "}\n"
}
