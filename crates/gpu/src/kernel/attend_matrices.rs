//! WGSL of prompts' attention by cooperative matrices: f16 factors, f32 sums.

use super::Access;
use super::attend_many::UNIT;
use super::attend_tiles::{self, ATTENDED_ROWS};

/// One compiled form of [`super::Kernel::AttendMatrices`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct AttendMatrices {
    /// Maximum columns of a key or value.
    pub columns: usize,
    /// The cache has bytes with scales, otherwise f16.
    pub int8: bool,
    /// The tile of values has the tokens of a column side by side, otherwise the columns of a
    /// token.
    pub by_columns: bool,
}

/// Columns of the forms. Wider sums do not fit into registers.
const COLUMNS: [usize; 2] = [64, 128];
/// Side of the hardware's matrices.
const SIDE: usize = 16;
/// Scores of a row that a lane holds.
const SCORED: usize = 16;
const THREADS: usize = 128;

impl AttendMatrices {
    /// The forms for keys and values of these widths, the fastest first.
    pub fn of(widths: [usize; 2], int8: bool) -> impl Iterator<Item = Self> {
        let fits = widths.iter().all(|width| *width > 0 && width % UNIT == 0);
        let columns = COLUMNS.into_iter().find(|columns| fits && *columns >= widths[0].max(widths[1]));
        let forms = columns.map(|columns| [false, true].map(|by_columns| Self { columns, int8, by_columns }));
        forms.into_iter().flatten()
    }

    /// Every form.
    #[cfg(test)]
    pub fn all() -> impl Iterator<Item = Self> {
        COLUMNS
            .into_iter()
            .flat_map(|columns| [false, true].into_iter().flat_map(move |int8| Self::of([columns; 2], int8)))
    }

    pub fn bindings(self) -> Vec<Access> {
        attend_tiles::bindings(self.int8)
    }

    /// Matrices side by side.
    fn matrices(self) -> usize {
        self.columns / SIDE
    }

    fn quads(self) -> usize {
        self.columns / 4
    }

    pub fn source(self) -> String {
        let state: String = (0..self.matrices())
            .map(|j| format!("var sum{j} = coop_mat{SIDE}x{SIDE}<f32, C>();\n"))
            .collect();
        let value_tile = match self.by_columns {
            true => format!("var<workgroup> value_tile: array<f16, {}u * WEIGHTS>;", self.columns),
            false => String::new(),
        };
        let element = if self.int8 { "u32" } else { "vec4<f16>" };
        attend_tiles::of_prompts(
            include_str!("attend_matrices.wgsl"),
            element,
            self.int8,
            "f32",
            (ATTENDED_ROWS, ""),
        )
        .replace("$QUADS", &self.quads().to_string())
        .replace("$AND_VALUES", if self.by_columns { "" } else { ", and after the scores its values" })
        .replace("$VALUE_TILE", &value_tile)
        .replace("$QUERIES", &self.queries())
        .replace("$STATE", &state)
        .replace("$LOAD", &self.load())
        .replace("$KEYS", &self.keys())
        .replace("$VALUES", &self.values())
        .replace("$SCORES", &self.scores())
        .replace("$MASK", &mask())
        .replace("$WEIGH", &weigh())
        .replace("$SHRINK", &self.shrink())
        .replace("$ADD", &self.add())
        .replace("$STORE", &self.store())
    }

    /// Loads the queries of the subgroup's rows, 64 columns at a time through the tile.
    fn queries(self) -> String {
        const PER_PART: usize = 64 / SIDE;
        (0..self.matrices())
            .step_by(PER_PART)
            .map(|part| {
                let loads: String = (0..PER_PART)
                    .map(|k| {
                        format!(
                            "let query{} = coopLoadT<coop_mat{SIDE}x{SIDE}<f16, A>>(&tile[mine * PART_PITCH + {}u], PART_PITCH);\n",
                            part + k,
                            k * SIDE / 4
                        )
                    })
                    .collect();
                format!(
                    "for (var slot = thread; slot < 64u * PART; slot += 128u) {{
    let source_row = min(first + slot / PART, end - 1u);
    let quad = slot % PART + {}u;
    let query = queries[source_row * args.q_stride + head * key_quads + min(quad, key_quads - 1u)];
    let within = clamp(query, -LARGEST_F16, LARGEST_F16);
    tile[slot / PART * PART_PITCH + slot % PART] = vec4<f16>(select(vec4<f32>(0.0), within, quad < key_quads));
}}
workgroupBarrier();
{loads}workgroupBarrier();
",
                    part * SIDE / 4
                )
            })
            .collect()
    }

    /// Quads of keys, and of values, that a thread loads of a block.
    fn turns(self) -> usize {
        32 * self.quads() / THREADS
    }

    /// A loaded quad `i` of a `key` or `value` as f16.
    fn number(self, of: &str, i: usize) -> String {
        match self.int8 {
            false => format!("{of}{i}"),
            true => {
                format!("vec4<f16>(vec4<f32>(unpack4xI8({of}{i})) * {of}_scales[vector + {of}_token{i}])")
            }
        }
    }

    /// Asks for the block's keys and values.
    fn load(self) -> String {
        let mut text = String::new();
        for i in 0..self.turns() {
            text += &format!(
                "let key_token{i} = (thread + {at}u) / QUADS;
let key_quad{i} = (thread + {at}u) % QUADS;
let key{i} = keys[(vector + key_token{i}) * key_quads + min(key_quad{i}, key_quads - 1u)];
",
                at = i * THREADS
            );
        }
        for i in 0..self.turns() {
            // By columns, neighbouring lanes have neighbouring tokens.
            text += &match self.by_columns {
                false => format!("let value_token{i} = key_token{i};\nlet value_quad{i} = key_quad{i};\n"),
                true => format!(
                    "let value_token{i} = lane % 8u + thread / 32u * 8u;\nlet value_quad{i} = lane / 8u + {}u;\n",
                    4 * i
                ),
            };
            text += &format!(
                "let value{i} = values[(vector + value_token{i}) * value_quads + min(value_quad{i}, value_quads - 1u)];\n"
            );
        }
        text
    }

    /// Stores the loaded keys in the tile.
    fn keys(self) -> String {
        let store = |i| {
            format!(
                "tile[key_token{i} * PITCH + key_quad{i}] = select(vec4<f16>(0.0), {}, key_quad{i} < key_quads);\n",
                self.number("key", i)
            )
        };
        (0..self.turns()).map(store).collect()
    }

    /// Stores the loaded values in their tile, once nobody reads the keys there.
    fn values(self) -> String {
        let mut text = String::new();
        for i in 0..self.turns() {
            // Tokens that no row attends to may have any content; their weight is zero.
            text += &format!(
                "let is_used{i} = value_quad{i} < value_quads && block * 32u + value_token{i} <= last;
let used{i} = select(vec4<f16>(0.0), {}, is_used{i});
",
                self.number("value", i)
            );
            if self.by_columns {
                for (c, component) in ["x", "y", "z", "w"].into_iter().enumerate() {
                    text += &format!(
                        "value_tile[(value_quad{i} * 4u + {c}u) * WEIGHTS + value_token{i}] = used{i}.{component};\n"
                    );
                }
            } else {
                text += &format!("tile[value_token{i} * PITCH + value_quad{i}] = used{i};\n");
            }
        }
        text
    }

    /// Scores of the subgroup's rows and the block's tokens.
    fn scores(self) -> String {
        let mut text = String::new();
        for half in 0..2 {
            text += &format!("var score{half} = coop_mat{SIDE}x{SIDE}<f32, C>();\n");
        }
        for (k, half) in (0..self.matrices()).flat_map(|k| [(k, 0), (k, 1)]) {
            text += &format!(
                "let key_{k}_{half} = coopLoad<coop_mat{SIDE}x{SIDE}<f16, B>>(&tile[{}u * PITCH + {}u], PITCH);
score{half} = coopMultiplyAdd(query{k}, key_{k}_{half}, score{half});
",
                half * SIDE,
                k * SIDE / 4
            );
        }
        for half in 0..2 {
            text += &format!("coopStoreT(score{half}, &scores[mine * ROW + {}u], ROW);\n", half * SIDE);
        }
        text
    }

    /// Pairs of neighbouring matrices of sums, as `scores` holds them for the subgroup's rows.
    fn each_pair(self, of: impl Fn([usize; 2]) -> String) -> String {
        (0..self.matrices()).step_by(2).map(|j| of([j, j + 1])).collect()
    }

    /// Rescales sums to the new maxima through workgroup memory, because no lane knows which rows
    /// its sums belong to.
    fn shrink(self) -> String {
        let scale: String =
            (0..SCORED).map(|i| format!("scores[row * ROW + {}u + half] *= shrink;\n", 2 * i)).collect();
        self.each_pair(|pair| {
            let each = |of: &dyn Fn(usize, usize) -> String| {
                pair.iter().enumerate().map(|(at, j)| of(at * SIDE, *j)).collect::<String>()
            };
            let put = each(&|at, j| format!("coopStoreT(sum{j}, &scores[mine * ROW + {at}u], ROW);\n"));
            let get = each(&|at, j| {
                format!(
                    "sum{j} = coopLoadT<coop_mat{SIDE}x{SIDE}<f32, C>>(&scores[mine * ROW + {at}u], ROW);\n"
                )
            });
            format!("{put}workgroupBarrier();\n{scale}workgroupBarrier();\n{get}workgroupBarrier();\n")
        })
    }

    /// Adds the block's weighted values.
    fn add(self) -> String {
        let mut text = String::new();
        for half in 0..2 {
            text += &format!(
                "let weight{half} = coopLoadT<coop_mat{SIDE}x{SIDE}<f16, A>>(&weights[mine * WEIGHTS + {}u], WEIGHTS);\n",
                half * SIDE
            );
        }
        for (half, j) in (0..2).flat_map(|half| (0..self.matrices()).map(move |j| (half, j))) {
            let value = match self.by_columns {
                false => format!(
                    "coopLoadT<coop_mat{SIDE}x{SIDE}<f16, B>>(&tile[{}u * PITCH + {}u], PITCH)",
                    half * SIDE,
                    j * SIDE / 4
                ),
                true => format!(
                    "coopLoad<coop_mat{SIDE}x{SIDE}<f16, B>>(&value_tile[{}u * WEIGHTS + {}u], WEIGHTS)",
                    j * SIDE,
                    half * SIDE
                ),
            };
            text += &format!(
                "let value_{half}_{j} = {value};
sum{j} = coopMultiplyAdd(weight{half}, value_{half}_{j}, sum{j});
"
            );
        }
        text
    }

    fn store(self) -> String {
        self.each_pair(|[j, next]| {
            format!(
                "coopStoreT(sum{j}, &scores[mine * ROW], ROW);
coopStoreT(sum{next}, &scores[mine * ROW + {SIDE}u], ROW);
workgroupBarrier();
for (var i = 0u; i < 16u; i++) {{
    let out_row = first + mine + i;
    let d = {}u + lane;
    if (out_row >= source && out_row < end && d < args.out_dim) {{
        let factor = factors[mine + i];
        let value = fma(scores[(mine + i) * ROW + lane], factor.x, 0.0) / factor.y;
        out[out_row * args.out_stride + args.out_first + head * args.out_dim + d] = value;
    }}
}}
workgroupBarrier();
",
                j * SIDE
            )
        })
    }
}

/// A lane's scores and their maximum.
fn mask() -> String {
    (0..SCORED)
        .map(|i| {
            format!(
                "let token{i} = block * 32u + {at}u + half;
let is_seen{i} = token{i} >= my_start && token{i} <= my_last;
let score_{i} = select(NONE, scores[row * ROW + {at}u + half], is_seen{i});
best = max(best, score_{i});
",
                at = 2 * i
            )
        })
        .collect()
}

/// A lane's weights, and the sum of the weights as rounded to f16.
fn weigh() -> String {
    (0..SCORED)
        .map(|i| {
            format!(
                "let weight_{i} = f16(select(0.0, exp(score_{i} - reference), is_seen{i}));
weights[row * WEIGHTS + {}u + half] = weight_{i};
sum += f32(weight_{i});
",
                2 * i
            )
        })
        .collect()
}
