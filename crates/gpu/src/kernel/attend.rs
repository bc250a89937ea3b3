//! WGSL of attention, for each kind and number format of cache.

use super::Access;

/// One compiled form of attention.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Attend {
    /// The cache has compressed vectors and rotated parts, otherwise keys and values.
    pub latent: bool,
    /// The cache has bytes with scales, otherwise f16.
    pub int8: bool,
}

/// Maximum width of keys and of values.
pub(crate) const MAX_KEY: usize = 1024;
pub(crate) const MAX_VALUE: usize = 512;

const THREADS: usize = 128;

/// Minimum tokens in a split of a row's attention.
const SPLIT_TOKENS: usize = 64;
/// Maximum splits of a row. A window or chunk may begin inside a split, which adds one.
const SPLITS: usize = 32;

/// Maximum splits of rows that attend to at most `longest` tokens, and at most `reach` of them.
pub(crate) fn splits_of(longest: usize, reach: Option<usize>) -> usize {
    let attended = reach.unwrap_or(longest).min(longest);
    attended.div_ceil(SPLIT_TOKENS).min(SPLITS) + usize::from(attended < longest)
}

/// The rule for what a token attends to.
pub(super) const VISIBLE: &str = include_str!("visible.wgsl");

/// A function that caps scores of WGSL's type `kind`.
pub(super) fn capped(kind: &str) -> String {
    include_str!("cap.wgsl").replace("$KIND", kind)
}

/// The rule for splits.
pub(super) fn split() -> String {
    include_str!("split.wgsl")
        .replace("$LEAST", &SPLIT_TOKENS.to_string())
        .replace("$SPLITS", &SPLITS.to_string())
}

/// Inserts the rules for splits and for what a token attends to into a kernel.
pub(super) fn with_split(text: &str) -> String {
    text.replace("$SPLIT", &(split() + VISIBLE))
}

/// Columns of a workgroup that combines splits.
pub(crate) const COMBINED: usize = 32;

/// With `levels`, a row must consist entirely of heads whose width is a multiple of a block's.
pub(super) fn combine(levels: bool) -> String {
    // For each column, 8 threads read the splits; with a window there may be one more.
    let reads = (SPLITS + 1).div_ceil(8);
    let (mut read, mut add) = (String::new(), String::new());
    for n in 0..reads {
        read += &format!(
            "let at{n} = source + min(first + {}u, count - 1u) * args.part_stride;
let both{n} = vec2<f32>(parts[at{n} + column], parts[at{n} + 1u]);
",
            8 * n
        );
        add += &format!(
            "let factor{n} = select(0.0, exp(most[first + {0}u] - largest), first + {0}u < count);
sum = fma(both{n}, vec2<f32>(factor{n}), sum);
",
            8 * n
        );
    }
    let [declare, keep, leave] = match levels {
        false => [String::new(), String::new(), String::new()],
        true => [
            format!(
                "@group(0) @binding(4) var<storage, read_write> levels_out: array<u32>;
@group(0) @binding(5) var<storage, read_write> scales_out: array<vec2<f32>>;
{}",
                super::Leaving::default().source()
            ),
            "left[thread] = value;".to_owned(),
            "leave_levels(row, (head * args.out_dim + id.z * 32u) / 32u, thread);".to_owned(),
        ],
    };
    let text = include_str!("combine.wgsl")
        .replace("$LEAVE", &declare)
        .replace("$KEEP", &keep)
        .replace("$LEVELS", &leave)
        .replace("$READS", &reads.to_string());
    with_split(&text.replace("$READ", &read).replace("$ADD", &add))
}

impl Attend {
    pub fn bindings(self) -> Vec<Access> {
        let mut all = vec![Access::Read; 7];
        all.push(Access::Write);
        if self.int8 {
            all.extend([Access::Read; 2]);
        }
        all
    }

    /// Numbers in a word of the cache.
    fn per_word(self) -> usize {
        if self.int8 { 4 } else { 2 }
    }

    /// Words of a value that a thread handles.
    fn words_of_thread(self) -> usize {
        MAX_VALUE / self.per_word() / THREADS
    }

    fn kind(self) -> &'static str {
        if self.int8 { "vec4<f32>" } else { "vec2<f32>" }
    }

    fn unpack(self, word: &str) -> String {
        if self.int8 { format!("vec4<f32>(unpack4xI8({word}))") } else { format!("unpack2x16float({word})") }
    }

    pub fn source(self) -> String {
        let text = with_split(include_str!("attend.wgsl")).replace("$CAP", &capped("f32"));
        let text = text.replace("$SCALES", if self.int8 { SCALES } else { "" });
        let text = text.replace("$QUERY", if self.latent { QUERY_LATENT } else { QUERY });
        let words = 0..self.words_of_thread();
        let each = |line: &dyn Fn(usize) -> String| words.clone().map(line).collect::<String>();
        let text = text.replace("$ZERO", &each(&|j| format!("var acc{j} = {}();\n", self.kind())));
        let text = text.replace("$SHRINK", &each(&|j| format!("acc{j} = acc{j} * shrink;\n")));
        let text = text.replace("$SCORE", &self.score());
        let text = text.replace("$VALUE", &self.value());
        let store = |place: &str, value: &str| {
            each(&|j| {
                (0..self.per_word())
                    .map(|c| {
                        let d = format!("(thread + {}u) * {}u + {c}u", j * THREADS, self.per_word());
                        let value = value.replace("ACC", &format!("acc{j}[{c}u]"));
                        format!("if ({d} < args.out_dim) {{ out[{place} + {d}] = {value}; }}\n")
                    })
                    .collect()
            })
        };
        let text = text.replace("$PARTIAL", &store("at + 2u", "ACC"));
        text.replace("$OUT", &store("at", "fma(ACC, factor, 0.0) / sum"))
    }

    /// Computes a quarter of a token's score into `partial`.
    fn score(self) -> String {
        let mut text = "var score = 0.0;\n".to_owned();
        let parts: &[[&str; 4]] = match self.latent {
            true => &[
                ["first", "args.first_words", "0u", "first_scales"],
                ["second", "args.second_words", "padded", "second_scales"],
            ],
            false => &[["first", "args.first_words", "0u", "first_scales"]],
        };
        for [buffer, words, from, scales] in parts {
            let per = self.per_word();
            let value = self.unpack(&format!("{buffer}[token * {words} + i]"));
            let components: Vec<_> = (0..per).map(|c| format!("query[at + {c}u]")).collect();
            let kind = self.kind();
            text += &format!(
                "{{ var sum = 0.0;
for (var i = thread % 4u; i < {words}; i += 4u) {{
    let at = {from} + i * {per}u;
    sum += dot({value}, {kind}({}));
}}
",
                components.join(", ")
            );
            let scale = if self.int8 { format!(" * {scales}[token]") } else { String::new() };
            text += &format!("score += sum{scale}; }}\n");
        }
        text + "partial[thread] = score;\n"
    }

    /// Adds a token's weighted value.
    fn value(self) -> String {
        let (buffer, words, scales) = match self.latent {
            true => ("first", "args.first_words", "first_scales"),
            false => ("second", "args.second_words", "second_scales"),
        };
        let scale = if self.int8 { format!(" * {scales}[vector + t]") } else { String::new() };
        let mut text = format!("let weight = weights[t]{scale};\n");
        for j in 0..self.words_of_thread() {
            let i = format!("(thread + {}u)", j * THREADS);
            let value = self.unpack(&format!("{buffer}[(vector + t) * {words} + {i}]"));
            let kind = self.kind();
            text += &format!("if ({i} < {words}) {{ acc{j} = fma({kind}(weight), {value}, acc{j}); }}\n");
        }
        text
    }
}

const SCALES: &str = "
@group(0) @binding(8) var<storage, read> first_scales: array<f32>;
@group(0) @binding(9) var<storage, read> second_scales: array<f32>;
";

const QUERY: &str = "
    let source = row * args.q_stride + args.q_first + head * args.q_head_stride;
    for (var i = thread; i < args.first_dim; i += 128u) { query[i] = queries[source + i]; }
";

const QUERY_LATENT: &str = "
    let absorbed_from = row * args.absorbed_stride + head * args.first_dim;
    for (var i = thread; i < args.first_dim; i += 128u) { query[i] = absorbed[absorbed_from + i]; }
    let source = row * args.q_stride + args.q_first + head * args.q_head_stride;
    for (var i = thread; i < args.second_dim; i += 128u) { query[padded + i] = queries[source + i]; }
";
