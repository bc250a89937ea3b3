//! WGSL that reads packed matrices. Its text depends on the [`Format`].

use std::fmt::Write;

use thunder_compute::Float;

use crate::format::{Elements, Format, Scales};

/// Declares the buffers of a matrix, from binding `first` on. Words are read in vectors that are as
/// wide as a block allows.
pub(super) fn declare(format: Format, first: usize) -> String {
    let mut text = String::new();
    let words = format.words();
    let planes = words.len();
    for (plane, words) in words.into_iter().enumerate() {
        let kind = match words {
            1 => "u32",
            2 => "vec2<u32>",
            _ => "vec4<u32>",
        };
        let binding = first + plane;
        line(
            &mut text,
            format_args!("@group(0) @binding({binding}) var<storage, read> plane{plane}: array<{kind}>;"),
        );
    }
    if format.has_scales() {
        let kind = if format.scales == Scales::F32 { "vec2<f32>" } else { "u32" };
        let binding = first + planes;
        line(
            &mut text,
            format_args!("@group(0) @binding({binding}) var<storage, read> scales: array<{kind}>;"),
        );
        let value = match format.scales {
            Scales::F16 => "unpack2x16float(stored)",
            Scales::BF16 => "bitcast<vec2<f32>>(vec2<u32>(stored << 16u, stored & 0xffff0000u))",
            Scales::None | Scales::F32 => "stored",
        };
        // 8-bit levels are stored minus 128, which the offset does not include.
        let offset = if format.elements == Elements::Levels(8) { "fma(128.0, s.x, s.y)" } else { "s.y" };
        line(
            &mut text,
            format_args!(
                "fn scale_from(stored: {kind}) -> vec2<f32> {{ let s = {value}; return vec2<f32>(s.x, {offset}); }}
fn scale_of(group: u32) -> vec2<f32> {{ return scale_from(scales[group]); }}"
            ),
        );
    }
    text
}

/// Variables for what [`fetch`] loads, so that a block can be loaded long before its use.
pub(super) fn variables(format: Format, name: &str) -> String {
    let mut text = String::new();
    for (plane, words) in format.words().into_iter().enumerate() {
        let kind = match words {
            1 => "u32",
            2 => "vec2<u32>",
            _ => "vec4<u32>",
        };
        for v in 0..words.div_ceil(4) {
            line(&mut text, format_args!("var {name}_{plane}_{v}: {kind};"));
        }
    }
    if format.has_scales() {
        let kind = if format.scales == Scales::F32 { "vec2<f32>" } else { "u32" };
        for half in 0..=usize::from(format.halves) {
            line(&mut text, format_args!("var {name}_stored{half}: {kind};"));
        }
    }
    text
}

/// Statements that load block `block` and its scales into [`variables`], without decoding.
pub(super) fn fetch(format: Format, name: &str, block: &str) -> String {
    let mut text = load(format, name, block).replace("let ", "");
    if format.has_scales() {
        for half in 0..=usize::from(format.halves) {
            let group = group(format, block, half);
            line(&mut text, format_args!("{name}_stored{half} = scales[{group}];"));
        }
    }
    text
}

/// Names what [`load`] would load `name`, of what [`fetch`] has loaded.
pub(super) fn copy(format: Format, name: &str, fetched: &str) -> String {
    let mut text = String::new();
    for (plane, words) in format.words().into_iter().enumerate() {
        for v in 0..words.div_ceil(4) {
            line(&mut text, format_args!("let {name}_{plane}_{v} = {fetched}_{plane}_{v};"));
        }
    }
    text
}

/// Statements that define `{name}_scale{half}` and `{name}_offset{half}` of a fetched block, for
/// [`weights`]. Both are multiplied with `factor`.
pub(super) fn scales(format: Format, name: &str, factor: &str) -> String {
    let mut text = String::new();
    if format.has_scales() {
        for half in 0..=usize::from(format.halves) {
            // `weights` makes 8-bit levels unsigned, so 128 scales are added to the exponent's
            // 1024.
            let lift = if format.elements == Elements::Levels(8) { "1152.0" } else { "1024.0" };
            line(
                &mut text,
                format_args!(
                    "let {name}_pair{half} = scale_from({name}_stored{half}) * {factor};
let {name}_scale{half} = vec4<f32>({name}_pair{half}.x);
let {name}_offset{half} = vec4<f32>(fma(-{lift}, {name}_pair{half}.x, {name}_pair{half}.y));"
                ),
            );
        }
    }
    text
}

/// Four weights of a fetched block as `vec4<f32>`, times `factor`.
pub(super) fn weights(format: Format, name: &str, quad_index: usize, factor: &str) -> String {
    if !format.has_scales() {
        return format!("{} * {factor}", quad(format, name, quad_index));
    }
    let flip = if format.elements == Elements::Levels(8) { " ^ 0x80808080u" } else { "" };
    let levels = format!("(({}){flip})", bytes(format, name, quad_index));
    let half = if format.halves { quad_index / 4 } else { 0 };
    // An f16 with these upper bits has the value 1024 + level. This is cheaper than converting an
    // integer.
    format!(
        "fma(vec4<f32>(unpack2x16float(({levels} & 0x00ff00ffu) | 0x64006400u), \
         unpack2x16float((({levels} >> 8u) & 0x00ff00ffu) | 0x64006400u)).xzyw, \
         {name}_scale{half}, {name}_offset{half})"
    )
}

/// Number of buffers that [`declare`] declares.
pub(super) fn buffers(format: Format) -> usize {
    format.words().len() + usize::from(format.has_scales())
}

fn line(text: &mut String, arguments: std::fmt::Arguments<'_>) {
    let written = writeln!(text, "{arguments}");
    debug_assert!(written.is_ok(), "a string takes all text");
}

/// Statements that load block `block` (an expression) into names that begin with `name`.
pub(super) fn load(format: Format, name: &str, block: &str) -> String {
    let mut text = String::new();
    for (plane, words) in format.words().into_iter().enumerate() {
        let vectors = words.div_ceil(4);
        for v in 0..vectors {
            let at = if vectors == 1 { block.to_owned() } else { format!("{block} * {vectors}u + {v}u") };
            line(&mut text, format_args!("let {name}_{plane}_{v} = plane{plane}[{at}];"));
        }
    }
    text
}

/// Word `word` of a plane of the block that [`load`] loaded.
fn word(format: Format, name: &str, plane: usize, word: usize) -> String {
    let component = ["x", "y", "z", "w"][word % 4];
    match format.words()[plane] {
        1 => format!("{name}_{plane}_0"),
        _ => format!("{name}_{plane}_{}.{component}", word / 4),
    }
}

/// Four levels as the bytes of a word, for the columns from `4 * quad` on.
pub(super) fn bytes(format: Format, name: &str, quad: usize) -> String {
    let mut parts = Vec::new();
    let mut below = 0;
    for (plane, &bits) in format.planes().iter().enumerate() {
        let per = 8 / bits as usize;
        let (word, shift) = (word(format, name, plane, quad / per), bits as usize * (quad % per));
        let mask = match bits {
            1 => "0x01010101u",
            2 => "0x03030303u",
            _ => "0x0f0f0f0fu",
        };
        let part = match bits {
            8 => word,
            _ if shift == 0 => format!("({word} & {mask})"),
            _ => format!("(({word} >> {shift}u) & {mask})"),
        };
        parts.push(if below == 0 { part } else { format!("({part} << {below}u)") });
        below += bits;
    }
    parts.join(" | ")
}

/// Four elements as `vec4<f32>`, for the columns from `4 * quad` on; levels without scale and
/// offset.
pub(super) fn quad(format: Format, name: &str, quad: usize) -> String {
    match format.elements {
        Elements::Float(Float::F32) => format!("bitcast<vec4<f32>>({name}_0_{quad})"),
        Elements::Float(Float::F16) => {
            let [a, b] = [0, 1].map(|i| word(format, name, 0, 2 * quad + i));
            format!("vec4<f32>(unpack2x16float({a}), unpack2x16float({b}))")
        }
        Elements::Float(Float::BF16) => {
            let [a, b] = [0, 1].map(|i| word(format, name, 0, 2 * quad + i));
            format!(
                "bitcast<vec4<f32>>(vec4<u32>({a} << 16u, {a} & 0xffff0000u, {b} << 16u, {b} & 0xffff0000u))"
            )
        }
        Elements::Levels(8) => format!("vec4<f32>(unpack4xI8({}))", bytes(format, name, quad)),
        Elements::Levels(_) => format!("vec4<f32>(unpack4xU8({}))", bytes(format, name, quad)),
    }
}

/// The group of a block, as an expression. If a block has two groups, the group of its half.
pub(super) fn group(format: Format, block: &str, half: usize) -> String {
    if format.halves { format!("({block}) * 2u + {half}u") } else { format!("({block}) >> args.shift") }
}
