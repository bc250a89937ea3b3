//! WGSL of attention that reads keys and values once for all query heads of a KV head.

mod prepare;
mod scores;
mod values;
mod whole;

use super::Access;
use super::attend::{capped, with_split};
pub(crate) use whole::COUNTERS;

/// One compiled form of [`super::Kernel::AttendMany`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct AttendMany {
    /// Maximum query heads of a workgroup.
    pub heads: usize,
    /// Maximum units of a key or value.
    pub units: usize,
    /// The cache has bytes with scales, otherwise f16.
    pub int8: bool,
    /// The last workgroup of a row's heads adds the splits; otherwise [`super::Kernel::Combine`]
    /// does.
    pub whole: bool,
}

/// Numbers in a unit, which a thread reads from a vector at once.
pub(crate) const UNIT: usize = 8;

/// Query heads of the forms. More at a time were slower on an H100, although each group of heads
/// reads keys and values again (docs/lab/2026-11-26-gpu.md).
pub(crate) const HEADS: [usize; 3] = [1, 2, 4];
/// Units of the forms' vectors.
pub(crate) const UNITS: [usize; 3] = [8, 16, 32];

/// Flags of the arguments.
pub(crate) const PREPARES: u32 = 1;
pub(crate) const NORMS: u32 = 2;
pub(crate) const NEIGHBOURS: u32 = 4;
pub(crate) const SINKS: u32 = 8;
pub(crate) const LEAVES: u32 = 16;

const THREADS: usize = 256;
/// Threads that score a token.
const LANES: usize = 8;
/// Groups of tokens whose values are added separately.
const PIECES: usize = 8;

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
    /// The form for groups of at most `heads` query heads and vectors of these widths, if there is
    /// one. Larger groups are divided.
    pub fn of(heads: usize, widths: [usize; 2], int8: bool, whole: bool) -> Option<Self> {
        if widths.iter().any(|width| *width == 0 || width % UNIT != 0) {
            return None;
        }
        let units = widths[0].max(widths[1]) / UNIT;
        let units = UNITS.into_iter().find(|most| *most >= units)?;
        let heads = HEADS.into_iter().find(|most| *most >= heads).unwrap_or(HEADS[HEADS.len() - 1]);
        Some(Self { heads, units, int8, whole })
    }

    /// Every form.
    #[cfg(test)]
    pub fn all() -> impl Iterator<Item = Self> {
        let forms = |heads, units| {
            [(false, false), (false, true), (true, false), (true, true)].map(|(int8, whole)| Self {
                heads,
                units,
                int8,
                whole,
            })
        };
        HEADS.into_iter().flat_map(move |heads| UNITS.into_iter().flat_map(move |units| forms(heads, units)))
    }

    /// Whether the form can prepare queries and keys.
    pub fn can_prepare(self) -> bool {
        !self.int8
    }

    pub fn bindings(self) -> Vec<Access> {
        let cache = if self.can_prepare() { Access::Write } else { Access::Read };
        // Then the norms of queries and keys, or the scales of keys and values.
        let mut all = vec![Access::Read, Access::Read, Access::Read, cache, cache, Access::Write];
        all.extend([Access::Read; 2]);
        if self.whole {
            all.extend([Access::Write, Access::Read, Access::Write, Access::Write]);
        }
        all
    }

    /// Tokens that a workgroup processes at a time, so that their values fit in its memory.
    fn tokens(self) -> usize {
        if self.units > 16 { 32 } else { 64 }
    }

    /// Tokens that a thread scores.
    fn scored(self) -> usize {
        self.tokens() * LANES / THREADS
    }

    /// Units of a key that a thread reads.
    fn units_of_thread(self) -> usize {
        self.units / LANES
    }

    /// Tokens whose value a thread reads a unit of.
    fn reads(self) -> usize {
        self.tokens() * self.units / THREADS
    }

    /// Scores that a thread adds up.
    fn sums(self) -> usize {
        (self.heads * self.tokens()).div_ceil(THREADS)
    }

    /// Numbers in a word of the cache.
    fn per_word(self) -> usize {
        if self.int8 { 4 } else { 2 }
    }

    /// Maximum words of a value.
    fn words(self) -> usize {
        self.units * UNIT / self.per_word()
    }

    /// Words of all heads' results that the threads of a workgroup hold at once, and the number of
    /// such sets.
    fn items(self) -> (usize, usize) {
        let all = self.heads * self.words();
        (all.min(THREADS), all.div_ceil(THREADS))
    }

    /// Threads that share a word of the values: each adds it for some tokens and all heads.
    fn parts(self) -> usize {
        (THREADS / self.words()).min(PIECES)
    }

    pub fn source(self) -> String {
        let scores = LANES * (self.heads * self.tokens() + 4);
        let sums = self.heads * (self.per_word() * THREADS + self.parts());
        let pool = scores.max(self.tokens() * self.words()).max(sums) / 4;
        let cache = if self.can_prepare() { "read_write" } else { "read" };
        let mut bindings = scales(self.int8, 6);
        if self.can_prepare() {
            bindings += "@group(0) @binding(6) var<storage, read> query_norm: array<f32>;
@group(0) @binding(7) var<storage, read> key_norm: array<f32>;
";
        }
        let mut memory = String::new();
        if self.int8 {
            memory += "var<workgroup> of_values: array<vec4<f32>, TOKENS / 4u>;\n";
        }
        if self.can_prepare() {
            memory += "// The row's own key and value as the cache has them.
var<workgroup> own_key: array<vec4<u32>, UNITS>;
var<workgroup> own_value: array<vec4<u32>, UNITS>;
";
        }
        if self.whole {
            bindings += whole::BINDINGS;
            memory += &self.memory_of_whole();
        }
        let text = include_str!("attend_many.wgsl")
            .replace("$UNIT>", &format!("{}>", unit_type(self.int8)))
            .replace("$CACHE", cache)
            .replace("$PART", if self.whole { "atomic<u32>" } else { "f32" })
            .replace("$BINDINGS", &bindings)
            .replace("$MEMORY", &memory)
            .replace("$HEADS", &self.heads.to_string())
            .replace("$UNITS", &self.units.to_string())
            .replace("$TOKENS", &self.tokens().to_string())
            .replace("$POOL", &pool.to_string())
            .replace("$VARIABLES", &self.variables())
            .replace("$LOAD", &self.load())
            .replace("$QUERY", &self.queries())
            .replace("$STATE", &self.state())
            .replace("$FRESH", &self.fresh())
            .replace("$SCORE", &self.score())
            .replace("$SUM", &self.sum())
            .replace("$KEEP", &self.keep())
            .replace("$WEIGHT", &self.weight())
            .replace("$VALUE", &self.value())
            .replace("$STORE", &self.store())
            .replace("$FINISH", &if self.whole { self.add_splits() } else { String::new() });
        with_split(&text).replace("$CAP", &capped("f32"))
    }

    fn each(self, line: impl Fn(usize) -> String) -> String {
        (0..self.heads).map(line).collect()
    }

    /// Variables for a thread's reads of the cache.
    fn variables(self) -> String {
        let kind = unit_type(self.int8);
        let mut text = String::new();
        for t in 0..self.scored() {
            for i in 0..self.units_of_thread() {
                text += &format!("var key{t}_{i}: {kind};\n");
            }
            if self.int8 {
                text += &format!("var key_scale{t}: f32;\n");
            }
        }
        for i in 0..self.reads() {
            text += &format!("var value{i}: {kind};\n");
        }
        if self.int8 {
            text += "var value_scale: f32;\n";
        }
        text
    }

    /// The token that a thread reads for its `t`-th score, or its `i`-th value.
    fn scored_token(t: usize, last: &str) -> String {
        format!("clamp(base + thread / {LANES}u + {}u, start, {last})", t * THREADS / LANES)
    }

    fn read_token(self, i: usize, last: &str) -> String {
        format!("clamp(base + thread / UNITS + {}u, start, {last})", i * THREADS / self.units)
    }

    /// Reads a thread's part of keys and values. All loads come before the first use.
    fn load(self) -> String {
        let mut text = "{
let even = (tables[blocks + min(base / 32u, (end - 1u) / 32u)] * args.kv_heads + group.x) * 32u;
"
        .to_owned();
        let vector = if self.tokens() > 32 {
            text += "let odd = (tables[blocks + min(base / 32u + 1u, (end - 1u) / 32u)] * args.kv_heads + group.x) * 32u;\n";
            "select(even, odd, token - base >= 32u) + token % 32u"
        } else {
            "even + token % 32u"
        };
        for t in 0..self.scored() {
            text += &format!("{{ let token = {};\nlet vector = {vector};\n", Self::scored_token(t, "last"));
            for i in 0..self.units_of_thread() {
                let unit = format!("min(lane + {}u, key_units - 1u)", LANES * i);
                text += &format!("key{t}_{i} = keys[vector * key_units + {unit}];\n");
            }
            if self.int8 {
                text += &format!("key_scale{t} = key_scales[vector];\n");
            }
            text += "}\n";
        }
        for i in 0..self.reads() {
            text += &format!(
                "{{ let token = {};
let vector = {vector};
value{i} = values[vector * value_units + value_unit]; }}
",
                self.read_token(i, "last")
            );
        }
        if self.int8 {
            text += &format!(
                "{{ let token = clamp(base + thread % TOKENS, start, last);
let vector = {vector};
value_scale = value_scales[vector]; }}
"
            );
        }
        text + "}\n"
    }

    /// A thread's state over all turns.
    fn state(self) -> String {
        let (items, sets) = self.items();
        let (words, columns) = (self.words(), self.columns());
        let mut text: String = (0..self.sums()).map(|j| format!("var best{j} = NONE;\n")).collect();
        text += &format!(
            "let item = thread % {items}u;
let word = item % {words}u;
let part_of_thread = min(thread / {words}u, {}u);
",
            self.parts() - 1
        );
        for k in 0..sets {
            text += &format!(
                "let head{k} = (item + {}u) / {words}u;
var most{k} = NONE;
var total{k} = 0.0;
var acc{k} = {columns}(0.0);
",
                k * THREADS
            );
        }
        text
    }

    /// WGSL's type for the numbers of a word.
    fn columns(self) -> &'static str {
        if self.int8 { "vec4<f32>" } else { "vec2<f32>" }
    }

    /// Stores the values that a thread has read in workgroup memory.
    fn keep(self) -> String {
        let mut text = String::new();
        for i in 0..self.reads() {
            let first = i * THREADS;
            text += &match self.int8 {
                false => format!("pool[thread + {first}u] = value{i};\n"),
                true => format!(
                    "{{ let at = (thread + {first}u) / 2u;
let second = (thread + {first}u) % 2u * 2u;
pool[at][second] = value{i}.x;
pool[at][second + 1u] = value{i}.y; }}
"
                ),
            };
        }
        if self.int8 {
            text += "if (thread < TOKENS) { of_values[thread / 4u][thread % 4u] = value_scale; }\n";
        }
        text
    }

    /// Stores the results of a split, and begins the next split.
    fn store(self) -> String {
        let mut text = String::new();
        let store = |place: &str, value: &str| match self.whole {
            true => format!("atomicStore(&parts[{place}], bitcast<u32>({value}));\n"),
            false => format!("parts[{place}] = {value};\n"),
        };
        let first = if self.whole { format!("{COUNTERS}u + ") } else { String::new() };
        for k in 0..self.items().1 {
            text += &format!(
                "if (thread < {}u && head{k} < group.z && word * {per}u < args.value_dim) {{
    let place = (id.y * args.heads + group.y + head{k}) * args.splits + part;
    let at = {first}place * (args.value_dim + 2u);
",
                self.items().0,
                per = self.per_word()
            );
            for c in 0..self.per_word() {
                text += &store(
                    &format!("at + 2u + word * {}u + {c}u", self.per_word()),
                    &format!("acc{k}[{c}u]"),
                );
            }
            text += &format!(
                "if (word == 0u) {{\n{}{}}}\n}}\n",
                store("at", &format!("most{k}")),
                store("at + 1u", &format!("total{k}"))
            );
        }
        for k in 0..self.items().1 {
            text += &format!("most{k} = NONE;\ntotal{k} = 0.0;\nacc{k} = {}(0.0);\n", self.columns());
        }
        text + &(0..self.sums()).map(|j| format!("best{j} = NONE;\n")).collect::<String>()
    }
}
