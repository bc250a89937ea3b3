//! WGSL of prompts' attention to compressed vectors, which all query heads share.

use super::Access;
use super::attend_many::{UNIT, unit_type, unpack};
use super::attend_tiles::{self, of_prompts};

/// One compiled form of [`super::Kernel::AttendLatent`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct AttendLatent {
    /// Maximum columns of a compressed vector.
    pub columns: usize,
    /// The cache has bytes with scales, otherwise f16.
    pub int8: bool,
}

/// Rows of a workgroup: half a tile's. The sums of more do not fit into registers.
pub(crate) const LATENT_ROWS: usize = 32;

/// Columns of the forms.
const COLUMNS: [usize; 3] = [128, 256, 512];
/// Columns of sums of which a thread has four.
const SLAB: usize = 128;
/// Rows that a thread computes, and the distance of two of them.
const ROWS: usize = 4;
const APART: usize = 8;
/// Tokens whose vectors are in workgroup memory together.
const TOKENS: usize = 8;

/// Arguments after those of other kernels of prompts' attention, in quads: of the rotated parts of
/// queries.
const MORE: &str = "turned_stride: u32, turned_first: u32, turned_of_head: u32,";

impl AttendLatent {
    /// The form for compressed vectors and rotated parts of these widths, if there is one.
    pub fn of(widths: [usize; 2], int8: bool) -> Option<Self> {
        if widths.iter().any(|width| *width == 0 || width % UNIT != 0) {
            return None;
        }
        let columns = COLUMNS.into_iter().find(|columns| *columns >= widths[0])?;
        Some(Self { columns, int8 })
    }

    /// Every form.
    #[cfg(test)]
    pub fn all() -> impl Iterator<Item = Self> {
        COLUMNS.into_iter().flat_map(|columns| [false, true].map(|int8| Self { columns, int8 }))
    }

    pub fn bindings(self) -> Vec<Access> {
        let mut all = attend_tiles::bindings(self.int8);
        all.push(Access::Read);
        all
    }

    fn slabs(self) -> usize {
        self.columns / SLAB
    }

    pub fn source(self) -> String {
        let rows = |line: &dyn Fn(usize) -> String| (0..ROWS).map(line).collect::<String>();
        let zero = rows(&|i| format!("var score{i} = vec4<f32>(0.0);\n"));
        let state: String =
            (0..self.slabs()).map(|s| rows(&|i| format!("var acc{s}_{i} = vec4<f32>(0.0);\n"))).collect();
        let parts =
            rows(&|i| format!("tile[(group * 32u + line + {}u) * 8u + column] = score{i};\n", i * APART));
        let scores = self.score("queries", "row * args.q_stride + head * quads", "key")
            + &self.score(
                "turned",
                "row * args.turned_stride + args.turned_first + head * args.turned_of_head",
                "value",
            );
        let text = include_str!("attend_latent.wgsl");
        of_prompts(text, unit_type(self.int8), self.int8, "vec4<f32>", (LATENT_ROWS, MORE))
            .replace("$TURNED", if self.int8 { "9" } else { "7" })
            .replace("$STATE", &state)
            .replace("$ZERO", &zero)
            .replace("$SCORES", &scores)
            .replace("$PARTS", &parts)
            .replace("$SHARE", &self.share("0u"))
            .replace("$ADD", &self.add())
            .replace("$STORE", &self.store())
    }

    /// Adds the products of queries, read from `place` on, and the cache's vectors.
    fn score(self, queries: &str, place: &str, vectors: &str) -> String {
        let [low, high] = unpack(self.int8, "stored");
        let scale = if self.int8 { format!(" * {vectors}_scales[vector + token]") } else { String::new() };
        let mut text = format!(
            "{{
let units = args.{vectors}_units;
let quads = units * 2u;
for (var slab = 0u; slab * 8u < units; slab++) {{
    for (var slot = thread; slot < 512u; slot += 256u) {{
        let row = min(first + slot / 16u, end - 1u);
        let quad = slab * 16u + slot % 16u;
        let query = {queries}[{place} + min(quad, quads - 1u)];
        tile[slot / 16u * PITCH + slot % 16u] = select(vec4<f32>(0.0), query, quad < quads);
    }}
    {{
        // Token 4c + j of the block is line 8j + c: threads read different banks.
        let token = thread / 8u;
        let unit = slab * 8u + thread % 8u;
        let stored = {vectors}s[(vector + token) * units + min(unit, units - 1u)];
        let at = (32u + token % 4u * 8u + token / 4u) * PITCH + thread % 8u * 2u;
        tile[at] = select(vec4<f32>(0.0), {low}{scale}, unit < units);
        tile[at + 1u] = select(vec4<f32>(0.0), {high}{scale}, unit < units);
    }}
    workgroupBarrier();
    for (var q = group * 4u; q < group * 4u + 4u; q++) {{
"
        );
        for i in 0..ROWS {
            text += &format!("let query{i} = tile[(line + {}u) * PITCH + q];\n", i * APART);
        }
        for (j, component) in ["x", "y", "z", "w"].into_iter().enumerate() {
            text += &format!("let key{j} = tile[({}u + column) * PITCH + q];\n", 32 + 8 * j);
            for i in 0..ROWS {
                text += &format!("score{i}.{component} = dots(query{i}, key{j}, score{i}.{component});\n");
            }
        }
        text + "}\nworkgroupBarrier();\n}\n}\n"
    }

    /// Loads the vectors of a part of the block's tokens. Tokens that no row attends to are zero.
    fn share(self, part: &str) -> String {
        let [low, high] = unpack(self.int8, "value");
        let scale = if self.int8 { " * key_scales[vector + token]" } else { "" };
        let units = self.columns / UNIT;
        format!(
            "for (var i = thread; i < {}u; i += 256u) {{
    let token = {part} * {TOKENS}u + i / {units}u;
    let unit = i % {units}u;
    let value = keys[(vector + token) * args.key_units + min(unit, args.key_units - 1u)];
    let is_used = unit < args.key_units && block * 32u + token <= last;
    tile[i * 2u] = select(vec4<f32>(0.0), {low}{scale}, is_used);
    tile[i * 2u + 1u] = select(vec4<f32>(0.0), {high}{scale}, is_used);
}}
",
            TOKENS * units
        )
    }

    /// Adds the block's weighted vectors.
    fn add(self) -> String {
        let mut text = String::new();
        for i in 0..ROWS {
            text += &format!("let shrink{i} = factors[summed + {}u];\n", i * APART);
            for s in 0..self.slabs() {
                text += &format!("acc{s}_{i} = acc{s}_{i} * shrink{i};\n");
            }
        }
        text += &format!(
            "for (var part = 0u; part < {}u; part++) {{
if (part > 0u) {{
{}workgroupBarrier();
}}
for (var q = 0u; q < {}u; q++) {{
",
            32 / TOKENS,
            self.share("part"),
            TOKENS / 4
        );
        for i in 0..ROWS {
            text += &format!(
                "let weight{i} = weights[(summed + {}u) * WEIGHTS + part * {}u + q];\n",
                i * APART,
                TOKENS / 4
            );
        }
        for (token, component) in ["x", "y", "z", "w"].into_iter().enumerate() {
            for s in 0..self.slabs() {
                text += &format!(
                    "{{ let value = tile[(q * 4u + {token}u) * {}u + quad_of_sums + {}u];\n",
                    self.columns / 4,
                    s * SLAB / 4
                );
                for i in 0..ROWS {
                    text +=
                        &format!("acc{s}_{i} = fma(vec4<f32>(weight{i}.{component}), value, acc{s}_{i});\n");
                }
                text += "}\n";
            }
        }
        text + "}\nworkgroupBarrier();\n}\n"
    }

    fn store(self) -> String {
        let mut text = String::new();
        for i in 0..ROWS {
            text += &format!(
                "{{
let row = first + summed + {at}u;
if (row >= source && row < end) {{
let divisor = factors[summed + {at}u];
let to = row * args.out_stride + args.out_first + head * args.out_dim;
",
                at = i * APART
            );
            for s in 0..self.slabs() {
                text += &format!(
                    "for (var c = 0u; c < 4u; c++) {{
    let d = {}u + quad_of_sums * 4u + c;
    if (d < args.out_dim) {{ out[to + d] = acc{s}_{i}[c] / divisor; }}
}}
",
                    s * SLAB
                );
            }
            text += "}\n}\n";
        }
        text
    }
}
