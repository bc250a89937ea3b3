//! WGSL of attention that reads keys and values once for all query heads of a KV head.

use super::Access;
use super::attend::with_split;

/// One compiled form of [`super::Kernel::AttendMany`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct AttendMany {
    /// Query heads of a workgroup, at most.
    pub heads: usize,
    /// Units of a key or value, at most.
    pub units: usize,
    /// The cache has bytes with scales, else f16.
    pub int8: bool,
}

/// Numbers of a unit: what a thread reads of a vector at once.
pub(crate) const UNIT: usize = 8;

/// Query heads of forms.
pub(crate) const HEADS: [usize; 4] = [1, 2, 4, 8];
/// Units of vectors of forms.
pub(crate) const UNITS: [usize; 3] = [8, 16, 32];

const THREADS: usize = 256;
/// Threads that score a token.
const LANES: usize = 8;
/// Tokens that a thread scores.
const SCORED: usize = 64 * LANES / THREADS;
/// Numbers from a component of threads' sums to the next: threads read different banks.
const PITCH: usize = THREADS + 4;
/// Components that a thread leaves for a head: a unit and the sum of weights.
const COMPONENTS: usize = UNIT + 1;

/// WGSL's type of a unit of a cache.
pub(super) fn unit_type(int8: bool) -> &'static str {
    if int8 { "vec2<u32>" } else { "vec4<u32>" }
}

/// The first and the second half of a unit as floats.
pub(super) fn unpack(int8: bool, unit: &str) -> [String; 2] {
    let half = |[a, b]: [&str; 2], byte: &str| match int8 {
        true => format!("vec4<f32>(unpack4xI8({unit}.{byte}))"),
        false => format!("vec4<f32>(unpack2x16float({unit}.{a}), unpack2x16float({unit}.{b}))"),
    };
    [half(["x", "y"], "x"), half(["z", "w"], "y")]
}

/// The declarations of both caches' scales, from a binding on.
pub(super) fn scales(int8: bool, binding: usize) -> String {
    let line = |binding: usize, name: &str| {
        format!("@group(0) @binding({binding}) var<storage, read> {name}_scales: array<f32>;\n")
    };
    if int8 { line(binding, "key") + &line(binding + 1, "value") } else { String::new() }
}

impl AttendMany {
    /// The form for groups of at most `heads` query heads and vectors of these widths; `None`: it
    /// has none. Larger groups are divided.
    pub fn of(heads: usize, widths: [usize; 2], int8: bool) -> Option<Self> {
        if widths.iter().any(|width| *width == 0 || width % UNIT != 0) {
            return None;
        }
        let units = widths[0].max(widths[1]) / UNIT;
        let units = UNITS.into_iter().find(|most| *most >= units)?;
        let heads = HEADS.into_iter().find(|most| *most >= heads).unwrap_or(HEADS[HEADS.len() - 1]);
        Some(Self { heads, units, int8 })
    }

    /// Every form.
    #[cfg(test)]
    pub fn all() -> impl Iterator<Item = Self> {
        let of = |heads| UNITS.map(|units| [false, true].map(|int8| Self { heads, units, int8 }));
        HEADS.into_iter().flat_map(of).flatten()
    }

    pub fn bindings(self) -> Vec<Access> {
        let mut all = vec![Access::Read; 5];
        all.push(Access::Write);
        if self.int8 {
            all.extend([Access::Read; 2]);
        }
        all
    }

    /// Units of a key that a thread reads.
    fn units_of_thread(self) -> usize {
        self.units / LANES
    }

    /// Tokens whose values a thread reads at once.
    fn reads(self) -> usize {
        64 * self.units / THREADS
    }

    /// Heads whose threads' sums are added at once.
    fn heads_at_once(self) -> usize {
        (THREADS / (self.units * UNIT)).min(self.heads).min(2)
    }

    pub fn source(self) -> String {
        let pool = (LANES * (self.heads * 64 + 4)).max(self.heads_at_once() * COMPONENTS * PITCH);
        let text = include_str!("attend_many.wgsl")
            .replace("$UNIT>", &format!("{}>", unit_type(self.int8)))
            .replace("$SCALES", &scales(self.int8, 6))
            .replace("$HEADS", &self.heads.to_string())
            .replace("$UNITS", &self.units.to_string())
            .replace("$POOL", &pool.to_string())
            .replace("$STATE", &self.state())
            .replace("$LOAD", &self.load())
            .replace("$SCORE", &self.score())
            .replace("$WEIGHT", &self.weight())
            .replace("$VALUE", &self.value())
            .replace("$FINISH", &self.finish());
        with_split(&text)
    }

    fn each(self, line: impl Fn(usize) -> String) -> String {
        (0..self.heads).map(line).collect()
    }

    fn state(self) -> String {
        self.each(|h| {
            format!(
                "var most{h} = NONE;\nvar total{h} = 0.0;\nvar low{h} = vec4<f32>(0.0);\nvar high{h} = vec4<f32>(0.0);\n"
            )
        })
    }

    /// Reads a thread's part of a key and of some values: all at once, before any is waited for.
    fn load(self) -> String {
        let mut text = String::new();
        for t in 0..SCORED {
            text += &format!(
                "let scored{t} = clamp(base + thread / {LANES}u + {}u, start, end - 1u);
let key_vector{t} = select(even, odd, scored{t} - base >= 32u) + scored{t} % 32u;
",
                t * THREADS / LANES
            );
            for i in 0..self.units_of_thread() {
                let unit = format!("min(lane + {}u, args.key_units - 1u)", LANES * i);
                text += &format!("let key{t}_{i} = keys[key_vector{t} * args.key_units + {unit}];\n");
            }
            if self.int8 {
                text += &format!("let key_scale{t} = key_scales[key_vector{t}];\n");
            }
        }
        for i in 0..self.reads() {
            let token =
                format!("clamp(base + thread / UNITS + {}u, start, end - 1u)", i * THREADS / self.units);
            text += &format!(
                "let token{i} = {token};
let vector{i} = select(even, odd, token{i} - base >= 32u) + token{i} % 32u;
let value{i} = values[vector{i} * args.value_units + value_unit];
"
            );
            if self.int8 {
                text += &format!("let value_scale{i} = value_scales[vector{i}];\n");
            }
        }
        text
    }

    /// A thread's share of two tokens' scores, to `pool`.
    fn score(self) -> String {
        let each_token = |line: &dyn Fn(usize) -> String| (0..SCORED).map(line).collect::<String>();
        let mut text = each_token(&|t| self.each(|h| format!("var score{t}_{h} = 0.0;\n")));
        for i in 0..self.units_of_thread() {
            text += "{\n";
            text += &each_token(&|t| {
                let [low, high] = unpack(self.int8, &format!("key{t}_{i}"));
                format!("let low{t} = {low};\nlet high{t} = {high};\n")
            });
            text += &self.each(|h| {
                let at = format!("({}u + lane + {}u) * 2u", h * self.units, LANES * i);
                let mut text = format!("{{ let a = query[{at}];\nlet b = query[{at} + 1u];\n");
                for t in 0..SCORED {
                    for (half, of_query) in [("low", "a"), ("high", "b")] {
                        for c in ["x", "y", "z", "w"] {
                            let score = format!("score{t}_{h}");
                            text += &format!("{score} = fma({half}{t}.{c}, {of_query}.{c}, {score});\n");
                        }
                    }
                }
                text + "}\n"
            });
            text += "}\n";
        }
        text + &each_token(&|t| {
            let scale = if self.int8 { format!(" * key_scale{t}") } else { String::new() };
            self.each(|h| {
                let first = h * 64 + t * THREADS / LANES;
                format!("pool[lane * LANE + {first}u + thread / {LANES}u] = score{t}_{h}{scale};\n")
            })
        })
    }

    /// The new maxima, and the tokens' weights.
    fn weight(self) -> String {
        let mut text = self.each(|h| {
            let all: Vec<_> = (0..8).map(|i| format!("best[{}u]", 8 * h + i)).collect();
            let [a, b, c, d] = [0, 2, 4, 6].map(|i| format!("max({}, {})", all[i], all[i + 1]));
            format!(
                "let next{h} = max(most{h}, max(max({a}, {b}), max({c}, {d})));
let shrink{h} = exp(most{h} - next{h});
most{h} = next{h};
"
            )
        });
        let (threads, at_once) = (self.heads.min(4) * 64, self.heads.min(4));
        text += &format!("if (thread < {threads}u) {{\n");
        for first in (0..self.heads).step_by(4) {
            text += &format!("{{ var most = most{first};\n");
            for h in 1..at_once {
                text += &format!("most = select(most, most{}, thread / 64u == {h}u);\n", first + h);
            }
            text += &format!(
                "let score = scores[{0}u + thread];
scores[{0}u + thread] = select(0.0, exp(score - most), score > NONE); }}
",
                first * 64
            );
        }
        text + "}\n"
    }

    /// Adds a thread's values.
    fn value(self) -> String {
        let mut text =
            self.each(|h| format!("low{h} = low{h} * shrink{h};\nhigh{h} = high{h} * shrink{h};\n"));
        for i in 0..self.reads() {
            let [low, high] = unpack(self.int8, &format!("value{i}"));
            text += &format!("{{ let low = {low};\nlet high = {high};\n");
            let token = format!("thread / UNITS + {}u", i * THREADS / self.units);
            text += &self.each(|h| {
                let sum = if i == 0 {
                    format!("fma(total{h}, shrink{h}, weight)")
                } else {
                    format!("total{h} + weight")
                };
                let scale = if self.int8 { format!(" * value_scale{i}") } else { String::new() };
                format!(
                    "{{ let weight = scores[{}u + {token}];
total{h} = {sum};
let factor = vec4<f32>(weight{scale});
low{h} = fma(factor, low, low{h});
high{h} = fma(factor, high, high{h}); }}
",
                    h * 64
                )
            });
            text += "}\n";
        }
        text
    }

    /// Adds the threads' sums and stores them.
    fn finish(self) -> String {
        let at_once = self.heads_at_once();
        let outputs = self.units * UNIT;
        let mut text = format!("let turn = thread / {outputs}u;\nlet d = thread % {outputs}u;\n");
        for first in (0..self.heads).step_by(at_once) {
            text += "workgroupBarrier();\n";
            for (turn, h) in (first..first + at_once).enumerate() {
                let mut store = |component: usize, value: String| {
                    let at = (turn * COMPONENTS + component) * PITCH;
                    text += &format!("pool[{at}u + thread] = {value};\n");
                };
                for (c, name) in ["x", "y", "z", "w"].into_iter().enumerate() {
                    store(c, format!("low{h}.{name}"));
                    store(c + 4, format!("high{h}.{name}"));
                }
                store(UNIT, format!("total{h}"));
            }
            let most = match at_once {
                1 => format!("most{first}"),
                _ => format!("select(most{first}, most{}, turn == 1u)", first + 1),
            };
            text += &format!(
                "workgroupBarrier();
if (turn < {at_once}u && {first}u + turn < group.z) {{
    let place = (id.y * args.heads + group.y + {first}u + turn) * args.splits + id.z;
    let at = place * (args.out_dim + 2u);
    let of_turn = turn * {COMPONENTS}u * PITCH;
    if (d < args.out_dim) {{
        var sum = 0.0;
        let first = of_turn + d % 8u * PITCH + d / 8u;
        for (var i = 0u; i < 256u / UNITS; i++) {{ sum += pool[first + i * UNITS]; }}
        parts[at + 2u + d] = sum;
    }}
    if (d == 0u) {{
        var sum = 0.0;
        for (var i = 0u; i < 256u / UNITS; i++) {{ sum += pool[of_turn + 8u * PITCH + i * UNITS]; }}
        parts[at] = {most};
        parts[at + 1u] = sum;
    }}
}}
"
            );
        }
        text
    }
}
