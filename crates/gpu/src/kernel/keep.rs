//! Kernels that prepare heads, and that store keys and values in a cache.

/// The rotation of a head's columns.
const ROTATE: &str = include_str!("rotate.wgsl");

pub(super) fn prepare() -> String {
    include_str!("prepare.wgsl").replace("$ROTATE", ROTATE)
}

pub(super) fn append(int8: bool) -> String {
    let scales = "@group(0) @binding(3) var<storage, read_write> cache_scales: array<f32>;";
    include_str!("append.wgsl").replace("$SCALES", if int8 { scales } else { "" }).replace(
        "$KEEP",
        &keep(int8, "x[source + ", ["cache[vector * words + i] = word;", "cache_scales[vector] = scale;"]),
    )
}

pub(super) fn prepare_append(int8: bool) -> String {
    let scales = "@group(0) @binding(7) var<storage, read_write> key_scales: array<f32>;
@group(0) @binding(8) var<storage, read_write> value_scales: array<f32>;";
    let word =
        "if (is_value) { values[vector * words + i] = word; } else { keys[vector * words + i] = word; }";
    let scale = "if (is_value) { value_scales[vector] = scale; } else { key_scales[vector] = scale; }";
    include_str!("prepare_append.wgsl")
        .replace("$ROTATE", ROTATE)
        .replace("$SCALES", if int8 { scales } else { "" })
        .replace("$KEEP", &keep(int8, "head[", [word, scale]))
}

pub(super) fn prepare_latent(int8: bool) -> String {
    let scales = "@group(0) @binding(7) var<storage, read_write> compressed_scales: array<f32>;
@group(0) @binding(8) var<storage, read_write> turned_scales: array<f32>;";
    let keep_part = |part: &str, from: &str| {
        let word = format!("{part}[vector * words + i] = word;");
        let scale = format!("{part}_scales[vector] = scale;");
        keep(int8, from, [&word, &scale])
    };
    include_str!("prepare_latent.wgsl")
        .replace("$ROTATE", ROTATE)
        .replace("$SCALES", if int8 { scales } else { "" })
        .replace("$KEEP_COMPRESSED", &keep_part("compressed", "head["))
        .replace("$KEEP_TURNED", &keep_part("turned", "head[args.rank + "))
}

/// Rounds a vector to a cache's format. `value` is an expression for its columns; the statements
/// `keep` store a word and its scale.
fn keep(int8: bool, value: &str, [word, scale]: [&str; 2]) -> String {
    let text = match int8 {
        false => include_str!("keep_f16.wgsl"),
        true => include_str!("keep_int8.wgsl"),
    };
    text.replace("$VALUE[", value).replace("$KEEP_WORD", word).replace("$KEEP_SCALE", scale)
}
