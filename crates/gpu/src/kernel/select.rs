//! WGSL of attention to selected tokens: keys' scores, the choice of the largest, and attention to
//! a list of tokens.

use super::Access;
use super::attend::split;

/// Maximum width of an indexer's key.
pub(crate) const MAX_INDEX: usize = 128;

/// Keys that a workgroup scores.
pub(crate) const SCORED: usize = 32;

/// Threads of a workgroup that attends.
const THREADS: usize = 128;

/// Maximum columns of a value of a listed token.
pub(crate) const MAX_LISTED: usize = 512;

/// Blocks of keys, and keys, of a workgroup.
pub(crate) const BLOCKS_OF_GROUP: usize = 64;
pub(crate) const KEYS_OF_GROUP: usize = 256;

/// One compiled form.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Select {
    /// Scores of the keys that a row may select.
    Scores { int8: bool },
    /// The places of the largest scores of a row.
    Best,
    /// Latent attention to selected tokens.
    Attend { int8: bool },
    /// Attention to single tokens and to compressed ones.
    AttendBoth { int8: bool },
    /// Scores of blocks of keys.
    Blocks,
    /// Scores of keys in chosen blocks only.
    Within,
    /// Adds splits of such attention.
    Combine,
}

impl Select {
    #[cfg(test)]
    pub fn all() -> impl Iterator<Item = Self> {
        let by_format = [false, true]
            .into_iter()
            .flat_map(|int8| [Self::Scores { int8 }, Self::Attend { int8 }, Self::AttendBoth { int8 }]);
        by_format.chain([Self::Best, Self::Combine, Self::Blocks, Self::Within])
    }

    pub fn bindings(self) -> Vec<Access> {
        let (reads, scales) = match self {
            Self::Scores { int8 } => (5, if int8 { 2 } else { 0 }),
            Self::Attend { int8 } => (6, if int8 { 2 } else { 0 }),
            Self::AttendBoth { int8 } => (7, if int8 { 4 } else { 0 }),
            Self::Best | Self::Combine | Self::Within => (2, 0),
            Self::Blocks => (1, 0),
        };
        let mut all = vec![Access::Read; reads];
        all.push(Access::Write);
        all.extend(vec![Access::Read; scales]);
        all
    }

    pub fn source(self) -> String {
        match self {
            Self::Scores { int8 } => scores(int8),
            Self::Best => include_str!("select/best.wgsl").to_owned(),
            Self::Attend { int8 } => attend(false, int8),
            Self::AttendBoth { int8 } => attend(true, int8),
            Self::Blocks => include_str!("select/blocks.wgsl").to_owned(),
            Self::Within => include_str!("select/within.wgsl").to_owned(),
            Self::Combine => include_str!("select/combine.wgsl").to_owned(),
        }
    }
}

/// Numbers in a word of a cache.
const fn per_word(int8: bool) -> usize {
    if int8 { 4 } else { 2 }
}

fn kind(int8: bool) -> &'static str {
    if int8 { "vec4<f32>" } else { "vec2<f32>" }
}

fn unpack(int8: bool, word: &str) -> String {
    if int8 { format!("vec4<f32>(unpack4xI8({word}))") } else { format!("unpack2x16float({word})") }
}

fn declare_scales(first: usize, names: &[&str]) -> String {
    let declare = |(index, name): (usize, &&str)| {
        format!("@group(0) @binding({}) var<storage, read> {name}: array<f32>;\n", first + index)
    };
    names.iter().enumerate().map(declare).collect()
}

fn scores(int8: bool) -> String {
    let per = per_word(int8);
    let mut keep = String::new();
    // The first half of a key, then the second.
    for (buffer, width, words, from) in [
        ("first", "args.first_dim", "args.first_words", "0u"),
        ("second", "args.second_dim", "args.second_words", "args.first_dim"),
    ] {
        let value = unpack(int8, &format!("{buffer}[vector * {words} + i]"));
        let scale = if int8 { format!(" * {buffer}_scales[vector]") } else { String::new() };
        keep +=
            &format!("for (var i = thread / 32u; i < {words}; i += 8u) {{\nlet value = {value}{scale};\n");
        for c in 0..per {
            keep += &format!(
                "if (i * {per}u + {c}u < {width}) {{ keys[key * PITCH + {from} + i * {per}u + {c}u] = value[{c}u]; }}\n"
            );
        }
        keep += "}\n";
    }
    let scales = declare_scales(6, &["first_scales", "second_scales"]);
    include_str!("select/scores.wgsl")
        .replace("$SCALES", if int8 { &scales } else { "" })
        .replace("$PITCH", &(MAX_INDEX + 1).to_string())
        .replace("$PLACE", include_str!("select/place.wgsl"))
        .replace("$KEEP", &keep)
}

/// Attention to selected tokens of one cache, or to tokens of two caches (`both`), whose vectors
/// are keys and values.
fn attend(both: bool, int8: bool) -> String {
    let (per, kind) = (per_word(int8), kind(int8));
    let score = |first: &str, second: &str| -> String {
        [(first, "args.first_words", "0u"), (second, "args.second_words", "padded")]
            .map(|(buffer, words, from)| {
                let value = unpack(int8, &format!("{buffer}[token * {words} + i]"));
                let components: Vec<_> = (0..per).map(|c| format!("query[at + {c}u]")).collect();
                let scale = if int8 { format!(" * {buffer}_scales[token]") } else { String::new() };
                format!(
                    "{{ var sum = 0.0;
for (var i = thread % 4u; i < {words}; i += 4u) {{
    let at = {from} + i * {per}u;
    sum += dot({value}, {kind}({}));
}}
score += sum{scale}; }}
",
                    components.join(", ")
                )
            })
            .concat()
    };
    let words: Vec<_> =
        (0..MAX_LISTED / per / THREADS).map(|j| format!("(thread + {}u)", j * THREADS)).collect();
    // Adds words of a token's weighted vector.
    let value = |first: &str, second: Option<&str>| -> String {
        let mut text = String::new();
        for (j, i) in words.iter().enumerate() {
            let add = |buffer: &str, words: &str, i: &str| {
                let value = unpack(int8, &format!("{buffer}[token * {words} + {i}]"));
                let scale = if int8 { format!(" * {buffer}_scales[token]") } else { String::new() };
                format!("acc{j} = fma({kind}(weights[t]{scale}), {value}, acc{j});")
            };
            text += &format!("if ({i} < args.first_words) {{ {} }}\n", add(first, "args.first_words", i));
            if let Some(second) = second {
                text += &format!(
                    "else if ({i} < args.first_words + args.second_words) {{ {} }}\n",
                    add(second, "args.second_words", &format!("({i} - args.first_words)"))
                );
            }
        }
        text
    };
    let [mut zero, mut shrink, mut store] = [const { String::new() }; 3];
    for (j, i) in words.iter().enumerate() {
        zero += &format!("var acc{j} = {kind}();\n");
        shrink += &format!("acc{j} = acc{j} * shrink;\n");
        for c in 0..per {
            let d = format!("{i} * {per}u + {c}u");
            let keep = |column: &str| format!("{{ parts[at + 2u + {column}] = acc{j}[{c}u]; }}");
            store += &format!("if ({d} < args.first_dim) {}\n", keep(&d));
            if both {
                let second = format!("({d} - args.first_words * {per}u)");
                store += &format!(
                    "else if ({i} >= args.first_words && {second} < args.second_dim) {}\n",
                    keep(&format!("args.first_dim + {second}"))
                );
            }
        }
    }
    let [memory, count, query, find] = match both {
        false => [include_str!("select/selected.wgsl"), SELECTED_COUNT, SELECTED_QUERY, SELECTED_FIND],
        true => [include_str!("select/both.wgsl"), BOTH_COUNT, BOTH_QUERY, BOTH_FIND],
    };
    let of_both =
        |single: String, more: String| format!("if (number < in_window) {{\n{single}}} else {{\n{more}}}");
    let (score, value) = match both {
        false => (score("first", "second"), value("first", None)),
        true => (
            of_both(score("first", "second"), score("more_first", "more_second")),
            of_both(value("first", Some("second")), value("more_first", Some("more_second"))),
        ),
    };
    let scales = match both {
        false => declare_scales(7, &["first_scales", "second_scales"]),
        true => {
            declare_scales(8, &["first_scales", "second_scales", "more_first_scales", "more_second_scales"])
        }
    };
    let text = include_str!("select/attend.wgsl")
        .replace("$MEMORY", memory)
        .replace("$SCALES", if int8 { &scales } else { "" })
        .replace("$PLACE", include_str!("select/place.wgsl"))
        .replace("$COUNT", count)
        .replace("$QUERY", query)
        .replace("$FIND", find)
        .replace("$ZERO", &zero)
        .replace("$SCORE", &score)
        .replace("$SHRINK", &shrink)
        .replace("$VALUE", &value)
        .replace("$STORE", &store);
    text.replace("$SPLIT", &split())
}

pub(super) const SELECTED_COUNT: &str = "let count = u32(selection[list]);";

const SELECTED_QUERY: &str = "let absorbed_from = row * args.absorbed_stride + head * args.first_dim;
    for (var i = thread; i < args.first_dim; i += 128u) { query[i] = absorbed[absorbed_from + i]; }
    let source = row * args.q_stride + args.q_first + head * args.q_head_stride;
    for (var i = thread; i < args.second_dim; i += 128u) { query[padded + i] = queries[source + i]; }";

pub(super) const SELECTED_FIND: &str =
    "places[thread] = place_of(u32(selection[list + 1u + number]), 1u, blocks);";

pub(super) const BOTH_COUNT: &str = "let position = tables[args.table + row * 4u];
    let in_window = min(position + 1u, args.window);
    var count = in_window;
    if (args.selects == 1u) {
        count += u32(selection[list]);
    } else if (args.every > 0u) {
        count += (position + 1u) / args.every;
    }";

const BOTH_QUERY: &str = "let source = row * args.q_stride + head * (args.first_dim + args.second_dim);
    for (var i = thread; i < args.first_dim; i += 128u) { query[i] = queries[source + i]; }
    for (var i = thread; i < args.second_dim; i += 128u) {
        query[padded + i] = queries[source + args.first_dim + i];
    }";

pub(super) const BOTH_FIND: &str = "if (number < in_window) {
                places[thread] = place_of(position + 1u - in_window + number, 1u, blocks);
            } else {
                var entry = number - in_window;
                if (args.selects == 1u) { entry = u32(selection[list + 1u + entry]); }
                places[thread] = place_of(entry, args.every, blocks);
            }";
