//! WGSL of prompts' attention: a workgroup computes a tile of rows of one query head.

use super::Access;
use super::attend::{VISIBLE, capped};
use super::attend_many::{UNIT, scales, unit_type, unpack};

/// One compiled form of [`super::Kernel::AttendTiles`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct AttendTiles {
    /// Maximum columns of a value.
    pub columns: usize,
    /// The cache has bytes with scales, otherwise f16.
    pub int8: bool,
}

/// Rows of a tile.
pub(crate) const ATTENDED_ROWS: usize = 64;

/// Columns of the forms' values.
const COLUMNS: [usize; 3] = [64, 128, 256];
/// Columns in a line of the tile.
const SLAB: usize = 32;
/// Rows that a thread computes.
const ROWS: usize = 4;

impl AttendTiles {
    /// The form for keys and values of these widths, if there is one.
    pub fn of(widths: [usize; 2], int8: bool) -> Option<Self> {
        if widths.iter().any(|width| *width == 0 || width % UNIT != 0) {
            return None;
        }
        let columns = COLUMNS.into_iter().find(|columns| *columns >= widths[1])?;
        Some(Self { columns, int8 })
    }

    /// Every form.
    #[cfg(test)]
    pub fn all() -> impl Iterator<Item = Self> {
        COLUMNS.into_iter().flat_map(|columns| [false, true].map(|int8| Self { columns, int8 }))
    }

    pub fn bindings(self) -> Vec<Access> {
        bindings(self.int8)
    }

    fn slabs(self) -> usize {
        self.columns / SLAB
    }

    pub fn source(self) -> String {
        let [low, high] = unpack(self.int8, "key");
        let rows = |line: &dyn Fn(usize) -> String| (0..ROWS).map(line).collect::<String>();
        let zero = rows(&|i| format!("var score{i} = vec4<f32>(0.0);\n"));
        let state: String =
            (0..self.slabs()).map(|s| rows(&|i| format!("var acc{s}_{i} = vec4<f32>(0.0);\n"))).collect();
        let scale = match self.int8 {
            true => "let first_token = vector + column * 4u;
let of_keys = vec4<f32>(key_scales[first_token], key_scales[first_token + 1u], key_scales[first_token + 2u], key_scales[first_token + 3u]);
",
            false => "",
        };
        let times = rows(&|i| format!("score{i} = score{i} * of_keys;\n"));
        let cap = rows(&|i| format!("score{i} = capped(score{i});\n"));
        let keep = format!(
            "{scale}{}if (args.cap > 0.0) {{\n{cap}}}\n{}",
            if self.int8 { times.as_str() } else { "" },
            rows(&|i| format!("scores[(line + {}u) * PITCH + column] = score{i};\n", i * 16))
        );
        of_prompts(
            include_str!("attend_tiles.wgsl"),
            unit_type(self.int8),
            self.int8,
            "vec4<f32>",
            (ATTENDED_ROWS, ""),
        )
        .replace("$STATE", &state)
        .replace("$ZERO", &zero)
        .replace("$KEY_LOW", &low)
        .replace("$KEY_HIGH", &high)
        .replace("$DOTS", &dots())
        .replace("$KEEP", &keep)
        .replace("$LOAD0", &self.load(0))
        .replace("$ADD", &self.add())
        .replace("$STORE", &self.store())
    }

    /// Loads 64 columns of the block's values into the tile. Tokens that no row attends to are
    /// zero.
    fn load(self, round: usize) -> String {
        let [low, high] = unpack(self.int8, "value");
        let scale = if self.int8 { " * value_scales[vector + token]" } else { "" };
        format!(
            "for (var i = thread; i < 256u; i += 128u) {{
    let token = i / 4u % 32u;
    let unit = {}u + i / 128u * 4u + i % 4u;
    let value = values[(vector + token) * args.value_units + min(unit, args.value_units - 1u)];
    let is_used = unit < args.value_units && block * 32u + token <= last;
    let at = i / 4u * PITCH + i % 4u * 2u;
    tile[at] = select(vec4<f32>(0.0), {low}{scale}, is_used);
    tile[at + 1u] = select(vec4<f32>(0.0), {high}{scale}, is_used);
}}
",
            round * 8
        )
    }

    /// Adds the block's weighted values.
    fn add(self) -> String {
        let mut text = String::new();
        for i in 0..ROWS {
            text += &format!("let shrink{i} = factors[line + {}u].x;\n", i * 16);
            for s in 0..self.slabs() {
                text += &format!("acc{s}_{i} = acc{s}_{i} * shrink{i};\n");
            }
        }
        for round in 0..self.slabs() / 2 {
            if round > 0 {
                text += &self.load(round);
                text += "workgroupBarrier();\n";
            }
            text += "for (var q = 0u; q < 8u; q++) {\n";
            for i in 0..ROWS {
                text += &format!("let weight{i} = scores[(line + {}u) * PITCH + q];\n", i * 16);
            }
            for half in 0..2 {
                for (token, component) in ["x", "y", "z", "w"].into_iter().enumerate() {
                    text += &format!(
                        "{{ let value = tile[({}u + q * 4u + {token}u) * PITCH + column];\n",
                        half * 32
                    );
                    for i in 0..ROWS {
                        let acc = format!("acc{}_{i}", 2 * round + half);
                        text += &format!("{acc} = fma(vec4<f32>(weight{i}.{component}), value, {acc});\n");
                    }
                    text += "}\n";
                }
            }
            text += "}\nworkgroupBarrier();\n";
        }
        text
    }

    fn store(self) -> String {
        let mut text = String::new();
        for s in 0..self.slabs() {
            // Registers cannot be indexed.
            text += &format!(
                "{{ var acc = acc{s}_0;
if (i == 1u) {{ acc = acc{s}_1; }} else if (i == 2u) {{ acc = acc{s}_2; }} else if (i == 3u) {{ acc = acc{s}_3; }}
let d = {}u + column * 4u;
for (var c = 0u; c < 4u; c++) {{
    if (d + c < args.out_dim) {{ out[to + d + c] = fma(acc[c], factor.x, 0.0) / factor.y; }}
}}
}}
",
                s * SLAB
            );
        }
        text
    }
}

/// Buffers of the kernels for prompts' attention.
pub(super) fn bindings(int8: bool) -> Vec<Access> {
    let mut all = vec![Access::Read; 6];
    all.push(Access::Write);
    if int8 {
        all.extend([Access::Read; 2]);
    }
    all
}

/// The text of a kernel for prompts' attention, with its declarations and its tile of rows.
/// `element` is what it reads from a cache at once, `scores` the type of the scores that it caps,
/// `rows` how many rows of a tile a workgroup has, and `more` further arguments.
pub(super) fn of_prompts(
    text: &str,
    element: &str,
    int8: bool,
    scores: &str,
    (rows, more): (usize, &str),
) -> String {
    let parts = format!(
        "// A tile is divided into parts.\nconst PARTS = {}u;\nconst ROWS_OF_PART = {rows}u;\n",
        ATTENDED_ROWS / rows
    );
    text.replace("$PROMPTS", &(include_str!("attend_prompts.wgsl").replace("$MORE", more) + &parts))
        .replace("$TILE", include_str!("attend_prompts_tile.wgsl"))
        .replace("$ELEMENT", element)
        .replace("$SCALES", &scales(int8, 7))
        .replace("$VISIBLE", VISIBLE)
        .replace("$CAP", &capped(scores))
}

/// A quad of columns of a thread's scores.
fn dots() -> String {
    let mut text = String::new();
    for i in 0..ROWS {
        text += &format!("let query{i} = tile[(line + {}u) * PITCH + q];\n", i * 16);
    }
    for (j, component) in ["x", "y", "z", "w"].into_iter().enumerate() {
        text += &format!("let key{j} = tile[({}u + column) * PITCH + q];\n", 64 + 8 * j);
        for i in 0..ROWS {
            text += &format!("score{i}.{component} = dots(query{i}, key{j}, score{i}.{component});\n");
        }
    }
    text
}
