//! Roles found in files with Hugging Face's and MLX's names.

use std::collections::HashMap;
use std::ops::Range;
use std::path::Path;
use std::sync::Mutex;

use ::safetensors::tensor::{Dtype, TensorView};
use serde_json::json;
use thunder_compute::{Encoding, FilePages, Float};

use super::*;

/// Tensors to be written: name, type, shape. Each byte is the tensor's index, then counts up.
type Tensors<'a> = &'a [(&'a str, Dtype, &'a [usize])];

/// A folder with these tensors, and what keeps it.
fn source(tensors: Tensors<'_>, quantization: serde_json::Value) -> (tempfile::TempDir, HuggingFace) {
    let folder = tempfile::tempdir().expect("a folder");
    let bytes: Vec<Vec<u8>> = tensors
        .iter()
        .enumerate()
        .map(|(index, (_, dtype, shape))| {
            let len = shape.iter().product::<usize>() * dtype.bitsize() / 8;
            (0..len).map(|i| (index * 31 + i) as u8).collect()
        })
        .collect();
    let views: HashMap<&str, TensorView<'_>> = tensors
        .iter()
        .zip(&bytes)
        .map(|((name, dtype, shape), bytes)| {
            (*name, TensorView::new(*dtype, shape.to_vec(), bytes).expect("a tensor"))
        })
        .collect();
    let path = folder.path().join("model.safetensors");
    ::safetensors::serialize_to_file(views, None, &path).expect("written");
    let config = json!({ "quantization": quantization });
    let quantization = match config["quantization"].is_null() {
        true => Quantization::default(),
        false => Quantization::read(&config, Path::new("config.json")).expect("settings"),
    };
    let source = HuggingFace::open(folder.path(), quantization).expect("it opens");
    (folder, source)
}

fn expert(role: ExpertRole, index: usize, count: usize) -> Role {
    Role::Expert { layer: 0, role, index, count }
}

/// Where `part` lies in `whole`.
fn place(whole: &[u8], part: &[u8]) -> Range<usize> {
    let start = part.as_ptr() as usize - whole.as_ptr() as usize;
    start..start + part.len()
}

#[test]
fn every_prefix_of_a_wrapped_model_is_found() {
    for (prefix, head) in
        [("model.", "lm_head"), ("", "lm_head"), ("language_model.model.", "language_model.lm_head")]
    {
        let names = ["embed_tokens.weight", "layers.3.self_attn.q_norm.weight", "norm.weight"]
            .map(|name| format!("{prefix}{name}"));
        let head = format!("{head}.weight");
        let (_folder, source) = source(
            &[
                (&names[0], Dtype::F32, &[6, 4]),
                (&names[1], Dtype::F32, &[4]),
                (&names[2], Dtype::F32, &[4]),
                (&head, Dtype::BF16, &[6, 4]),
            ],
            json!(null),
        );
        assert_eq!(source.format(Role::Embedding).expect("found"), Encoding::Float(Float::F32));
        assert_eq!(source.format(Role::OutputHead).expect("found"), Encoding::Float(Float::BF16));
        assert!(source.has(Role::OutputNorm), "{prefix:?}");
        let norm = source.vector(LayerRole::QueryNorm.of(3), &[4]).expect("found");
        assert_eq!(norm.len(), 4);
        assert!(!source.has(LayerRole::QueryNorm.of(2)), "layer 2 has no norm");
        assert!(!source.has(LayerRole::KeyNorm.of(3)), "layer 3 has no key norm");
    }
}

#[test]
fn an_expert_of_a_stack_is_its_own_byte_range() {
    let (_folder, source) =
        source(&[("model.layers.0.mlp.switch_mlp.up_proj.weight", Dtype::BF16, &[4, 6, 32])], json!(null));
    let up = |index| source.matrix(expert(ExpertRole::Up, index, 4), [6, 32]).expect("found");
    let expert_bytes = 6 * 32 * 2;
    let stack = up(0).weight.as_ptr();
    for index in 0..4 {
        let own = up(index);
        assert_eq!((own.rows, own.cols, own.weight.len()), (6, 32, expert_bytes));
        assert_eq!(own.weight.as_ptr() as usize - stack as usize, index * expert_bytes);
        let window = own.window(2..5, 8..24);
        assert_eq!((window.rows, window.cols), (3, 16));
        assert_eq!(place(own.weight, window.weight.span(0..3)), 2 * 64 + 16..4 * 64 + 48);
    }
}

#[test]
fn a_quantized_expert_has_its_own_scales() {
    let module = "model.layers.0.mlp.switch_mlp.down_proj";
    let [weight, scales, biases] = ["weight", "scales", "biases"].map(|end| format!("{module}.{end}"));
    let (_folder, source) = source(
        &[
            (&weight, Dtype::U32, &[3, 8, 128 * 4 / 32]),
            (&scales, Dtype::F16, &[3, 8, 2]),
            (&biases, Dtype::F16, &[3, 8, 2]),
        ],
        // The router's settings are not the experts'.
        json!({ "bits": 4, "group_size": 64, "model.layers.0.mlp.gate": { "bits": 8, "group_size": 64 } }),
    );
    let role = |index| expert(ExpertRole::Down, index, 3);
    let first = source.matrix(role(0), [8, 128]).expect("found");
    let last = source.matrix(role(2), [8, 128]).expect("found");
    assert_eq!(last.encoding, Encoding::Affine { bits: 4, group: 64, scales: Float::F16 });
    assert_eq!(last.bytes(), 8 * (64 + 2 * 4));
    for (first, last) in [(first.scales, last.scales), (first.offsets, last.offsets)] {
        let [first, last] = [first, last].map(|numbers| numbers.expect("numbers of the groups"));
        assert_eq!(last.as_ptr() as usize - first.as_ptr() as usize, 2 * 8 * 2 * 2);
    }
    // Columns 64..128 are the second half of each row and its second scale.
    let window = last.window(1..3, 64..128);
    assert_eq!(place(last.weight, window.weight.row(0)), 64 + 32..2 * 64);
    let (all, own) = (last.scales.expect("scales"), window.scales.expect("scales"));
    assert_eq!(place(all, own.row(1)), 2 * 4 + 2..3 * 4);
}

#[test]
fn experts_in_tensors_of_their_own_are_found() {
    for (names, role) in [
        (
            ["model.layers.0.mlp.experts.0.gate_proj", "model.layers.0.mlp.experts.1.gate_proj"],
            ExpertRole::Gate,
        ),
        (
            ["model.layers.0.block_sparse_moe.experts.0.w2", "model.layers.0.block_sparse_moe.experts.1.w2"],
            ExpertRole::Down,
        ),
    ] {
        let names = names.map(|name| format!("{name}.weight"));
        let tensors = names.each_ref().map(|name| (name.as_str(), Dtype::F32, &[4usize, 8][..]));
        let (_folder, source) = source(&tensors, json!(null));
        let [first, second] =
            [0, 1].map(|index| source.matrix(expert(role, index, 2), [4, 8]).expect("found").weight);
        assert_eq!((first.len(), second.len()), (128, 128));
        assert_ne!(first[0], second[0], "two tensors");
    }
}

#[test]
fn a_stack_of_another_number_of_experts_is_refused() {
    let (_folder, source) =
        source(&[("model.layers.0.mlp.experts.up_proj.weight", Dtype::BF16, &[4, 6, 32])], json!(null));
    let error = source.matrix(expert(ExpertRole::Up, 0, 8), [6, 32]).expect_err("refused").to_string();
    assert!(error.contains("BF16 [4, 6, 32]") && error.contains("[8, 6, 32]"), "{error}");
}

#[test]
fn every_layer_role_has_names_of_its_own() {
    let module = |name: &str| format!("model.layers.7.{name}");
    for (role, name) in [
        (LayerRole::Router, "mlp.gate.weight"),
        (LayerRole::RouterCorrection, "mlp.gate.e_score_correction_bias"),
        (LayerRole::SharedUp, "mlp.shared_experts.up_proj.weight"),
        (LayerRole::SharedExpertGate, "mlp.shared_expert_gate.weight"),
        (LayerRole::QueryDown, "self_attn.q_a_proj.weight"),
        (LayerRole::QueryDownNorm, "self_attn.q_a_layernorm.weight"),
        (LayerRole::KvDown, "self_attn.kv_a_proj_with_mqa.weight"),
        (LayerRole::KvUp, "self_attn.kv_b_proj.weight"),
        (LayerRole::DeltaQkvz, "linear_attn.in_proj_qkvz.weight"),
        (LayerRole::DeltaLogRate, "linear_attn.A_log"),
        (LayerRole::DeltaTimeBias, "linear_attn.dt_bias"),
        (LayerRole::DeltaConvolution, "linear_attn.conv1d.weight"),
        (LayerRole::DeltaOut, "linear_attn.out_proj.weight"),
    ] {
        let (_folder, source) = source(&[(&module(name), Dtype::F32, &[2, 2])], json!(null));
        assert!(source.has(role.of(7)), "{role:?}");
        for other in [LayerRole::Gate, LayerRole::Query, LayerRole::MixerNorm, LayerRole::DeltaNorm] {
            assert!(!source.has(other.of(7)), "{name} is not {other:?}");
        }
    }
}

/// Records what it is told.
#[derive(Default)]
struct Told(Mutex<Vec<Range<usize>>>);

impl FilePages for Told {
    fn read(&self, bytes: &[u8], to: &mut [u8]) {
        let start = bytes.as_ptr() as usize;
        self.0.lock().expect("one thread").push(start..start + bytes.len());
        to.copy_from_slice(bytes);
    }
    fn need(&self, _bytes: &[u8]) {}
    fn release(&self, _bytes: &[u8]) {}
}

#[test]
fn packing_an_expert_reads_its_bytes_only() {
    use thunder_collectives::Group;
    use thunder_compute::{Activations, CpuBackend, CpuConfig, Device, Isa};

    let (_folder, source) =
        source(&[("model.layers.0.mlp.switch_mlp.gate_proj.weight", Dtype::F16, &[5, 48, 64])], json!(null));
    let told = Told::default();
    let mut own = source.matrix(expert(ExpertRole::Gate, 3, 5), [48, 64]).expect("found");
    own.pages = Some(&told);
    // The rows that one of three ranks reads.
    let config = CpuConfig::new(1, Isa::detect().expect("an instruction set"), Activations::Auto);
    let mut backend = CpuBackend::new(&config, Group::solo());
    backend.matrix(&[own.window(16..32, 0..64)]).expect("packed");
    let start = own.weight.as_ptr() as usize;
    let asked = told.0.into_inner().expect("one thread");
    assert_eq!(asked, [start + 16 * 128..start + 32 * 128]);
}
