//! The end of [`AttendMany`] if the last workgroup of a row's heads adds the splits. Results of
//! splits are atomic, so that all workgroups see the same. A counter at the start of the same
//! buffer tells which workgroup is the last.

use super::super::Leaving;
use super::{AttendMany, THREADS, UNIT};

/// Words for counters before the results of splits: rows times groups of heads, at most.
pub(crate) const COUNTERS: usize = 64 << 10;

/// Quads of results that can be stored as levels: one for each thread.
const LEAVING_QUADS: usize = THREADS;

/// Number of splits that there is space for; at most 33 are used.
const PLACES: usize = 48;

pub(super) const BINDINGS: &str = "@group(0) @binding(8) var<storage, read_write> out: array<f32>;
@group(0) @binding(9) var<storage, read> sinks: array<f32>;
@group(0) @binding(10) var<storage, read_write> levels_out: array<u32>;
@group(0) @binding(11) var<storage, read_write> scales_out: array<vec2<f32>>;
";

impl AttendMany {
    /// Quads of all heads' results.
    fn quads(self) -> usize {
        self.heads * self.units * UNIT / 4
    }

    /// Whether results can also be stored as levels.
    pub fn can_leave(self) -> bool {
        self.whole && self.quads() <= LEAVING_QUADS
    }

    pub(super) fn memory_of_whole(self) -> String {
        let mut text = "// Splits of the row's heads that were ready before.
var<workgroup> arrived: u32;
"
        .to_owned();
        if self.can_leave() {
            text += "var<private> left_quads: u32;\n";
            text += &Leaving {
                quads: self.quads(),
                used: "left_quads",
                value: Some("query[quad]"),
                ..Default::default()
            }
            .source();
        }
        text
    }

    /// Splits that a thread reads at once.
    fn splits_at_once(self) -> usize {
        16 / self.items().1
    }

    /// Loads some splits, starting at `first`.
    fn ask_splits(self, first: &str) -> String {
        let mut text = String::new();
        for s in 0..self.splits_at_once() {
            text += &format!("let split{s} = min({first} + {s}u, count - 1u) * pitch;\n");
            for k in 0..self.items().1 {
                let load = |at: &str| format!("bitcast<f32>(atomicLoad(&parts[place{k} + split{s} + {at}]))");
                let numbers: Vec<_> =
                    (0..self.per_word()).map(|c| load(&format!("column_of_part + {c}u"))).collect();
                text += &format!(
                    "let values{s}_{k} = {}({});
let sum{s}_{k} = {};
",
                    self.columns(),
                    numbers.join(", "),
                    load("1u")
                );
            }
        }
        text
    }

    /// Adds the loaded splits.
    fn take_splits(self, first: &str) -> String {
        let mut text = String::new();
        for k in 0..self.items().1 {
            for s in 0..self.splits_at_once() {
                let quad = s / 4;
                if s % 4 == 0 {
                    text += &format!(
                        "let factors{quad}_{k} = exp(scores[head{k} * 16u + {first} / 4u + {quad}u] - vec4<f32>(largest{k}));\n"
                    );
                }
                let factor = format!("factors{quad}_{k}.{}", ["x", "y", "z", "w"][s % 4]);
                text += &format!(
                    "result{k} = fma({}({factor}), values{s}_{k}, result{k});
divisor{k} = fma({factor}, sum{s}_{k}, divisor{k});
",
                    self.columns()
                );
            }
        }
        text
    }

    pub(super) fn add_splits(self) -> String {
        let (items, sets) = self.items();
        let (per, columns) = (self.per_word(), self.columns());
        let all = self.heads * PLACES;
        let mut text = "// The results must be there before the count says so.
storageBarrier();
let counter = id.y * workgroups.x + id.x;
let own = parts_end - first_part;
if (thread == 0u) { arrived = atomicAdd(&parts[counter], own); }
let count = (all - 1u) / size + 1u - visible / size;
if (workgroupUniformLoad(&arrived) + own < count) { return; }
storageBarrier();
if (thread == 0u) { atomicStore(&parts[counter], 0u); }
let pitch = args.value_dim + 2u;
let column_of_part = 2u + min(word * PERu, args.value_dim - PERu);
"
        .replace("PERu", &format!("{per}u"));
        let place = |head: &str| {
            format!(
                "{COUNTERS}u + (id.y * args.heads + group.y + min({head}, group.z - 1u)) * args.splits * pitch"
            )
        };
        for k in 0..sets {
            text += &format!("let place{k} = {};\n", place(&format!("head{k}")));
        }
        for j in 0..all.div_ceil(THREADS) {
            text += &format!(
                "{{ let i = min(thread + {}u, {}u);
let head = i / {PLACES}u;
let split = i % {PLACES}u;
let most = bitcast<f32>(atomicLoad(&parts[{} + min(split, count - 1u) * pitch]));
scores[head * 16u + split / 4u][split % 4u] = select(NONE, most, split < count); }}
",
                j * THREADS,
                all - 1,
                place("head")
            );
        }
        let first = self.ask_splits("0u");
        text += &first;
        text += "workgroupBarrier();\n";
        for k in 0..sets {
            let most = (1..PLACES / 4).fold(format!("scores[head{k} * 16u]"), |all, q| {
                format!("max({all}, scores[head{k} * 16u + {q}u])")
            });
            text += &format!(
                "let four{k} = {most};
var largest{k} = max(max(four{k}.x, four{k}.y), max(four{k}.z, four{k}.w));
var result{k} = {columns}(0.0);
var divisor{k} = 0.0;
let of_head{k} = group.y + min(head{k}, group.z - 1u);
if ((args.flags & SINKS) != 0u) {{ largest{k} = max(largest{k}, sinks[of_head{k}]); }}
"
            );
        }
        text += &format!("{{\n{}}}\n", self.take_splits("0u"));
        let at_once = self.splits_at_once();
        text += &format!(
            "for (var first = {at_once}u; first < count; first += {at_once}u) {{\n{}{}}}\n",
            self.ask_splits("first"),
            self.take_splits("first")
        );
        for k in 0..sets {
            text += &format!(
                "if ((args.flags & SINKS) != 0u) {{ divisor{k} += exp(sinks[of_head{k}] - largest{k}); }}
if (thread < {items}u && head{k} < group.z && word * {per}u < args.value_dim) {{
    let result = result{k} / divisor{k};
    let column = head{k} * args.value_dim + word * {per}u;
    let to = row * args.out_stride + args.out_first + group.y * args.value_dim + column;
"
            );
            for c in 0..per {
                text += &format!("out[to + {c}u] = result[{c}u];\n");
                if self.can_leave() {
                    text += &format!("query[column / 4u][column % 4u + {c}u] = result[{c}u];\n");
                }
            }
            text += "}\n";
        }
        if self.can_leave() {
            text += "if ((args.flags & LEAVES) != 0u) {
    left_quads = group.z * args.value_dim / 4u;
    leave_levels(row, group.y * args.value_dim / 32u, thread);
}
";
        }
        text
    }
}
