//! WGSL of the attention of up to 32 queries to 32 compressed vectors, which are keys and values.
//!
//! Four groups of 64 threads each have a quarter of the columns of all scores: a thread every
//! eighth query and 4 consecutive tokens. Then 8 threads have a query's scores. Of the sums, a
//! thread has every eighth query and, of each 128 columns, 4 consecutive ones.

use super::attend_many::{UNIT, unpack};

/// Columns of the forms' values.
pub(super) const COLUMNS: [usize; 3] = [128, 256, 512];
/// The columns of the form for values of this width, if there is one and parts of vectors are whole
/// units.
pub(super) fn columns_for(value: usize, parts: [usize; 2]) -> Option<usize> {
    let are_units = parts.iter().all(|width| width.is_multiple_of(UNIT));
    COLUMNS.into_iter().find(|columns| are_units && value > 0 && *columns >= value)
}

/// Columns of sums of which a thread has four.
const SLAB: usize = 128;
/// The distance of two queries that a thread computes.
const APART: usize = 8;
/// Tokens whose vectors are in workgroup memory together.
const TOKENS: usize = 8;

/// What all kernels declare.
const MEMORY: &str = include_str!("attend_block_memory.wgsl");

/// A thread's places in the scores and in the sums.
const PLACES: &str = "    let group = thread / 64u;
    let line = thread % 64u / 8u;
    let column = thread % 8u;
    let mine = thread / 8u;
    let summed = thread / 32u;
    let quad_of_sums = thread % 32u;
";

/// A part of the columns of queries and vectors.
pub(super) struct Part<'a> {
    /// The quad `quad` of the query `query`.
    pub query: &'a str,
    /// Units of a vector.
    pub units: &'a str,
    /// Defines `stored`, the unit `unit` of the vector of `token`, and with bytes `scale`, its
    /// scale.
    pub read: String,
}

/// The block's text.
pub(super) struct Block<'a> {
    /// Queries, a multiple of 8.
    pub queries: usize,
    /// Maximum columns of a value.
    pub columns: usize,
    /// The cache has bytes with scales, otherwise f16.
    pub int8: bool,
    pub parts: [Part<'a>; 2],
    /// As in [`Part`], of values.
    pub value: String,
    pub value_units: &'a str,
    /// Whether a query attends to the token `token`.
    pub is_used: &'a str,
    /// Changes the scores `four` of the query `mine`.
    pub mask: &'a str,
}

impl Block<'_> {
    fn slabs(&self) -> usize {
        self.columns / SLAB
    }

    /// Queries that a thread computes.
    fn of_thread(&self) -> usize {
        self.queries / APART
    }

    /// A line for each query of a thread.
    fn each(&self, line: impl Fn(usize) -> String) -> String {
        (0..self.of_thread()).map(line).collect()
    }

    /// Inserts the block into a kernel's text. `store` is WGSL that stores `value` of the query
    /// `query` in the column `d`.
    pub fn insert(&self, text: &str, store: &str) -> String {
        let state: String =
            (0..self.slabs()).map(|s| self.each(|i| format!("var acc{s}_{i} = vec4<f32>(0.0);\n"))).collect();
        let parts =
            self.each(|i| format!("tile[(group * 32u + line + {}u) * 8u + column] = score{i};\n", i * APART));
        let block = include_str!("attend_block.wgsl")
            .replace("$ZERO", &self.each(|i| format!("var score{i} = vec4<f32>(0.0);\n")))
            .replace("$SCORES", &self.parts.iter().map(|part| self.score(part)).collect::<String>())
            .replace("$PARTS", &parts)
            .replace("$MASK", self.mask)
            .replace("$SHARE", &self.share("0u"))
            .replace("$ADD", &self.add());
        text.replace("$MEMORY", MEMORY)
            .replace("$PLACES", PLACES)
            .replace("$STATE", &format!("var most = NONE;\nvar total = 0.0;\n{state}"))
            .replace("$BLOCK", &block)
            .replace("$SUMS", &self.store(store))
    }

    /// The halves of a unit that was read.
    fn halves(&self) -> [String; 2] {
        let scale = if self.int8 { " * scale" } else { "" };
        unpack(self.int8, "stored").map(|half| half + scale)
    }

    /// Adds the products of a part of queries and vectors.
    fn score(&self, part: &Part<'_>) -> String {
        let Part { query, units, read } = part;
        let [low, high] = self.halves();
        let mut text = format!(
            "{{
let units = {units};
let quads = units * 2u;
for (var slab = 0u; slab * 8u < units; slab++) {{
    for (var slot = thread; slot < {}u; slot += 256u) {{
        let query = slot / 16u;
        let of_slab = slab * 16u + slot % 16u;
        let quad = min(of_slab, quads - 1u);
        tile[query * PITCH + slot % 16u] = select(vec4<f32>(0.0), {query}, of_slab < quads);
    }}
    {{
        // Token 4c + j of the block is line 8j + c: threads read different banks.
        let token = thread / 8u;
        let of_slab = slab * 8u + thread % 8u;
        let unit = min(of_slab, units - 1u);
        {read}
        let place = (32u + token % 4u * 8u + token / 4u) * PITCH + thread % 8u * 2u;
        tile[place] = select(vec4<f32>(0.0), {low}, of_slab < units);
        tile[place + 1u] = select(vec4<f32>(0.0), {high}, of_slab < units);
    }}
    workgroupBarrier();
    for (var q = group * 4u; q < group * 4u + 4u; q++) {{
",
            self.queries * 16
        );
        text += &self.each(|i| format!("let query{i} = tile[(line + {}u) * PITCH + q];\n", i * APART));
        for (j, component) in ["x", "y", "z", "w"].into_iter().enumerate() {
            text += &format!("let key{j} = tile[({}u + column) * PITCH + q];\n", 32 + 8 * j);
            text += &self
                .each(|i| format!("score{i}.{component} = dots(query{i}, key{j}, score{i}.{component});\n"));
        }
        text + "}\nworkgroupBarrier();\n}\n}\n"
    }

    /// Loads the vectors of a part of the block's tokens. Tokens that no query attends to are zero.
    fn share(&self, part: &str) -> String {
        let [low, high] = self.halves();
        let (units, value, is_used) = (self.columns / UNIT, &self.value, self.is_used);
        format!(
            "for (var i = thread; i < {}u; i += 256u) {{
    let units = {};
    let token = {part} * {TOKENS}u + i / {units}u;
    let unit = min(i % {units}u, units - 1u);
    {value}
    let is_used = i % {units}u < units && {is_used};
    tile[i * 2u] = select(vec4<f32>(0.0), {low}, is_used);
    tile[i * 2u + 1u] = select(vec4<f32>(0.0), {high}, is_used);
}}
",
            TOKENS * units,
            self.value_units
        )
    }

    /// Adds the block's weighted vectors.
    fn add(&self) -> String {
        let mut text = String::new();
        for i in 0..self.of_thread() {
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
        text += &self.each(|i| {
            format!(
                "let weight{i} = weights[(summed + {}u) * WEIGHTS + part * {}u + q];\n",
                i * APART,
                TOKENS / 4
            )
        });
        for (token, component) in ["x", "y", "z", "w"].into_iter().enumerate() {
            for s in 0..self.slabs() {
                text += &format!(
                    "{{ let value = tile[(q * 4u + {token}u) * {}u + quad_of_sums + {}u];\n",
                    self.columns / 4,
                    s * SLAB / 4
                );
                text += &self.each(|i| {
                    format!("acc{s}_{i} = fma(vec4<f32>(weight{i}.{component}), value, acc{s}_{i});\n")
                });
                text += "}\n";
            }
        }
        text + "}\nworkgroupBarrier();\n}\n"
    }

    fn store(&self, store: &str) -> String {
        let mut text = String::new();
        for i in 0..self.of_thread() {
            text += &format!("{{\nlet query = summed + {}u;\n", i * APART);
            for s in 0..self.slabs() {
                text += &format!(
                    "for (var c = 0u; c < 4u; c++) {{
    let d = {}u + quad_of_sums * 4u + c;
    let value = acc{s}_{i}[c];
    {store}
}}
",
                    s * SLAB
                );
            }
            text += "}\n";
        }
        text
    }
}
