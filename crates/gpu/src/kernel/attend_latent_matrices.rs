//! WGSL of prompts' attention to compressed vectors by cooperative matrices: f16 factors, f32 sums.

use super::Access;
use super::attend_latent::{AttendLatent, LATENT_ROWS, MORE};
use super::attend_tiles::{self, of_prompts};

/// One compiled form of [`super::Kernel::AttendLatentMatrices`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct AttendLatentMatrices {
    /// Maximum columns of a compressed vector.
    pub columns: usize,
    /// The cache has bytes with scales, otherwise f16.
    pub int8: bool,
}

/// Maximum columns of a rotated part.
const TURNED: usize = 64;
/// Side of the hardware's matrices.
const SIDE: usize = 16;
const THREADS: usize = 256;
const SUBGROUPS: usize = 8;
/// Tokens of a block.
const TOKENS: usize = 32;

impl AttendLatentMatrices {
    /// The form for compressed vectors and rotated parts of these widths, if there is one.
    pub fn of([compressed, turned]: [usize; 2], int8: bool) -> Option<Self> {
        let AttendLatent { columns, .. } = AttendLatent::of([compressed, turned], int8)?;
        (turned <= TURNED).then_some(Self { columns, int8 })
    }

    /// Every form.
    #[cfg(test)]
    pub fn all() -> impl Iterator<Item = Self> {
        AttendLatent::all().map(|AttendLatent { columns, int8 }| Self { columns, int8 })
    }

    pub fn bindings(self) -> Vec<Access> {
        let mut all = attend_tiles::bindings(self.int8);
        all.push(Access::Read);
        all
    }

    /// Matrices of a half of a query.
    fn steps(self) -> usize {
        (self.columns + TURNED) / 2 / SIDE
    }

    /// Matrices side by side in a subgroup's sums.
    fn matrices(self) -> usize {
        self.columns / SUBGROUPS / SIDE
    }

    pub fn source(self) -> String {
        let state = self.each_sum(|r, j| format!("var sum{r}_{j} = coop_mat{SIDE}x{SIDE}<f32, C>();\n"));
        let element = if self.int8 { "u32" } else { "vec4<f16>" };
        let text = include_str!("attend_latent_matrices.wgsl");
        of_prompts(text, element, self.int8, "vec4<f32>", (LATENT_ROWS, MORE))
            .replace("$TURNED_QUADS", &(TURNED / 4).to_string())
            .replace("$TURNED", if self.int8 { "9" } else { "7" })
            .replace("$QUADS", &(self.columns / 4).to_string())
            .replace("$QUERIES", &self.queries())
            .replace("$STATE", &state)
            .replace("$VARIABLES", &self.variables())
            .replace("$LOAD", &self.load())
            .replace("$KEEP", &self.keep())
            .replace("$SCORES", &self.scores())
            .replace("$SHRINK", &self.shrink())
            .replace("$ADD", &self.add())
            .replace("$STORE", &self.store())
    }

    fn each_sum(self, line: impl Fn(usize, usize) -> String) -> String {
        (0..2).flat_map(|r| (0..self.matrices()).map(move |j| (r, j))).map(|(r, j)| line(r, j)).collect()
    }

    /// Loads the subgroup's half of the queries of its 16 rows, through the tile.
    fn queries(self) -> String {
        let loads: String = (0..self.steps())
            .map(|k| {
                format!(
                    "let query{k} = coopLoadT<coop_mat{SIDE}x{SIDE}<f16, A>>(&tile[scored_row * PITCH + scored_quad + {}u], PITCH);\n",
                    k * SIDE / 4
                )
            })
            .collect();
        format!(
            "for (var slot = thread; slot < 32u * ALL_QUADS; slot += {THREADS}u) {{
    let source_row = min(first + slot / ALL_QUADS, end - 1u);
    let quad = slot % ALL_QUADS;
    var query = vec4<f32>(0.0);
    if (quad < key_quads) {{
        query = queries[source_row * args.q_stride + head * key_quads + quad];
    }} else if (quad >= QUADS && quad - QUADS < value_quads) {{
        query = turned[source_row * args.turned_stride + args.turned_first + head * args.turned_of_head + quad - QUADS];
    }}
    tile[slot / ALL_QUADS * PITCH + quad] = vec4<f16>(clamp(query, -LARGEST_F16, LARGEST_F16));
}}
workgroupBarrier();
{loads}workgroupBarrier();
"
        )
    }

    /// For each quad that a thread loads: a number, the cache, its token and its quad there.
    fn loads(self) -> Vec<(usize, &'static str, String, String)> {
        let mut all = Vec::new();
        for (name, columns) in [("key", self.columns), ("value", TURNED)] {
            let quads = columns / 4;
            for turn in 0..TOKENS * quads / THREADS {
                let token = format!("(thread / {quads}u + {}u)", turn * THREADS / quads);
                all.push((all.len(), name, token, format!("(thread % {quads}u)")));
            }
        }
        all
    }

    /// Variables for a thread's quads of a block.
    fn variables(self) -> String {
        let count = self.loads().len();
        let kind = if self.int8 { "vec4<f32>" } else { "vec4<f16>" };
        (0..count).map(|i| format!("var quad{i}: {kind};\n")).collect()
    }

    /// Asks for a block's vectors. Tokens that no row attends to, and columns that there are not,
    /// are zero.
    fn load(self) -> String {
        let mut text = "{
let asked = min(block, last / 32u);
let vector = (tables[blocks + asked] * args.kv_heads + kv_head) * 32u;
"
        .to_owned();
        for (i, name, token, quad) in self.loads() {
            let place = format!("(vector + {token}) * {name}_quads + min({quad}, {name}_quads - 1u)");
            text += &match self.int8 {
                false => format!("quad{i} = {name}s[{place}];\n"),
                true => format!(
                    "quad{i} = vec4<f32>(unpack4xI8({name}s[{place}])) * {name}_scales[vector + {token}];\n"
                ),
            };
            let zero = if self.int8 { "vec4<f32>(0.0)" } else { "vec4<f16>(0.0)" };
            text += &format!(
                "if ({quad} >= {name}_quads || asked * 32u + {token} > last) {{ quad{i} = {zero}; }}\n"
            );
        }
        text + "}\n"
    }

    /// Stores the loaded vectors in the tile.
    fn keep(self) -> String {
        let store = |(i, name, token, quad): (usize, &str, String, String)| {
            let first = if name == "key" { "" } else { "QUADS + " };
            format!("tile[{token} * PITCH + {first}{quad}] = vec4<f16>(quad{i});\n")
        };
        self.loads().into_iter().map(store).collect()
    }

    /// Scores of the subgroup's rows and tokens, in its half of the columns.
    fn scores(self) -> String {
        let mut text = format!("var score = coop_mat{SIDE}x{SIDE}<f32, C>();\n");
        for k in 0..self.steps() {
            text += &format!(
                "let key{k} = coopLoad<coop_mat{SIDE}x{SIDE}<f16, B>>(&tile[scored_token * PITCH + scored_quad + {}u], PITCH);
score = coopMultiplyAdd(query{k}, key{k}, score);
",
                k * SIDE / 4
            );
        }
        text + "coopStoreT(score, &scores[scores_at], ROW);\n"
    }

    /// Rescales sums to the new references through workgroup memory, because no lane knows which
    /// rows its sums belong to.
    fn shrink(self) -> String {
        self.each_sum(|r, j| {
            format!(
                "coopStoreT(sum{r}_{j}, &scores[own], {SIDE}u);
workgroupBarrier();
for (var i = 0u; i < 8u; i++) {{
    scores[own + i * 32u + lane] *= factors[{}u + i * 2u + lane / {SIDE}u];
}}
workgroupBarrier();
sum{r}_{j} = coopLoadT<coop_mat{SIDE}x{SIDE}<f32, C>>(&scores[own], {SIDE}u);
workgroupBarrier();
",
                r * SIDE
            )
        })
    }

    /// Adds the block's weighted vectors.
    fn add(self) -> String {
        let mut text = String::new();
        for (half, r) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
            text += &format!(
                "let weight{r}_{half} = coopLoadT<coop_mat{SIDE}x{SIDE}<f16, A>>(&weights[{}u * WEIGHTS + {}u], WEIGHTS);\n",
                r * SIDE,
                half * SIDE
            );
        }
        for (half, j) in (0..2).flat_map(|half| (0..self.matrices()).map(move |j| (half, j))) {
            text += &format!(
                "let value{half}_{j} = coopLoadT<coop_mat{SIDE}x{SIDE}<f16, B>>(&tile[{}u * PITCH + summed_quad + {}u], PITCH);
sum0_{j} = coopMultiplyAdd(weight0_{half}, value{half}_{j}, sum0_{j});
sum1_{j} = coopMultiplyAdd(weight1_{half}, value{half}_{j}, sum1_{j});
",
                half * SIDE,
                j * SIDE / 4
            );
        }
        text
    }

    fn store(self) -> String {
        self.each_sum(|r, j| {
            format!(
                "coopStoreT(sum{r}_{j}, &scores[own], {SIDE}u);
workgroupBarrier();
for (var i = 0u; i < 8u; i++) {{
    let of_tile = {}u + i * 2u + lane / {SIDE}u;
    let out_row = first + of_tile;
    let d = summed_quad * 4u + {}u + lane % {SIDE}u;
    if (out_row >= source && out_row < end && d < args.out_dim) {{
        out[out_row * args.out_stride + args.out_first + head * args.out_dim + d] = scores[own + i * 32u + lane] / factors[of_tile];
    }}
}}
workgroupBarrier();
",
                r * SIDE,
                j * SIDE
            )
        })
    }
}
