//! WGSL of attention of prompts' rows by cooperative matrices: f16 factors, f32 sums.

use super::Access;
use super::attend_many::{UNIT, scales};

/// One compiled form of [`super::Kernel::AttendMatrices`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct AttendMatrices {
    /// Columns of a key or value, at most.
    pub columns: usize,
    /// The cache has bytes with scales, else f16.
    pub int8: bool,
}

/// Columns of forms: wider sums do not fit into registers.
const COLUMNS: [usize; 2] = [64, 128];
/// Side of the hardware's matrices.
const SIDE: usize = 16;
/// Quads of scores that a lane has.
const SCORED: usize = 4;

impl AttendMatrices {
    /// The form for keys and values of these widths, if there is one.
    pub fn of(widths: [usize; 2], int8: bool) -> Option<Self> {
        if widths.iter().any(|width| *width == 0 || width % UNIT != 0) {
            return None;
        }
        let columns = COLUMNS.into_iter().find(|columns| *columns >= widths[0].max(widths[1]))?;
        Some(Self { columns, int8 })
    }

    /// Every form.
    #[cfg(test)]
    pub fn all() -> impl Iterator<Item = Self> {
        COLUMNS.into_iter().flat_map(|columns| [false, true].map(|int8| Self { columns, int8 }))
    }

    pub fn bindings(self) -> Vec<Access> {
        let mut all = vec![Access::Read; 6];
        all.push(Access::Write);
        if self.int8 {
            all.extend([Access::Read; 2]);
        }
        all
    }

    /// Matrices side by side.
    fn matrices(self) -> usize {
        self.columns / SIDE
    }

    pub fn source(self) -> String {
        let quad = |name: &str| match self.int8 {
            false => name.to_owned(),
            true => format!("vec4<f16>(vec4<f32>(unpack4xI8({name})) * {name}_scales[vector + token])"),
        };
        let state: String = (0..self.matrices())
            .map(|j| format!("var sum{j} = coop_mat{SIDE}x{SIDE}<f32, C>();\n"))
            .collect();
        include_str!("attend_matrices.wgsl")
            .replace("$QUADS", &(self.columns / 4).to_string())
            .replace("$QUAD", if self.int8 { "u32" } else { "vec4<f16>" })
            .replace("$SCALES", &scales(self.int8, 7))
            .replace("$QUERIES", &self.queries())
            .replace("$STATE", &state)
            .replace("$KEY", &quad("key"))
            .replace("$VALUE", &quad("value"))
            .replace("$SCORES", &self.scores())
            .replace("$MASK", &mask())
            .replace("$WEIGH", &weigh())
            .replace("$SHRINK", &self.shrink())
            .replace("$ADD", &self.add())
            .replace("$STORE", &self.store())
    }

    fn queries(self) -> String {
        (0..self.matrices())
            .map(|k| {
                format!(
                    "let query{k} = coopLoadT<coop_mat{SIDE}x{SIDE}<f16, A>>(&tile[mine * PITCH + {}u], PITCH);\n",
                    k * SIDE
                )
            })
            .collect()
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
                k * SIDE
            );
        }
        for half in 0..2 {
            text += &format!("coopStoreT(score{half}, &scores[mine * ROW + {}u], ROW);\n", half * SIDE);
        }
        text
    }

    /// Pairs of neighbouring matrices of sums: what `scores` holds of the subgroup's rows.
    fn each_pair(self, of: impl Fn([usize; 2]) -> String) -> String {
        (0..self.matrices()).step_by(2).map(|j| of([j, j + 1])).collect()
    }

    /// Brings sums to the new references, through workgroup memory: no lane knows of which rows its
    /// sums are.
    fn shrink(self) -> String {
        let scale: String = (0..SCORED)
            .map(|i| {
                format!(
                    "{{ let line = mine + lane / 8u + {}u;
for (var c = lane % 8u * 4u; c < lane % 8u * 4u + 4u; c++) {{ scores[line * ROW + c] *= factors[line].x; }} }}
",
                    4 * i
                )
            })
            .collect();
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
                "let weight{half} = coopLoadT<coop_mat{SIDE}x{SIDE}<f16, A>>(&weights[mine * ROW + {}u], ROW);\n",
                half * SIDE
            );
        }
        for (half, j) in (0..2).flat_map(|half| (0..self.matrices()).map(move |j| (half, j))) {
            text += &format!(
                "let value_{half}_{j} = coopLoadT<coop_mat{SIDE}x{SIDE}<f16, B>>(&tile[{}u * PITCH + {}u], PITCH);
sum{j} = coopMultiplyAdd(weight{half}, value_{half}_{j}, sum{j});
",
                32 + half * SIDE,
                j * SIDE
            );
        }
        text
    }

    fn store(self) -> String {
        self.each_pair(|[j, next]| {
            let mut text = format!(
                "coopStoreT(sum{j}, &scores[mine * ROW], ROW);
coopStoreT(sum{next}, &scores[mine * ROW + {SIDE}u], ROW);
workgroupBarrier();
"
            );
            for i in 0..SCORED {
                text += &format!(
                    "{{
    let line = mine + lane / 8u + {}u;
    let out_row = first + line;
    let d = {}u + lane % 8u * 4u;
    if (out_row >= source && out_row < end) {{
        let to = out_row * args.out_stride + args.out_first + head * args.out_dim + d;
        let four = four_scores(line * ROW + lane % 8u * 4u);
        let factor = factors[line];
        for (var c = 0u; c < 4u; c++) {{
            if (d + c < args.out_dim) {{ out[to + c] = fma(four[c], factor.x, 0.0) / factor.y; }}
        }}
    }}
}}
",
                    4 * i,
                    j * SIDE
                );
            }
            text + "workgroupBarrier();\n"
        })
    }
}

/// A lane's scores, and their largest.
fn mask() -> String {
    (0..SCORED)
        .map(|i| {
            format!(
                "let token{i} = vec4<u32>(block * 32u + {}u + half * 4u) + vec4<u32>(0u, 1u, 2u, 3u);
let is_seen{i} = (token{i} >= vec4<u32>(my_start)) & (token{i} <= vec4<u32>(position));
let four{i} = select(vec4<f32>(NONE), four_scores(row * ROW + {}u + half * 4u), is_seen{i});
best = max(best, max(max(four{i}.x, four{i}.y), max(four{i}.z, four{i}.w)));
",
                8 * i,
                8 * i
            )
        })
        .collect()
}

/// A lane's weights, and the sum of what is left of them in f16.
fn weigh() -> String {
    (0..SCORED)
        .map(|i| {
            format!(
                "let weight_{i} = vec4<f16>(select(vec4<f32>(0.0), exp(four{i} - reference), is_seen{i}));
put_weights(row * ROW + {}u + half * 4u, weight_{i});
let rounded{i} = vec4<f32>(weight_{i});
sum += (rounded{i}.x + rounded{i}.y) + (rounded{i}.z + rounded{i}.w);
",
                8 * i
            )
        })
        .collect()
}
