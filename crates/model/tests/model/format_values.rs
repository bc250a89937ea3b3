//! Quantized formats of Hugging Face folders: compares the values of random bytes with those of the
//! reference libraries.
//!
//! The fixtures and how they were made: tests/golden/formats/README.md.

use std::path::{Path, PathBuf};

use safetensors::SafeTensors;
use thunder_compute::Encoding;
use thunder_model::ModelFolder;
use thunder_model::weights::{ExpertRole, LayerRole, Role};

fn cases() -> Vec<PathBuf> {
    let all = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/formats/values");
    let mut cases: Vec<PathBuf> = all.read_dir().unwrap().map(|entry| entry.unwrap().path()).collect();
    cases.sort();
    cases
}

/// The role of the matrices that a fixture has values of.
fn role(name: &str, index: usize, count: usize) -> Role {
    let role = match name {
        "expected.out" => return Role::Layer(0, LayerRole::AttentionOut),
        "expected.gate" => ExpertRole::Gate,
        "expected.up" => ExpertRole::Up,
        "expected.down" => ExpertRole::Down,
        other => panic!("{other} has no role"),
    };
    Role::Expert { layer: 0, role, index, count }
}

/// Allowed difference of a value from the library's, which rounds once where `scale * level +
/// offset` rounds twice. E4M3 numbers become levels in groups of 32, which are exact for numbers of
/// at least 1/8 of the group's largest: compute's source/e4m3.rs.
fn allowed(encoding: Encoding, group: &[f32], expected: f32) -> f32 {
    let largest = group.iter().fold(0.0f32, |largest, x| largest.max(x.abs()));
    let rounding = largest * 2f32.powi(-22);
    match encoding {
        Encoding::Fp8 { .. } if expected.abs() < largest / 8.0 => rounding + largest / 128.0,
        _ => rounding,
    }
}

#[test]
fn values_equal_those_of_the_reference_libraries() {
    let mut seen = 0;
    for case in cases() {
        let name = case.file_name().unwrap().to_string_lossy().into_owned();
        let folder = ModelFolder::open(&case).unwrap();
        let bytes = std::fs::read(case.join("model.safetensors")).unwrap();
        let file = SafeTensors::deserialize(&bytes).unwrap();
        for (of, view) in file.tensors().into_iter().filter(|(of, _)| of.starts_with("expected.")) {
            let &[count, rows, cols] = view.shape() else { panic!("{name}: {of} is no stack") };
            let expected: Vec<f32> =
                view.data().as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect();
            for (index, expected) in expected.chunks_exact(rows * cols).enumerate() {
                let stored = folder.weights.matrix(role(&of, index, count), [rows, cols]).unwrap();
                assert!(!matches!(stored.encoding, Encoding::Float(_)), "{name}: {of} is quantized");
                // The whole matrix, and a window that begins and ends within words and blocks.
                for first in [0, 5] {
                    let window = stored.window(first..rows - first, 0..cols);
                    let mut row = vec![0.0; cols];
                    let rows = expected.chunks_exact(cols).skip(first).take(window.rows);
                    for (index, expected) in rows.enumerate() {
                        window.dequantize_row(index, &mut row);
                        let groups = expected.chunks(32).zip(row.chunks(32));
                        for (group, (expected, ours)) in groups.enumerate() {
                            for (column, (x, ours)) in expected.iter().zip(ours).enumerate() {
                                assert!(
                                    (ours - x).abs() <= allowed(stored.encoding, expected, *x),
                                    "{name}, {of}: row {}, column {} is {ours}, not {x}",
                                    first + index,
                                    32 * group + column
                                );
                            }
                        }
                    }
                    seen += window.rows * cols;
                }
            }
        }
    }
    assert!(seen > 200_000, "{seen} values");
}
