#!/usr/bin/env python3
"""Makes GGUF files with llama.cpp's own converter, of models as transformers writes them: cases/ARCHITECTURE.gguf in bf16, and transformers' logits for
it. llama.cpp computes the same values in f32, and must agree.

    python3 tests/golden/gguf/convert.py [--llama-cpp DIR] [NAME...]

DIR is as make.py's. Needs g++, PyTorch, transformers 5.24, sentencepiece, numpy and safetensors. Every random number comes from a seeded generator.
"""

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

SMALL = {"hidden_size": 48, "head_dim": 16, "intermediate_size": 32}
YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 32.0, "beta_slow": 1.0,
    "llama_4_scaling_beta": 0.0,
}
LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
}
# llama.cpp has one width of keys and values.
HYBRID = {
    "num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"], "linear_value_head_dim": 16, "num_attention_heads": 4,
    "num_key_value_heads": 2, "num_experts": 4, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "rms_norm_eps": 1e-6,
}
# As published; transformers has names of its own.
KIMI = {
    "linear_attn_config": {"num_heads": 3, "head_dim": 32, "short_conv_kernel_size": 4, "kda_layers": [1], "full_attn_layers": [2]},
    "num_shared_experts": 1, "num_experts": 4, "num_experts_per_token": 2, "first_k_dense_replace": 1, "moe_renormalize": True,
    "moe_router_activation_func": "sigmoid", "model_type": "kimi_linear",
}
# llama.cpp multiplies an indexer's queries and keys with an orthogonal matrix of this width.
INDEXED = {"intermediate_size": 32, "moe_intermediate_size": 32, "index_head_dim": 64}
FEW = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "moe_intermediate_size": 32}
# As published; transformers has names of its own.
MIMO = {
    "swa_head_dim": 32, "swa_v_head_dim": 16, "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "hybrid_layer_pattern": [0, 1, 1],
    "moe_layer_freq": [0, 1, 1], "topk_method": "noaux_tc", "layernorm_epsilon": 1e-5, "scoring_func": "sigmoid", "partial_rotary_factor": 0.334,
    "rope_theta": 100000.0, "swa_rope_theta": 1000.0, "rope_parameters": None,
}
DEEPSEEK4 = {
    "num_hash_layers": 1, "compress_ratios": [0, 4, 128], "layer_types": None, "mlp_layer_types": None, "compress_rates": None, "rope_parameters": None,
    "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 32.0, "beta_slow": 1.0},
}
GLM5_3 = {
    "linear_attn_config": {"num_heads": 2, "head_dim": 32, "short_conv_kernel_size": 4, "gate_lower_bound": -5.0}, "mla_use_nope": True, "first_k_dense_replace": 1,
}
# Models that see: rotations in three sections, all of which are a token's place in a text.
SEEING = {**FEW, "moe_intermediate_size": None, "intermediate_size": 96, "layer_types": None, "sliding_window": None}
SECTIONS = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [3, 3, 2]}}
# An architecture's name in GGUF: a case of make_transformers.py, settings that differ, and fields
# of config.json that published files have and transformers does not write.
CASES = {
    "phi3": ("phi3", {
        "hidden_size": 96, "partial_rotary_factor": 0.75,
        "rope_parameters": {
            "rope_type": "longrope", "rope_theta": 10000.0, "partial_rotary_factor": 0.75, "original_max_position_embeddings": 16,
            "short_factor": [1.0 + i / 8 for i in range(6)], "long_factor": [1.5 + i / 2 for i in range(6)],
        },
    }, {}),
    "olmo2": ("olmo2", {}, {}),
    # As published: a window in three layers of four, YaRN in the others only.
    "olmo2-olmo3": ("olmo3", {
        "num_hidden_layers": 4, "layer_types": ["sliding_attention"] * 3 + ["full_attention"], "hidden_size": 48, "intermediate_size": 32,
        "num_attention_heads": 3, "num_key_value_heads": 3,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "full_attention": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 32, "beta_fast": 32.0,
                               "beta_slow": 1.0, "attention_factor": 1.2079441541679836},
        },
    }, {}),
    # Plain queries, and both mscales below 1, as published.
    "deepseek2-v2_lite": ("deepseek_v2", {
        "rms_norm_eps": 1e-6, "num_key_value_heads": 4, "n_routed_experts": 4, "moe_intermediate_size": 32, "hidden_size": 48, "rope_theta": None,
        "rope_parameters": {**{key: value for key, value in YARN.items() if "llama_4" not in key}, "mscale": 0.707, "mscale_all_dim": 0.707},
    }, {"scoring_func": "softmax", "norm_topk_prob": False}),
    "deepseek2-glm_4_7_flash": ("glm4_moe_lite", {"n_routed_experts": 4, "moe_intermediate_size": 32, "hidden_size": 48, "num_hidden_layers": 3,
                                "mlp_layer_types": ["dense", "sparse", "sparse"]}, {"scoring_func": "sigmoid", "first_k_dense_replace": 1}),
    "granite": ("granite", {}, {}),
    "glm4": ("glm4", {}, {}),
    # llama.cpp divides scores by the width of heads, whatever the file says.
    "gemma2": ("gemma2", {"query_pre_attn_scalar": 32}, {}),
    "command-r": ("cohere", {"hidden_size": 96, "use_qk_norm": False}, {}),
    "cohere2": ("cohere2", {"head_dim": 16, "num_hidden_layers": 4, "intermediate_size": 32, "layer_types": ["sliding_attention"] * 3 + ["full_attention"]},
                {"rotary_pct": 1.0}),
    "hunyuan-dense": ("hunyuan_v1_dense", {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}, {}),
    "hunyuan-moe": ("hunyuan_v1_moe", {"intermediate_size": 32, "num_experts": 4}, {"moe_intermediate_size": [32, 32], "num_shared_expert": [1, 1], "moe_topk": [2, 2]}),
    # What llama.cpp has as constants: chunks, temperature tuning.
    "llama4": ("llama4", {"attention_chunk_size": 8192, "floor_scale": 8192, "attn_scale": 0.1, "intermediate_size": 32, "num_attention_heads": 4,
                          "num_key_value_heads": 2, "head_dim": 16}, {}),
    "minimax-m2": ("minimax_m2", {"intermediate_size": 32, "num_local_experts": 4}, {}),
    "nemotron_h_moe": ("nemotron_h", {"mamba_head_dim": 32, "n_group": 1, "topk_group": 1, "layers_block_type":
                                      ["moe", "linear_attention", "full_attention"]}, {}),
    "nemotron_h": ("nemotron_h", {"mamba_head_dim": 32, "layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp"]}, None),
    # llama.cpp has a window in five layers of six, whose base it takes for 10000.
    "gemma3": ("gemma3_text", {
        **SMALL, "num_hidden_layers": 6, "layer_types": ["sliding_attention"] * 5 + ["full_attention"], "query_pre_attn_scalar": 16,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "full_attention": {"rope_type": "linear", "rope_theta": 100000.0, "factor": 4.0},
        },
    }, {}),
    "gemma4": ("gemma4_text", {}, {}),
    "gemma4-experts": ("gemma4_experts", {}, {}),
    "gemma4-inputs": ("gemma4_inputs", {}, {}),
    "exaone4": ("exaone4", {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "rope_theta": None, "rope_parameters": LLAMA3_ROPE}, {}),
    "qwen3next": ("qwen3_next", HYBRID, {}),
    "qwen35": ("qwen3_5", {key: value for key, value in HYBRID.items() if "expert" not in key and "moe" not in key}, None),
    "qwen35moe": ("qwen3_5_moe", HYBRID, {}),
    # Where this file's indexer leaves tokens out, llama.cpp differs by 6e-3. It takes `mscale` for
    # 1.
    "deepseek32": (
        "deepseek_v32", {**INDEXED, "index_topk": 128, "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}},
        {"scoring_func": "sigmoid"},
    ),
    "glm-dsa": ("glm_moe_dsa", INDEXED, {"scoring_func": "sigmoid"}),
    # The converter has one base for all layers.
    "granite_swa": ("granite_swa", {"num_hidden_layers": 3, "layer_types": ["full_attention", "sliding_attention", "full_attention"],
                                    "layer_rope_theta": [10000.0, 10000.0, 0]}, {"no_rope_layers": [1, 1, 0]}),
    "granite_swa-experts": ("granitemoe_swa", {}, {}),
    # As MiniCPM's factors make it of Granite.
    "minicpm": ("granite", {**SMALL, "head_dim": None, "num_attention_heads": 3, "num_key_value_heads": 1, "attention_multiplier": 0.25, "residual_multiplier": 0.5,
                            "embedding_multiplier": 3.0, "logits_scaling": 1.5},
                {"architectures": ["MiniCPMForCausalLM"], "model_type": "minicpm", "scale_emb": 3.0, "scale_depth": 0.5 * 2**0.5, "dim_model_base": 32}),
    # What llama.cpp has as constants: factors, and values as wide as the stream's share of a head.
    "minicpm3": ("minicpm3", {
        "scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 256, "v_head_dim": 16, "rope_parameters": {
            "rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 256, "short_factor": [1.0 + i / 8 for i in range(8)],
            "long_factor": [1.0 + i / 8 for i in range(8)],
        },
    }, {}),
    # llama.cpp has heads that are as wide as the stream together.
    "bailingmoe2": ("sarvam_moe", {**FEW, "hidden_size": 64}, {
        "architectures": ["SarvamMoEForCausalLM"], "num_experts": 4, "num_shared_experts": 1, "score_function": "sigmoid",
    }),
    "gemma4-unified": ("gemma4_unified_text", {}, {"architectures": ["Gemma4UnifiedForConditionalGeneration"], "moe_intermediate_size": 0}),
    "deepseek2-youtu": ("youtu", {"rms_norm_eps": 1e-6}, {}),
    "llama-internlm3": ("internlm3", {"hidden_size": 48, "head_dim": 16, "num_attention_heads": 3, "num_key_value_heads": 1, "attention_bias": False, "mlp_bias": False}, {}),
    # Without images, models that see are the plain ones.
    "qwen2vl": ("exaone4", {**SEEING, "model_type": "qwen2", "head_dim": None}, {"architectures": ["Qwen2_5_VLForConditionalGeneration"], **SECTIONS}),
    "qwen3vl": ("exaone4", {**SEEING, "model_type": "qwen3"}, {"architectures": ["Qwen3VLForConditionalGeneration"], **SECTIONS}),
    "qwen3vlmoe": ("qwen3_moe", {**FEW, "num_experts": 4, "mlp_only_layers": []}, {"architectures": ["Qwen3VLMoeForConditionalGeneration"], **SECTIONS}),
    "arcee": ("arcee", {"hidden_size": 48, "head_dim": 16}, {}),
    "gemma": ("gemma", {"hidden_size": 48, "head_dim": 16}, {}),
    "olmoe": ("olmoe", {"num_experts": 4, "intermediate_size": 32, "hidden_size": 48, "num_attention_heads": 3, "num_key_value_heads": 3}, {}),
    "granitemoe": ("granitemoeshared", {"num_local_experts": 4, "intermediate_size": 32, "hidden_size": 48, "num_attention_heads": 3,
                                        "num_key_value_heads": 1, "shared_intermediate_size": 48}, {}),
    "granitehybrid": ("granitemoehybrid", {}, {"layer_types": ["mamba", "attention", "mamba"]}),
    # llama.cpp rotates none of these models' heads.
    "granitehybrid-dense": ("granitemoehybrid_dense", {"position_embedding_type": None, "intermediate_size": 48},
                            {"layer_types": ["attention", "mamba"], "num_experts_per_tok": 0}),
    # The converter takes intermediate_size / num_key_value_heads for the shared expert's width.
    "ernie4_5-moe": ("ernie4_5_moe", {**FEW, "moe_num_experts": 4, "intermediate_size": 128, "moe_layer_start_index": 1, "moe_layer_end_index": -1}, {}),
    "mellum": ("mellum", {**FEW, "num_experts": 4, "mlp_layer_types": ["sparse", "sparse"]}, {}),
    # llama.cpp knows as many KV heads as heads.
    "dots1": ("dots1", {**FEW, "n_routed_experts": 4, "num_key_value_heads": 4}, {"scoring_func": "sigmoid"}),
    "exaone-moe": ("exaone_moe", {**FEW, "num_experts": 4}, {"scoring_func": "sigmoid"}),
    "hy_v3": ("hy_v3", {**FEW, "num_experts": 4}, {}),
    "mimo2": ("mimo_v2_flash", {**FEW, "routed_scaling_factor": 1.0, "n_routed_experts": 4, "head_dim": 32, "v_head_dim": 16, "num_attention_heads": 4, "num_key_value_heads": 1}, MIMO),
    # The file has one mscale, and no temperature. llama.cpp takes the other mscale for 1.
    "mistral4": ("mistral4", {"n_routed_experts": 6, "moe_intermediate_size": 32, "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}}, {"architectures": ["Mistral3ForConditionalGeneration"]}),
    "glm5-next": ("glm5_next", {
        **INDEXED, "n_routed_experts": 4, "num_hidden_layers": 2, "layer_types": ["linear_attention", "indexed_attention"], "mlp_layer_types": ["dense", "sparse"],
        "hidden_size": 32, "linear_num_heads": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "index_n_heads": 2,
    }, GLM5_3),
    # Prompts are too short for a token that is made of 128.
    "deepseek4": ("deepseek_v4", {
        "num_hidden_layers": 3, "layer_types": ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"], "index_head_dim": 64,
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 128}, "n_routed_experts": 4, "moe_intermediate_size": 32,
        "hidden_size": 32, "num_attention_heads": 4, "o_groups": 2, "head_dim": 32,
    }, DEEPSEEK4),
    # Files of Solar Open call themselves GLM-4.5's.
    "glm4moe-solar": ("solar_open", {**FEW, "n_routed_experts": 4}, {"partial_rotary_factor": 1.0, "scoring_func": "sigmoid"}),
    "lfm2": ("lfm2", {"hidden_size": 48, "num_attention_heads": 3, "num_key_value_heads": 1, "intermediate_size": 96}, {}),
    "lfm2moe": ("lfm2_moe", {"num_experts": 4, "moe_intermediate_size": 32, "intermediate_size": 32, "hidden_size": 48, "num_attention_heads": 3,
                             "num_key_value_heads": 1, "routed_scaling_factor": 1.0}, {}),
    "kimi-linear": ("kimi_linear", {
        "num_attention_heads": 3, "num_key_value_heads": 3,
        "num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"], "mlp_layer_types": ["dense", "sparse"],
        "linear_num_heads": 3, "moe_intermediate_size": 32, "num_local_experts": 4, "rms_norm_eps": 1e-6,
    }, KIMI),
}
# A model of MLX-LM's, ../cases/FOLDER, and its logits: transformers has no such family.
FROM_MLX = {"kimi-k3": "kimi_k3-mxfp4-published"}
# Settings with which llama.cpp computes a case; the file has those of CASES. It knows the windows
# of EXAONE 4 and the plain queries of DeepSeek-V2-Lite by the number of layers, and has one base
# for Mellum's rotations.
COMPARED = {
    "deepseek2-v2_lite": {"num_hidden_layers": 27},
    "exaone4": {"num_hidden_layers": 64, "layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 16},
    "mellum": {"rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        "full_attention": {key: value for key, value in YARN.items() if "llama_4" not in key},
    }},
}
# Largest relative difference of llama.cpp's logits from transformers'. ggml's GELU is a table of
# f16, and it multiplies experts in MXFP4 with rounded activations.
LIMIT = 1e-3
WIDE_LIMIT = 5e-3
WIDE = ("gemma2", "gemma3", "gemma4", "gemma4-experts", "gemma4-inputs", "gemma4-unified", "gemma", "deepseek4", "kimi-k3")


def write_folder(name: str, folder: Path, compared: bool):
    """Writes the model as transformers does, with its logits; `compared`: as llama.cpp computes it."""
    if name in FROM_MLX:
        shutil.copytree(HERE.parent / "cases" / FROM_MLX[name], folder, dirs_exist_ok=True)
        return
    from make_transformers import CASES as ALL
    from make_transformers import make

    from safetensors.torch import load_file as load_tensors
    from safetensors.torch import save_file as save_tensors

    case, settings, more = CASES[name]
    make(f"gguf-{name}", {**ALL[case], **settings, **(COMPARED.get(name, {}) if compared else {})}, folder)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    if more is None:
        # Models without experts do not say anything of them.
        config = {key: value for key, value in config.items() if "expert" not in key and "moe" not in key and key not in ("n_group", "topk_group")}
    (folder / "transformers.json").write_text(json.dumps(config))
    config = {key: value for key, value in {**config, **(more or {})}.items() if value is not None}
    if name == "deepseek2-v2_lite":
        # As published: without the field, transformers' class has a rank.
        config["q_lora_rank"] = None
    path.write_text(json.dumps(config))
    if name == "deepseek4":
        publish_deepseek4(folder, config["vocab_size"])
    if name == "kimi-linear":
        weights = folder / "model.safetensors"
        renamed = {re.sub(r"block_sparse_moe\.(\w+_proj)", r"mlp.\1", key): tensor for key, tensor in load_tensors(weights).items()}
        save_tensors(renamed, weights, metadata={"format": "pt"})
    if "gemma" in name:
        # The converter drops rows of the embedding that have no token.
        tokens = {str(token): token for token in range(config["vocab_size"])}
        (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": tokens}, "added_tokens": []}))


def publish_deepseek4(folder: Path, vocab: int):
    """Gives the experts values of MXFP4, computes the logits again, and writes the weights as published: experts packed, other names."""
    import fixture
    import torch
    from gguf import GGMLQuantizationType, quants
    from safetensors.torch import load_file as load_tensors
    from safetensors.torch import save_file as save_tensors
    from transformers import AutoModelForCausalLM

    path, kind, packed = folder / "model.safetensors", GGMLQuantizationType.MXFP4, {}
    tensors, published = load_tensors(path), json.loads((folder / "config.json").read_text())
    for key, tensor in tensors.items():
        if re.search(r"experts\.\d+\.w[123]\.weight$", key):
            packed[key] = quants.quantize(tensor.float().numpy(), kind)
            tensors[key] = torch.from_numpy(quants.dequantize(packed[key], kind)).to(tensor.dtype)
    save_tensors(tensors, path, metadata={"format": "pt"})
    (folder / "config.json").write_text((folder / "transformers.json").read_text())
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()

    def forward(tokens):
        with torch.no_grad():
            return model(torch.from_numpy(tokens.astype(np.int64))[None]).logits[0].float().numpy()

    fixture.write_golden("gguf-deepseek4", vocab, forward, folder)
    (folder / "config.json").write_text(json.dumps(published))
    renamed = {}
    for key, tensor in tensors.items():
        name = key.removeprefix("model.").replace("embed_tokens.", "embed.").replace("hc_head.hc_", "hc_head_").replace("attn.norm.", "attn.kv_norm.")
        if key in packed:
            blocks = packed[key].reshape(tensor.shape[0], -1, 17)
            # A block has columns i and i + 16 in a byte; published files have neighbours.
            levels = np.concatenate([blocks[..., 1:] & 15, blocks[..., 1:] >> 4], -1)
            tensor = torch.from_numpy((levels[..., 0::2] | levels[..., 1::2] << 4).reshape(tensor.shape[0], -1).copy())
            renamed[name.replace(".weight", ".scale")] = torch.from_numpy(blocks[..., 0].copy())
        renamed[name] = tensor
    save_tensors(renamed, path, metadata={"format": "pt"})


def convert(source: Path, folder: Path, out: Path, kind: str):
    """Runs llama.cpp's converter in this process, with a vocabulary that has no texts."""
    sys.path[:0] = [str(source), str(source / "gguf-py")]
    import gguf
    import torch
    from conversion import ModelBase, ModelType, get_model_architecture, get_model_class

    hparams = ModelBase.load_hparams(folder, False)
    model_class = get_model_class(get_model_architecture(hparams, ModelType.TEXT))
    size = hparams.get("text_config", hparams)["vocab_size"]
    more = {}
    if hparams["model_type"] in ("nemotron_h", "mimo_v2_flash", "glm5_next", "deepseek_v4", "sarvam_moe", "gemma4_unified_text"):
        # transformers adds experts to every Nemotron-H and Gemma 4, and drops published names: the
        # converter gets the config itself.
        more["hparams"] = json.loads((folder / "config.json").read_text())
        model_class._MLP_LAYER_TYPES = {"moe", "mlp"}

    # Layers that predict further tokens are none of these models'.
    model_class.no_mtp = True

    def set_vocab(self):
        self._set_vocab_none()
        self.gguf_writer.add_vocab_size(size)

    # Mistral 4's class is inside of Mistral 3's.
    for each in (model_class, getattr(model_class, "Mistral4Model", model_class)):
        each.set_vocab = set_vocab
    types = {"bf16": gguf.LlamaFileType.MOSTLY_BF16, "f32": gguf.LlamaFileType.ALL_F32}
    with torch.inference_mode():
        model_class(folder, types[kind], out, **more).write()


def llama_cpp_logits(program: Path, model: Path, tokens: np.ndarray, folder: Path) -> np.ndarray:
    (folder / "tokens").write_bytes(tokens.astype(np.int32).tobytes())
    subprocess.run([program, model, folder / "tokens", folder / "logits"], check=True, stderr=subprocess.PIPE)
    return np.frombuffer((folder / "logits").read_bytes(), np.float32).reshape(len(tokens), -1)


def build(llama_cpp: Path, folder: Path) -> tuple:
    source = next(llama_cpp.glob("llama_cpp_python-*/vendor/llama.cpp"))
    libraries = max((path.parent for path in llama_cpp.glob("build-*/CMakeCache.txt")), key=lambda p: p.stat().st_mtime)
    program = folder / "program"
    archives = [*libraries.glob("src/libllama.a"), *libraries.glob("ggml/src/**/lib*.a")]
    subprocess.run(
        ["g++", "-O1", "-std=c++17", HERE / "logits.cpp", f"-I{source}/include", f"-I{source}/ggml/include", "-o", program,
         "-Wl,--start-group", *archives, "-Wl,--end-group", "-fopenmp", "-lpthread", "-ldl", "-lm"],
        check=True,
    )  # fmt: skip
    return source, program


def write_model(name: str, compared: bool, source: Path, folder: Path, kind: str) -> tuple:
    """A model's GGUF file, and its folder."""
    out, model = folder / f"{kind}.gguf", folder / f"{name}-{kind}"
    model.mkdir()
    # Each in a process of its own: the converter's classes keep what they read.
    for call in (f"write_folder({name!r}, P({str(model)!r}), {compared})", f"convert(P({str(source)!r}), P({str(model)!r}), P({str(out)!r}), {kind!r})"):
        code = f"from pathlib import Path as P; from convert import *; {call}"
        subprocess.run([sys.executable, "-c", code], check=True, cwd=HERE, capture_output=True)
    return out, model


def make_case(name: str, source: Path, program: Path, folder: Path):
    exact, model = write_model(name, True, source, folder, "f32")
    golden, worst = load_file(model / "golden.safetensors"), 0.0
    for i in range(3):
        expected = golden[f"logits.{i}"]
        found = llama_cpp_logits(program, exact, golden[f"tokens.{i}"], folder)[golden[f"positions.{i}"]]
        worst = max(worst, float(np.linalg.norm(found - expected) / np.linalg.norm(expected)))
    if worst > (WIDE_LIMIT if name in WIDE else LIMIT):
        print(f"{name:16} llama.cpp differs from transformers: {worst:.1e}", flush=True)
        return
    stored, model = write_model(name, False, source, folder, "bf16")
    out = HERE / "cases"
    shutil.copyfile(stored, out / f"{name}.gguf")
    shutil.copyfile(model / "golden.safetensors", out / f"{name}.safetensors")
    print(f"{name:16} {stored.stat().st_size / 1000:5.0f} kB   llama.cpp agrees: {worst:.1e}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llama-cpp", type=Path, default=Path.home() / ".cache/thunderhead/llama.cpp")
    parser.add_argument("names", nargs="*", metavar="NAME", help="architectures to make (all, if none is named)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        source, program = build(args.llama_cpp, Path(name))
        for case in args.names or [*CASES, *FROM_MLX]:
            try:
                make_case(case, source, program, Path(name))
            except subprocess.CalledProcessError as error:
                told = (error.stderr or b"").decode(errors="replace").strip().splitlines()
                print(f"{case:16} failed: {' | '.join(told[-2:])}", flush=True)


if __name__ == "__main__":
    main()
