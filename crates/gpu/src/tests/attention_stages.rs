//! Finds where attention by matrices goes wrong. Prints how far each stage of the first block is
//! from the CPU's, for a person at a GPU. `THUNDER_TEST_GPU=0 cargo nextest run --release -p
//! thunder-gpu --run-ignored only --no-capture stages_of_attention`

use half::f16;
use thunder_collectives::Group;
use thunder_compute::{Activations, AttentionSpec, Backend, CacheShape, Device, KvFormat, Step};

use super::{backend, device};
use crate::kernel::{AttendMatrices, Kernel};
use crate::proof::{Family, Numbers};

const ROWS: usize = 64;
const TOKENS: usize = 32;
const SCALE: f32 = 0.15;

const STAGES: [&str; 4] = ["scores", "weights", "values", "sums"];

/// The kernel's text with a stage's numbers of the first block, [64][32], in place of the results.
fn dumps(stage: &str, text: &str) -> String {
    let dump = |number: &str| {
        format!(
            "if (block == 0u) {{ for (var i = thread; i < 2048u; i += 128u) {{ out[i] = f32({number}); }} }}\n"
        )
    };
    let text = text.replace("d < args.out_dim", "d > 9999u");
    let scores = dump("scores[i / 32u * ROW + i % 32u]");
    let before_sums = "let weight0 = coopLoadT";
    match stage {
        "scores" => text.replacen("var best = NONE;", &(scores + "var best = NONE;"), 1),
        "weights" => {
            let weights = dump("weights[i / 32u * WEIGHTS + i % 32u]");
            text.replacen(before_sums, &(weights + before_sums), 1)
        }
        "values" => {
            let values = match text.contains("var<workgroup> value_tile") {
                true => dump("value_tile[i % 32u * WEIGHTS + i / 32u % 32u]"),
                false => dump("tile[i / 32u % 32u * PITCH + i % 32u / 4u][i % 4u]"),
            };
            text.replacen(before_sums, &(values + before_sums), 1)
        }
        _ => {
            let end = "workgroupBarrier();\n    }\n    if (half == 0u)";
            let sums = format!(
                "workgroupBarrier();
if (block == 0u) {{
coopStoreT(sum0, &scores[mine * ROW], ROW);
coopStoreT(sum1, &scores[mine * ROW + 16u], ROW);
}}
workgroupBarrier();
{scores}"
            );
            assert!(text.contains(end));
            text.replacen(end, &(sums + end), 1)
        }
    }
}

/// The CPU's values of a stage, for rows that all belong to one sequence.
fn expected(stage: &str, rows: &[Vec<f32>], dim: usize) -> Vec<f32> {
    let rounded = |x: f32| f16::from_f32(x).to_f32();
    let score = |row: usize, token: usize| -> f32 {
        let product = |i: usize| rounded(rows[row][i] * SCALE) * rounded(rows[token][dim + i]);
        (0..dim).map(product).sum()
    };
    let weights = |row: usize| -> Vec<f32> {
        let scores: Vec<f32> = (0..TOKENS.min(row + 1)).map(|token| score(row, token)).collect();
        let best = scores.iter().copied().fold(f32::MIN, f32::max);
        let weights = scores.iter().map(|score| (score - best).exp());
        weights.chain(std::iter::repeat(0.0)).take(TOKENS).collect()
    };
    let value = |token: usize, column: usize| rounded(rows[token][2 * dim + column]);
    let of = |row: usize, column: usize| match stage {
        "scores" => score(row, column),
        "weights" => weights(row)[column],
        "values" => value(row % TOKENS, column),
        _ => weights(row).iter().enumerate().map(|(token, weight)| weight * value(token, column)).sum(),
    };
    (0..ROWS).flat_map(|row| (0..TOKENS).map(move |column| (row, column))).map(|(r, c)| of(r, c)).collect()
}

fn print(form: AttendMatrices, stage: &'static str) {
    let Some(found) = device("stages_of_attention") else { return };
    let mut backend = backend(&found, Activations::Auto, Group::solo());
    for other in AttendMatrices::all() {
        backend.taken.insert(Family::Matrices(other), other == form);
    }
    let sabotage: fn(&Kernel, String) -> String = match stage {
        "scores" => |_, text| dumps("scores", &text),
        "weights" => |_, text| dumps("weights", &text),
        "values" => |_, text| dumps("values", &text),
        _ => |kernel, text| match kernel {
            Kernel::AttendMatrices(_) => dumps("sums", &text),
            _ => text,
        },
    };
    let dim = form.columns;
    let spec = AttentionSpec {
        key_dim: dim,
        value_dim: dim,
        queries_of: vec![0..1],
        scale: SCALE,
        window: None,
        qk_norm: None,
        rope: None,
        sinks: None,
        temperature: None,
        out_column: 0,
    };
    let shape = CacheShape { format: KvFormat::F16, caches: vec![spec.cache()], blocks: 2, slots: 1 };
    let mut caches = backend.caches(&shape).unwrap();
    let rows: Vec<Vec<f32>> = (0..ROWS).map(|row| Numbers(row as u64 * 77 + 5).take(3 * dim)).collect();
    let mut step = Step::default();
    step.push(&[0; ROWS], 0, &[1, 0], 0, false);
    let mut qkv = backend.buffer(ROWS, 3 * dim).unwrap();
    let mut out = backend.buffer(ROWS, dim).unwrap();
    backend.write(&rows.concat(), &mut qkv).unwrap();
    backend.begin(&step, &[]).unwrap();
    backend.device.sabotage = Some(sabotage);
    backend.attention(&spec, &step, 0..ROWS, &mut qkv, (&mut caches, 0), &mut out).unwrap();
    let mut all = vec![0.0; ROWS * dim];
    backend.read(&out, 0..ROWS, &mut all).unwrap();
    let right = expected(stage, &rows, dim);
    // NaNs count as off, too.
    let off = |at: &usize| {
        let difference = (all[*at] - right[*at]).abs();
        difference.is_nan() || difference >= 0.02
    };
    let wrong: Vec<usize> = (0..right.len()).filter(off).collect();
    let first: Vec<_> =
        wrong.iter().take(4).map(|at| (at / TOKENS, at % TOKENS, all[*at], right[*at])).collect();
    println!("{form:?}, {stage}: {} of {} wrong {first:?}", wrong.len(), right.len());
}

#[test]
#[ignore = "prints what a GPU computes"]
fn stages_of_attention() {
    for form in AttendMatrices::all().filter(|form| !form.int8) {
        for stage in STAGES {
            print(form, stage);
        }
    }
}
