"""The model folders of the golden test: the purpose of each, its config and how its weights are stored.

The shapes are as small as they can be while still being awkward: KV heads that no rank count divides, a head width that
is not hidden / heads, odd vocabularies, channels that are only just a multiple of the quantization group. Positions
reach past `original_max_position_embeddings` and past the sliding windows, so that an engine that ignores either fails.
"""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Quantization:
    """MLX's format; `overrides` maps module paths to other settings or to False (left as it is)."""

    bits: int
    group_size: int
    overrides: dict = field(default_factory=dict)
    mode: str = "affine"


@dataclass(frozen=True)
class Case:
    """One folder. For configs that MLX-LM and transformers read differently (README.md lists them), `reference` holds config
    keys that MLX-LM is given instead of those on disk, and `windows` each layer's sliding window."""

    name: str
    config: dict
    dtype: str
    quantization: Quantization | None = None
    reference: dict = field(default_factory=dict)
    windows: tuple | None = None
    files: int = 1
    # Extra tensors that a loader must ignore, name to shape.
    ignored: dict = field(default_factory=dict)
    # Published names and MXFP4 experts, as Kimi K3's folder has them, in place of MLX-LM's.
    published: bool = False


def dense(model_type, hidden, inter, heads, kv_heads, vocab, *, layers=2, head_dim=32, tied=True, **more):
    """A config with the keys that every dense decoder has."""
    architecture = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3", "ministral3": "Ministral3"}
    config = {
        "architectures": [architecture[model_type] + "ForCausalLM"],
        "model_type": model_type,
        "hidden_size": hidden,
        "intermediate_size": inter,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "vocab_size": vocab,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 256,
        "rope_theta": 10000.0,
        "tie_word_embeddings": tied,
    }
    config.update(more)
    return {key: value for key, value in config.items() if value is not None}


LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
MINISTRAL3_ROPE = {
    "rope_type": "yarn",
    "type": "yarn",
    "rope_theta": 1000000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.5,
}

UNQUANTIZED = [
    Case("llama-f32", dense("llama", 64, 64, 2, 1, 163, head_dim=None, tied=False), "f32"),
    Case("llama-bf16", dense("llama", 96, 64, 3, 1, 331, head_dim=None), "bf16"),
    Case("llama-f16-llama3-rope", dense("llama", 64, 96, 4, 1, 163, tied=False, rope_scaling=LLAMA3_ROPE), "f16"),
    Case(
        "llama-bf16-linear-rope",
        dense("llama", 64, 64, 8, 4, 163, rope_scaling={"type": "linear", "factor": 4.0}),
        "bf16",
    ),
    Case(
        "llama-bf16-biases",
        dense("llama", 64, 64, 6, 3, 163, tied=False, attention_bias=True, mlp_bias=True),
        "bf16",
    ),
    # As transformers 5 writes it: the base is under rope_parameters only.
    Case(
        "llama-bf16-rope-parameters",
        dense("llama", 64, 96, 4, 2, 163, rope_theta=None,
              rope_parameters={"rope_type": "llama3", "rope_theta": 50000.0, **LLAMA3_ROPE}),
        "bf16",
        reference={"rope_theta": 50000.0, "rope_scaling": LLAMA3_ROPE},
    ),
    # As Mistral 7B v0.1: one window for all layers.
    Case(
        "mistral-bf16-window",
        dense("mistral", 80, 64, 4, 2, 163, tied=False, sliding_window=16),
        "bf16",
        windows=(16, 16),
    ),
    Case(
        "mistral-f16-layer-types",
        dense("mistral", 64, 64, 3, 3, 163, tied=False, layers=3, sliding_window=16,
              layer_types=["sliding_attention", "full_attention", "sliding_attention"]),
        "f16",
    ),
    Case(
        "ministral3-bf16",
        dense("ministral3", 64, 96, 6, 2, 163, tied=False, rope_theta=None, rope_parameters=MINISTRAL3_ROPE),
        "bf16",
    ),
    # use_sliding_window is false, so the window must not be used.
    Case(
        "qwen2-bf16",
        dense("qwen2", 64, 160, 2, 1, 163, head_dim=None, tied=False, sliding_window=16, use_sliding_window=False,
              max_window_layers=1, rope_theta=1000000.0),
        "bf16",
    ),
    Case(
        "qwen2-f16-window",
        dense("qwen2", 96, 64, 3, 1, 163, head_dim=None, sliding_window=16, use_sliding_window=True,
              max_window_layers=1),
        "f16",
        windows=(None, 16),
    ),
    Case(
        "qwen2-f32-yarn",
        dense("qwen2", 64, 64, 2, 1, 163, head_dim=None, rope_scaling=YARN),
        "f32",
    ),
    Case("qwen3-bf16-5-kv-heads", dense("qwen3", 64, 64, 10, 5, 163), "bf16"),
    Case(
        "qwen3-bf16-yarn",
        dense("qwen3", 64, 64, 2, 1, 192, head_dim=64, tied=False, rope_theta=None,
              rope_parameters={"rope_type": "yarn", "rope_theta": 1000000.0, "factor": 4.0,
                               "original_max_position_embeddings": 64}),
        "bf16",
    ),
]


def matrix():
    """Every bit width with every group size, llama and qwen3 in turn."""
    for row, bits in enumerate((2, 3, 4, 5, 6, 8)):
        for column, group_size in enumerate((32, 64, 128)):
            inter = 128 if bits > 4 else 256 if group_size == 128 else 192
            dtype = "f16" if (row + column) % 3 == 1 else "bf16"
            vocab = 163 if column else 160
            if (row + column) % 2 == 0:
                # Llama with all four biases where the group is 64, plain elsewhere.
                more = {"attention_bias": True, "mlp_bias": True} if group_size == 64 else {}
                config = dense("llama", 128, inter, 4, 2, vocab, tied=column == 0, **more)
            else:
                config = dense("qwen3", 128, inter, 4, 2, vocab, tied=column == 1)
            yield Case(f"{config['model_type']}-{bits}bit-g{group_size}", config, dtype, Quantization(bits, group_size))


QUANTIZED = [
    *matrix(),
    # 5 KV heads and 3 groups in a row: nothing divides evenly.
    Case("qwen3-4bit-5-kv-heads", dense("qwen3", 192, 320, 10, 5, 163, layers=1), "bf16", Quantization(4, 64)),
    Case(
        "mistral-4bit-window",
        dense("mistral", 128, 128, 6, 2, 163, tied=False, sliding_window=16),
        "bf16",
        Quantization(4, 64),
        windows=(16, 16),
    ),
    # As Ministral 3 and Devstral 2: the language model inside a multimodal wrapper.
    Case(
        "mistral3-4bit-wrapped",
        {
            "architectures": ["Mistral3ForConditionalGeneration"],
            "model_type": "mistral3",
            "text_config": dense("ministral3", 128, 256, 4, 2, 163, tied=False, rope_theta=None,
                                 rope_parameters=MINISTRAL3_ROPE),
            "vision_config": {"model_type": "pixtral", "hidden_size": 32, "num_hidden_layers": 1},
        },
        "bf16",
        Quantization(4, 32),
        ignored={
            "vision_tower.patch_conv.weight": (32, 3, 2, 2),
            "multi_modal_projector.linear_1.weight": (128, 32),
        },
    ),
    Case(
        "qwen2-8bit-yarn",
        dense("qwen2", 128, 128, 4, 2, 163, layers=1, head_dim=None, rope_scaling=YARN),
        "f16",
        Quantization(8, 64),
    ),
    Case(
        "llama-mixed-bits",
        dense("llama", 128, 256, 4, 2, 163, tied=False, rope_scaling=LLAMA3_ROPE),
        "bf16",
        Quantization(
            4,
            64,
            {
                "model.embed_tokens": {"bits": 6, "group_size": 32, "mode": "affine"},
                "lm_head": {"bits": 8, "group_size": 64, "mode": "affine"},
                "model.layers.0.mlp.down_proj": {"bits": 6, "group_size": 64, "mode": "affine"},
                "model.layers.0.self_attn.v_proj": {"bits": 8, "group_size": 32, "mode": "affine"},
                "model.layers.1.mlp.down_proj": {"bits": 8, "group_size": 128, "mode": "affine"},
                "model.layers.1.self_attn.v_proj": False,
            },
        ),
    ),
    Case("llama-4bit-two-files", dense("llama", 128, 192, 4, 2, 163), "bf16", Quantization(4, 64), files=2),
]



def experts(model_type, architecture, **more):
    """A config with experts, as MLX keeps them: one stack for each matrix."""
    config = dense("llama", 64, 64, 4, 2, 163, tied=False, num_experts_per_tok=2)
    return {**config, "model_type": model_type, "architectures": [architecture + "ForCausalLM"], **more}


ROUTER_8BIT = {"group_size": 64, "bits": 8, "mode": "affine"}
GPT_OSS = experts(
    "gpt_oss", "GptOss", num_local_experts=4, attention_bias=True, swiglu_limit=7.0, sliding_window=16,
    layer_types=["sliding_attention", "full_attention"], rope_theta=150000.0,
    rope_scaling={"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 64, "beta_fast": 32.0,
                  "beta_slow": 1.0, "truncate": True},
)
EXPERTS = [
    Case(
        "qwen3_moe-4bit",
        experts("qwen3_moe", "Qwen3Moe", num_experts=6, moe_intermediate_size=192, norm_topk_prob=True,
                decoder_sparse_step=1, mlp_only_layers=[]),
        "bf16",
        Quantization(4, 64, {f"model.layers.{layer}.mlp.gate": ROUTER_8BIT for layer in range(2)}),
    ),
    Case("gpt_oss-bf16", GPT_OSS, "bf16"),
    # As mlx-community's: experts in mxfp4, the rest in 8 bits.
    Case(
        "gpt_oss-mxfp4",
        GPT_OSS,
        "bf16",
        Quantization(
            4,
            32,
            {
                **{f"model.layers.{layer}.mlp.router": ROUTER_8BIT for layer in range(2)},
                **{f"model.layers.{layer}.self_attn.{name}_proj": ROUTER_8BIT for layer in range(2) for name in "qkvo"},
                "model.embed_tokens": ROUTER_8BIT,
                "lm_head": ROUTER_8BIT,
            },
            "mxfp4",
        ),
    ),
    # MLX stores kv_b as two stacks of heads, one of them transposed. Every token takes all experts:
    # rounded activations would change a choice in one of the rows.
    Case(
        "deepseek_v3-4bit-g32",
        experts("deepseek_v3", "DeepseekV3", n_routed_experts=6, n_shared_experts=1, moe_intermediate_size=128,
                q_lora_rank=64, kv_lora_rank=64, qk_nope_head_dim=64, qk_rope_head_dim=32, v_head_dim=32,
                num_experts_per_tok=6, first_k_dense_replace=1, n_group=1, topk_group=1, norm_topk_prob=True, routed_scaling_factor=2.5,
                num_key_value_heads=4, head_dim=None, moe_layer_freq=1, topk_method="noaux_tc", scoring_func="sigmoid"),
        "bf16",
        Quantization(4, 32),
    ),
]

# The last layer attends. As MLX-LM converts them: norms with the one that Hugging Face's files
# leave out, convolutions with the taps in the middle.
DELTA = dict(
    num_hidden_layers=3, full_attention_interval=3, linear_conv_kernel_dim=4, rms_norm_eps=1e-6,
    rope_theta=10000.0, num_key_value_heads=2, head_dim=64,
)
DELTA_CASES = [
    # Two value heads for each of three key heads, in two projections.
    Case(
        "qwen3_next-4bit",
        experts("qwen3_next", "Qwen3Next", **DELTA, linear_num_key_heads=3, linear_num_value_heads=6,
                linear_key_head_dim=16, linear_value_head_dim=32, num_experts=5, moe_intermediate_size=128,
                shared_expert_intermediate_size=64, norm_topk_prob=True, decoder_sparse_step=1, mlp_only_layers=[],
                partial_rotary_factor=0.25),
        "bf16",
        Quantization(4, 64, {f"model.layers.{layer}.mlp.{gate}": ROUTER_8BIT
                             for layer in range(3) for gate in ("gate", "shared_expert_gate")}),
    ),
    # As Qwen3.5: inside a multimodal wrapper, with a layer that predicts a token further. Two heads
    # share a quantization group, so five ranks get three pairs of heads.
    Case(
        "qwen3_5-4bit-wrapped",
        {
            "architectures": ["Qwen3_5ForConditionalGeneration"],
            "model_type": "qwen3_5",
            "tie_word_embeddings": False,
            "text_config": {
                **dense("qwen3", 128, 192, 4, 2, 163, tied=False, rope_theta=None),
                **DELTA, "rope_theta": None, "model_type": "qwen3_5_text", "linear_num_key_heads": 6, "linear_num_value_heads": 6,
                "linear_key_head_dim": 32, "linear_value_head_dim": 32, "attn_output_gate": True,
                "rope_parameters": {"type": "default", "mrope_section": [3, 3, 2], "rope_theta": 100000.0,
                                    "partial_rotary_factor": 0.25},
            },
            "vision_config": {"model_type": "qwen3_5", "depth": 1, "hidden_size": 32},
        },
        "bf16",
        Quantization(4, 64),
        ignored={
            "vision_tower.patch_embed.proj.weight": (32, 3, 2, 2),
            "language_model.mtp.fc.weight": (128, 256),
            "language_model.mtp.layers.0.input_layernorm.weight": (128,),
        },
    ),
]

MORE_EXPERTS = [
    # Norms of all queries and of all keys, which ranks have parts of.
    Case(
        "minimax_m2-4bit",
        experts("minimax_m2", "MiniMaxM2", intermediate_size=128, num_attention_heads=6, num_key_value_heads=3,
                num_local_experts=5, shared_intermediate_size=0, rotary_dim=16, scoring_func="sigmoid",
                use_qk_norm=True),
        "bf16",
        Quantization(4, 64, {f"model.layers.{layer}.block_sparse_moe.gate": ROUTER_8BIT for layer in range(2)}),
    ),
    # MLX-LM drops the correction of the router's choice.
    Case(
        "ernie4_5_moe-4bit",
        experts("ernie4_5_moe", "Ernie4_5_Moe", num_experts_per_tok=None, moe_num_experts=5, moe_k=2,
                moe_num_shared_experts=1, moe_intermediate_size=128, moe_layer_start_index=1, moe_layer_interval=1,
                moe_layer_end_index=1, use_bias=False),
        "bf16",
        Quantization(4, 64, {"model.layers.1.mlp.gate": ROUTER_8BIT}),
    ),
    # As Kimi K2: one group of experts, YaRN whose ramp is a step.
    Case(
        "kimi_k2-4bit",
        experts("kimi_k2", "DeepseekV3", n_routed_experts=6, n_shared_experts=1, moe_intermediate_size=128,
                q_lora_rank=64, kv_lora_rank=64, qk_nope_head_dim=64, qk_rope_head_dim=32, v_head_dim=64,
                num_experts_per_tok=6, first_k_dense_replace=1, n_group=1, topk_group=1, norm_topk_prob=True,
                routed_scaling_factor=2.827, num_key_value_heads=4, head_dim=None, moe_layer_freq=1,
                topk_method="noaux_tc", scoring_func="sigmoid", rope_theta=50000.0,
                rope_scaling={"type": "yarn", "factor": 32.0, "original_max_position_embeddings": 64,
                              "beta_fast": 1.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0}),
        "bf16",
        Quantization(4, 32),
    ),
]


def family(model_type, hidden, inter, heads, kv_heads, **more):
    """The config of a dense family."""
    return {**dense("llama", hidden, inter, heads, kv_heads, 163, **more), "model_type": model_type}


OLD_YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32, "attention_factor": 1.2079441541679836,
            "beta_fast": 32.0, "beta_slow": 1.0}
FAMILY_CASES = [
    # As Gemma 3 4B: inside a multimodal wrapper, fields of the class's defaults left out.
    Case(
        "gemma3-4bit-wrapped",
        {
            "architectures": ["Gemma3ForConditionalGeneration"],
            "model_type": "gemma3",
            "vocab_size": 163,
            "text_config": {
                "model_type": "gemma3_text", "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 3,
                "head_dim": 32, "sliding_window": 16, "sliding_window_pattern": 3, "query_pre_attn_scalar": 24,
                "rope_scaling": {"rope_type": "linear", "factor": 8.0}, "vocab_size": 163,
                "tie_word_embeddings": True,
            },
            "vision_config": {"model_type": "siglip_vision_model", "hidden_size": 32},
        },
        "bf16",
        Quantization(4, 64),
        ignored={"vision_tower.patch_embedding.weight": (32, 2, 2, 3), "multi_modal_projector.mm_soft_emb_norm.weight": (32,)},
    ),
    # Queries, keys and values in one tensor, gates and ups in another.
    Case(
        "phi3-4bit",
        family("phi3", 192, 192, 6, 3, head_dim=None, tied=False, partial_rotary_factor=0.75,
               original_max_position_embeddings=16,
               rope_scaling={"type": "longrope", "short_factor": [1.0] * 12,
                             "long_factor": [1.5 + i / 2 for i in range(12)]}),
        "bf16",
        Quantization(4, 64),
    ),
    Case("olmo2-4bit", family("olmo2", 192, 256, 6, 3, head_dim=None, tied=False), "bf16", Quantization(4, 64)),
    Case(
        "olmo3-4bit",
        family("olmo3", 128, 128, 4, 2, head_dim=None, tied=False, layers=4, sliding_window=16, rope_scaling=OLD_YARN),
        "bf16",
        Quantization(4, 64),
    ),
    Case(
        "granite-4bit",
        family("granite", 128, 192, 4, 2, head_dim=None, embedding_multiplier=12.0, residual_multiplier=0.22,
               attention_multiplier=0.015625, logits_scaling=8.0, attention_bias=False, mlp_bias=False),
        "bf16",
        Quantization(4, 64),
    ),
    # Factors of its own names.
    Case(
        "minicpm-4bit",
        family("minicpm", 128, 128, 4, 2, head_dim=None, tied=False, scale_emb=3.0, scale_depth=0.6, dim_model_base=80),
        "bf16",
        Quantization(4, 64),
    ),
    Case("telechat3-4bit", family("telechat3", 128, 128, 4, 2, tied=False), "bf16", Quantization(4, 64)),
    Case(
        "glm4-4bit",
        family("glm4", 128, 192, 6, 3, tied=False, attention_bias=True, partial_rotary_factor=0.5),
        "bf16",
        Quantization(4, 64),
    ),
    Case(
        "exaone4-4bit",
        {**family("exaone4", 128, 192, 5, 5, tied=False, sliding_window=16, sliding_window_pattern="LG"),
         "rope_scaling": None},
        "bf16",
        Quantization(4, 32),
    ),
    # MLX-LM's Gemma 2 has no windows: this one's is as long as the context.
    Case(
        "gemma2-4bit",
        family("gemma2", 128, 192, 4, 2, sliding_window=256, query_pre_attn_scalar=24.0, attn_logit_softcapping=2.0,
               final_logit_softcapping=20.0),
        "bf16",
        Quantization(4, 64),
    ),
    # Two layers have a window, and only they rotate; mixer and feed-forward read one norm.
    Case(
        "cohere2-4bit",
        {**family("cohere2", 128, 192, 4, 2, layers=3, layer_norm_eps=1e-5, layer_norm_bias=False, logit_scale=0.25,
                  sliding_window=16, sliding_window_pattern=3), "rms_norm_eps": 1e-3},
        "bf16",
        Quantization(4, 64),
    ),
    Case(
        "hunyuan_v1_dense-4bit",
        family("hunyuan_v1_dense", 128, 192, 6, 3, tied=False, attention_bias=False, use_qk_norm=True,
               rope_scaling={"type": "dynamic", "alpha": 30.0, "factor": 1.0}),
        "bf16",
        Quantization(4, 64),
    ),
    # State spaces, attention, experts without gates, an MLP: a layer each. Time steps have limits.
    Case(
        "nemotron_h-4bit",
        {**family("nemotron_h", 128, 128, 4, 2, layers=4, tied=False), "hybrid_override_pattern": "ME*-",
         "layer_norm_epsilon": 1e-5, "attention_bias": False, "mamba_num_heads": 6, "mamba_head_dim": 32, "mamba_proj_bias": False,
         "ssm_state_size": 16, "conv_kernel": 4, "n_groups": 3, "mlp_bias": False, "use_bias": False, "use_conv_bias": True,
         "moe_intermediate_size": 64, "moe_shared_expert_intermediate_size": 128, "n_group": 1, "topk_group": 1, "n_routed_experts": 5,
         "n_shared_experts": 1, "num_experts_per_tok": 2, "norm_topk_prob": True, "routed_scaling_factor": 2.5,
         "time_step_limit": [0.3, 1.5], "mlp_hidden_act": "relu2", "mamba_hidden_act": "silu"},
        "bf16",
        Quantization(4, 64),
    ),
    # Granite 4: state spaces of one group, with limits of time steps; experts and a shared one.
    Case(
        "granitemoehybrid-4bit",
        {**family("granitemoehybrid", 64, 64, 4, 2, layers=2, tied=True, head_dim=None), "layer_types": ["mamba", "attention"], "position_embedding_type": "nope",
         "attention_bias": False, "embedding_multiplier": 3.0, "residual_multiplier": 0.4, "attention_multiplier": 0.2, "logits_scaling": 1.5,
         "num_local_experts": 5, "num_experts_per_tok": 2, "shared_intermediate_size": 128, "mamba_n_heads": 6, "mamba_d_head": 32,
         "mamba_proj_bias": False, "mamba_d_state": 16, "mamba_d_conv": 4, "mamba_n_groups": 1, "mamba_conv_bias": True,
         "time_step_limit": [0.3, 1.5]},
        "bf16",
        Quantization(4, 64, {f"model.layers.{layer}.block_sparse_moe.router.layer": ROUTER_8BIT for layer in (0, 1)}),
    ),
    # Gated short convolutions, and attention by the old fields.
    Case(
        "lfm2-4bit",
        {**family("lfm2", 128, 256, 4, 2, layers=3, tied=True, head_dim=None), "norm_eps": 1e-5, "block_dim": 128, "block_ff_dim": 256,
         "block_multiple_of": 64, "block_ffn_dim_multiplier": 1.0, "block_auto_adjust_ff_dim": True, "conv_bias": False, "conv_L_cache": 3,
         "full_attn_idxs": [1]},
        "bf16",
        Quantization(4, 64),
    ),
    # The same with experts behind a plain MLP.
    Case(
        "lfm2_moe-4bit",
        {**family("lfm2_moe", 128, 192, 4, 2, layers=2, tied=True, head_dim=None), "norm_eps": 1e-5, "layer_types": ["conv", "full_attention"],
         "conv_bias": False, "conv_L_cache": 3, "num_dense_layers": 1, "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 128,
         "norm_topk_prob": True, "use_expert_bias": True, "routed_scaling_factor": 1.5},
        "bf16",
        Quantization(4, 64, {"model.layers.1.feed_forward.gate": ROUTER_8BIT}),
    ),
    # The delta rule with a decay for each channel, in two of three layers.
    Case(
        "kimi_linear-4bit",
        {**family("kimi_linear", 128, 192, 4, 4, layers=3, tied=False),
         "model_max_length": 256, "num_experts": 5, "num_experts_per_token": 2, "moe_intermediate_size": 128, "num_shared_experts": 1,
         "first_k_dense_replace": 1, "moe_layer_freq": 1, "moe_renormalize": True, "routed_scaling_factor": 1.0, "kv_lora_rank": 64,
         "qk_nope_head_dim": 64, "qk_rope_head_dim": 16, "v_head_dim": 32, "mla_use_nope": True, "num_expert_group": 1, "topk_group": 1,
         "linear_attn_config": {"num_heads": 6, "head_dim": 64, "short_conv_kernel_size": 4, "kda_layers": [1, 3], "full_attn_layers": [2]}},
        "bf16",
        Quantization(4, 64, {f"model.layers.{layer}.mlp.gate": ROUTER_8BIT for layer in (1, 2)}),
    ),
    # As published. The window is longer than the prompts: MLX-LM's is one token shorter than
    # transformers'.
    Case(
        "mimo_v2_flash-4bit",
        {**experts("mimo_v2_flash", "MiMoV2Flash", n_routed_experts=6, moe_intermediate_size=128, n_shared_experts=None, num_attention_heads=6,
                   num_key_value_heads=3, head_dim=96, v_head_dim=32, swa_num_attention_heads=6, swa_num_key_value_heads=6, swa_head_dim=96,
                   swa_v_head_dim=32, swa_rope_theta=1000.0, hybrid_layer_pattern=[0, 1], moe_layer_freq=[0, 1], sliding_window_size=255,
                   add_swa_attention_sink_bias=True, add_full_attention_sink_bias=False, routed_scaling_factor=None, topk_method="noaux_tc",
                   scoring_func="sigmoid", norm_topk_prob=True, n_group=1, topk_group=1, layernorm_epsilon=1e-5, partial_rotary_factor=0.334,
                   attention_value_scale=0.707),
         "rms_norm_eps": 1e-3},
        "bf16",
        Quantization(4, 64),
        ignored={"model.mtp.layers.0.eh_proj.weight": (64, 128)},
    ),
    # As MiMo 7B, without its layers that predict further tokens.
    Case("mimo-bf16", family("mimo", 64, 96, 4, 2, head_dim=None, tied=False, num_nextn_predict_layers=0), "bf16"),
    # As Gemma 4 E2B: an input for each layer. The last layers read keys and values of earlier
    # ones, and have wider MLPs.
    Case(
        "gemma4_inputs-4bit",
        {**family("gemma4_text", 128, 192, 4, 2, layers=3), "global_head_dim": 64, "attention_k_eq_v": False,
         "hidden_size_per_layer_input": 64, "vocab_size_per_layer_input": 163, "num_kv_shared_layers": 1, "use_double_wide_mlp": True,
         "hidden_activation": "gelu_pytorch_tanh", "final_logit_softcapping": 15.0, "sliding_window": 16,
         "layer_types": ["sliding_attention", "full_attention", "full_attention"],
         "enable_moe_block": False, "rms_norm_eps": 1e-6,
         "rope_parameters": {"sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
                             "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 10000.0}}},
        "bf16",
        Quantization(4, 64),
    ),
    # As Gemma 4 26B-A4B: experts next to each layer's MLP, all with norms of their own.
    Case(
        "gemma4_experts-4bit",
        {**family("gemma4_text", 128, 192, 4, 2, layers=3), "global_head_dim": 64, "num_global_key_value_heads": 1, "attention_k_eq_v": True,
         "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0, "use_double_wide_mlp": False, "hidden_activation": "gelu_pytorch_tanh",
         "final_logit_softcapping": 15.0, "sliding_window": 16, "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
         "enable_moe_block": True, "num_experts": 5, "top_k_experts": 2, "moe_intermediate_size": 64, "rms_norm_eps": 1e-6,
         "rope_parameters": {"sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
                             "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 10000.0}}},
        "bf16",
        Quantization(4, 64, {f"model.layers.{layer}.router.proj": ROUTER_8BIT for layer in range(3)}),
    ),
]


def kimi_k3(**more):
    """As Kimi K3: the residual stream is put aside before each second layer; bounded decays and gates of one product; gated latent attention;
    experts narrower than the stream, normed."""
    text = {
        **family("kimi_linear", 128, 192, 6, 6, layers=5, tied=False), "hidden_act": "situ", "activation_situ_beta": 1.5, "activation_situ_linear_beta": 2.0,
        "attn_res_block_size": 2, "num_experts": 5, "num_experts_per_token": 2, "moe_intermediate_size": 64, "num_shared_experts": 1,
        "first_k_dense_replace": 1, "moe_layer_freq": 1, "moe_renormalize": True, "moe_router_activation_func": "sigmoid", "routed_scaling_factor": 2.5,
        "routed_expert_hidden_size": 64, "latent_moe_use_norm": True, "num_expert_group": 1, "topk_group": 1, "q_lora_rank": 64,
        "kv_lora_rank": 64, "qk_nope_head_dim": 64, "qk_rope_head_dim": 16, "v_head_dim": 32, "mla_use_nope": True, "mla_use_output_gate": True,
        "linear_attn_config": {"num_heads": 6, "head_dim": 64, "short_conv_kernel_size": 4, "kda_layers": [1, 2, 4], "full_attn_layers": [3, 5],
                               "gate_lower_bound": -5.0, "use_full_rank_gate": True},
        **more,
    }
    return {"architectures": ["KimiK3ForConditionalGeneration"], "model_type": "kimi_k3", "tie_word_embeddings": False, "text_config": text}


MIXES = [f"layers.{layer}.{part}_res_proj" for layer in range(5) for part in ("self_attention", "mlp")] + ["output_attn_res_proj"]
KIMI_K3_CASES = [
    Case(
        "kimi_k3-4bit",
        kimi_k3(),
        "bf16",
        Quantization(4, 64, {
            **{f"language_model.model.layers.{layer}.mlp.gate": ROUTER_8BIT for layer in range(1, 5)},
            **{f"language_model.model.{path}": False for path in MIXES},
        }),
    ),
    # As published. Three layers are put together.
    Case(
        "kimi_k3-mxfp4-published",
        {
            **kimi_k3(attn_res_block_size=3, activation_situ_beta=2.5, activation_situ_linear_beta=1.5),
            "quantization_config": {
                "quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized",
                "config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32,
                                                                                "symmetric": True, "scale_dtype": "torch.uint8"}}},
            },
        },
        "bf16",
        published=True,
        ignored={"vision_tower.patch_embed.proj.weight": (32, 3, 2, 2), "mm_projector.linear_1.weight": (128, 32)},
    ),
]

LATENT = dict(num_key_value_heads=4, head_dim=None, q_lora_rank=64, kv_lora_rank=64, qk_nope_head_dim=64, qk_rope_head_dim=32, v_head_dim=64)
ROUTED = dict(n_routed_experts=5, n_shared_experts=1, moe_intermediate_size=64, first_k_dense_replace=1, n_group=1, topk_group=1, norm_topk_prob=True,
              routed_scaling_factor=1.5, moe_layer_freq=1, topk_method="noaux_tc", scoring_func="sigmoid")
# A selection of more tokens than prompts have.
INDEXED = dict(index_topk=128, index_head_dim=64, index_n_heads=4, attention_bias=False)
MSCALES = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 0.707,
           "mscale_all_dim": 0.707}


def routed(name, config, *routers, first=0):
    """A case in 4 bits, whose routers of layers from `first` on have 8. Some of MLX-LM's routers stay bf16."""
    paths = [f"model.layers.{layer}.{router}" for layer in range(first, config["num_hidden_layers"]) for router in routers]
    return Case(name, config, "bf16", Quantization(4, 32, {path: {**ROUTER_8BIT, "group_size": 32} for path in paths}))


# Families that make_transformers.py has as well.
BOTH_CASES = [
    routed("mixtral-4bit", experts("mixtral", "Mixtral", num_local_experts=4, head_dim=None), "block_sparse_moe.gate"),
    routed("qwen2_moe-4bit", experts("qwen2_moe", "Qwen2Moe", num_experts=5, moe_intermediate_size=64, shared_expert_intermediate_size=128, head_dim=None),
           "mlp.gate", "mlp.shared_expert_gate"),
    routed("glm4_moe-4bit", experts("glm4_moe", "Glm4Moe", **ROUTED, use_qk_norm=True, attention_bias=True, partial_rotary_factor=0.5, rope_scaling=None)),
    routed("glm4_moe_lite-4bit", experts("glm4_moe_lite", "Glm4MoeLite", **LATENT, **ROUTED, num_nextn_predict_layers=0)),
    routed("deepseek_v2-4bit", experts("deepseek_v2", "DeepseekV2", **LATENT, **{**ROUTED, "topk_method": "greedy", "norm_topk_prob": False,
                                                                                "scoring_func": "softmax"}, rope_scaling=MSCALES)),
    routed("deepseek_v32-4bit", experts("deepseek_v32", "DeepseekV32", **LATENT, **ROUTED, **INDEXED, rope_scaling=MSCALES)),
    routed("glm_moe_dsa-4bit", experts("glm_moe_dsa", "GlmMoeDsa", **LATENT, **ROUTED, **INDEXED, rope_theta=None,
                                       rope_parameters={"rope_type": "default", "rope_theta": 10000.0})),
    routed("mistral4-4bit", experts("mistral4", "Mistral4", **LATENT, **{**ROUTED, "scoring_func": "softmax"}, rope_theta=None, rope_parameters={
        **MSCALES, "rope_type": "yarn", "rope_theta": 10000.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1}), "mlp.gate", first=1),
    routed("dots1-4bit", experts("dots1", "Dots1", **ROUTED, attention_bias=False)),
    routed("olmoe-4bit", experts("olmoe", "Olmoe", num_experts=5, head_dim=None, norm_topk_prob=False, attention_bias=False), "mlp.gate"),
    Case("seed_oss-4bit", family("seed_oss", 128, 128, 4, 2, tied=False, attention_bias=True, attention_out_bias=False), "bf16", Quantization(4, 64)),
    # The second layer does not rotate.
    Case("smollm3-4bit", family("smollm3", 128, 128, 4, 2, no_rope_layers=[1, 0]), "bf16", Quantization(4, 64)),
    # As Llama 4: inside a multimodal wrapper, plain and expert layers in turn, chunks of 16 tokens
    # in all layers but the last. MLX-LM norms queries and keys with 1e-6, transformers with
    # rms_norm_eps.
    Case(
        "llama4-4bit-wrapped",
        {
            "architectures": ["Llama4ForConditionalGeneration"],
            "model_type": "llama4",
            "text_config": {
                **experts("llama4_text", "Llama4", num_experts_per_tok=1, num_local_experts=3, intermediate_size=128,
                          intermediate_size_mlp=64, interleave_moe_layer_step=2, attention_chunk_size=16, floor_scale=8, attn_scale=0.3,
                          use_qk_norm=True, attention_bias=False, rms_norm_eps=1e-6, rope_scaling=None),
                "num_hidden_layers": 4,
            },
            "vision_config": {"model_type": "llama4_vision_model", "hidden_size": 32, "num_hidden_layers": 1},
        },
        "bf16",
        Quantization(4, 64, {f"language_model.model.layers.{layer}.feed_forward.router": ROUTER_8BIT for layer in (1, 3)}),
        ignored={"vision_model.patch_embedding.linear.weight": (32, 12), "multi_modal_projector.linear_1.weight": (64, 32)},
    ),
    # As Hunyuan A13B: numbers for each layer. MLX-LM never divides the weights of the chosen
    # experts by their sum, as transformers and the original do.
    Case(
        "hunyuan-4bit",
        {**family("hunyuan", 128, 64, 4, 2, attention_bias=False, use_qk_norm=True, rope_scaling={"type": "dynamic", "alpha": 30.0, "factor": 1.0}),
         "num_experts": 4, "moe_topk": [2, 2], "norm_topk_prob": False, "num_shared_expert": [1, 1], "moe_intermediate_size": [64, 64], "use_mixed_mlp_moe": True,
         "use_cla": False, "cla_share_factor": 2},
        "bf16",
        Quantization(4, 64, {f"model.layers.{layer}.mlp.gate.wg": ROUTER_8BIT for layer in (0, 1)}),
    ),
    Case("cohere-4bit", {**family("cohere", 128, 128, 4, 2, head_dim=None, layer_norm_eps=1e-5, logit_scale=0.25, use_qk_norm=True), "rms_norm_eps": 1e-3},
         "bf16", Quantization(4, 64)),
]

def deepseek_v41(**more):
    """As DeepSeek V4.1 without engram: single tokens only, then two tokens that become one, then one by one; layers that read the compressed tokens,
    the keys and the selection of layers before them; a selection within blocks."""
    return {
        "architectures": ["DeepseekV41ForCausalLM"], "model_type": "deepseek_v41", "vocab_size": 163, "hidden_size": 64, "num_hidden_layers": 6,
        "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 64, "q_lora_rank": 32, "qk_rope_head_dim": 16, "o_groups": 3, "o_lora_rank": 32,
        "moe_intermediate_size": 32, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "scoring_func": "sqrtsoftplus",
        "norm_topk_prob": True, "routed_scaling_factor": 1.5, "swiglu_limit": 0.7, "rms_norm_eps": 1e-20, "sliding_window": 24,
        "compress_ratios": [0, 2, 2, 1, 1, 1], "kv_source_layer_ids": [1, 3], "index_source_layer_ids": [1, 3, 4], "candidate_source_layer_id": 3,
        "candidate_topk_blocks": 14, "candidate_block_size": 4, "index_n_heads": 2, "index_head_dim": 32, "index_topk": 33,
        "compress_rope_theta": 160000.0, "rope_theta": 10000.0, "max_position_embeddings": 256, "hc_mult": 2, "hc_sinkhorn_iters": 20, "hc_eps": 1e-6,
        "rope_scaling": {"type": "yarn", "factor": 4, "original_max_position_embeddings": 32, "beta_fast": 32, "beta_slow": 1},
        "tie_word_embeddings": False,
        **more,
    }


DEEPSEEK_V41_CASES = [Case("deepseek_v41-4bit", deepseek_v41(), "bf16", Quantization(4, 32))]


def small(model_type, *, wrapped=None, **more):
    """A config that is as small as the quantization groups allow; `wrapped`: the model_type around it."""
    config = {**family(model_type, 64, 64, 2, 1, tied=False, vocab_size=67), **more}
    return {"model_type": wrapped, "vocab_size": 67, "tie_word_embeddings": config["tie_word_embeddings"], "text_config": config} if wrapped else config


def small_case(config, *modules_8bit, **more):
    """A case in 4 bits, in which these modules have 8."""
    name = f"{config['model_type']}-4bit" + ("-wrapped" if "text_config" in config else "")
    return Case(name, config, "bf16", Quantization(4, 32, {path: {**ROUTER_8BIT, "group_size": 32} for path in modules_8bit}), **more)


def gates(prefix="", module="mlp.gate", layers=(0, 1)):
    """The routers of some layers."""
    return [f"{prefix}model.layers.{layer}.{module}" for layer in layers]


VISION = {"vision_tower.patch_embed.proj.weight": (32, 3, 2, 2)}
FEW_EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, norm_topk_prob=True, decoder_sparse_step=1, mlp_only_layers=[])
SMALL_LATENT = dict(num_key_value_heads=2, head_dim=None, q_lora_rank=32, kv_lora_rank=32, qk_nope_head_dim=32, qk_rope_head_dim=32, v_head_dim=32)
SMALL_ROUTED = {**ROUTED, "n_routed_experts": 4, "moe_intermediate_size": 32, "num_experts_per_tok": 2}

# Families that only make_transformers.py had at first. README.md says which are not here, and why.
SMALL_CASES = [
    small_case(small("ernie4_5", use_bias=True)),
    small_case(small("helium", attention_bias=False, mlp_bias=False)),
    small_case(small("internlm3", bias=False, qkv_bias=False)),
    # MLX-LM rotates all of a head, whatever `partial_rotary_factor` is.
    small_case(small("glm", attention_bias=True, partial_rotary_factor=1.0)),
    small_case(small("granitemoe", num_local_experts=4, num_experts_per_tok=2, intermediate_size=32, attention_bias=False, embedding_multiplier=3.0,
                     residual_multiplier=0.4, attention_multiplier=0.2, logits_scaling=1.5), *gates(module="block_sparse_moe.router.layer")),
    # Only layers with a window rotate.
    small_case(small("exaone_moe", num_experts=4, num_experts_per_tok=2, num_shared_experts=1, moe_intermediate_size=32, sliding_window=16,
                     layer_types=["sliding_attention", "full_attention"], is_moe_layer=[False, True], first_k_dense_replace=1, n_group=1, topk_group=1,
                     norm_topk_prob=True, scoring_func="sigmoid", topk_method="noaux_tc", routed_scaling_factor=2.5)),
    small_case(small("solar_open", **SMALL_ROUTED, partial_rotary_factor=1.0, attention_bias=False, use_qk_norm=False, rope_scaling=None)),
    # Layers with a window have a rotation of their own.
    small_case(small("mellum", **FEW_EXPERTS, sliding_window=16, layer_types=["sliding_attention", "full_attention"], rope_theta=None,
                     rope_parameters={"sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
                                      "full_attention": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0,
                                                         "original_max_position_embeddings": 32}}), *gates()),
    # MLX-LM divides the logits of untied models only, and norms compressed queries and vectors with
    # 1e-5.
    small_case(small("minicpm3", **SMALL_LATENT, scale_emb=3.0, scale_depth=0.6, dim_model_base=40, attention_bias=False,
                     rope_scaling={"type": "longrope", "original_max_position_embeddings": 16, "short_factor": [1.0] * 16,
                                   "long_factor": [1.5 + i / 2 for i in range(16)]})),
    small_case(small("youtu_llm", **SMALL_LATENT, rms_norm_eps=1e-6, attention_bias=False, mlp_bias=False, rope_scaling=None)),
    small_case(small("qwen2", wrapped="qwen2_vl", num_key_value_heads=2, rope_scaling={"type": "mrope", "mrope_section": [4, 6, 6]}), ignored=VISION),
    small_case(small("qwen3_vl_text", wrapped="qwen3_vl", rope_scaling={"rope_type": "default", "mrope_interleaved": True, "mrope_section": [6, 5, 5]}),
               ignored=VISION),
    small_case(small("qwen3_vl_moe_text", wrapped="qwen3_vl_moe", **FEW_EXPERTS), *gates("language_model."),
               ignored={"visual.patch_embed.proj.weight": (32, 3, 2, 2)}),
    small_case(small("qwen3_5_moe_text", wrapped="qwen3_5_moe", **FEW_EXPERTS, shared_expert_intermediate_size=32, full_attention_interval=2,
                     linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16, linear_value_head_dim=16, linear_conv_kernel_dim=4,
                     attn_output_gate=True, rms_norm_eps=1e-6, rope_theta=None,
                     rope_parameters={"type": "default", "mrope_section": [2, 1, 1], "rope_theta": 100000.0, "partial_rotary_factor": 0.25}),
               *gates("language_model."), *gates("language_model.", "mlp.shared_expert_gate"), ignored=VISION),
    # As Gemma 4 31B: layers without a window have wider heads, one KV head, and keys for values.
    small_case(small("gemma4_text", wrapped="gemma4", tie_word_embeddings=True, num_attention_heads=4, num_key_value_heads=2, global_head_dim=64,
                     num_global_key_value_heads=1, attention_k_eq_v=True, hidden_size_per_layer_input=0, num_kv_shared_layers=0, use_double_wide_mlp=False,
                     hidden_activation="gelu_pytorch_tanh", final_logit_softcapping=15.0, sliding_window=16,
                     layer_types=["sliding_attention", "full_attention"], rms_norm_eps=1e-6, rope_theta=None,
                     rope_parameters={"sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
                                      "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 10000.0}}),
               ignored=VISION),
    small_case(small("deepseek_v3", wrapped="kimi_k25", **SMALL_LATENT, **SMALL_ROUTED, rope_scaling=MSCALES), ignored=VISION),
    # The second layer selects 9 blocks of 8 tokens, which are all tokens of these prompts.
    small_case(small("minimax_m3_vl_text", wrapped="minimax_m3_vl", num_local_experts=4, num_experts_per_tok=2, intermediate_size=32,
                     dense_intermediate_size=64, shared_intermediate_size=32, rotary_dim=16, partial_rotary_factor=0.5, moe_layer_freq=[0, 1],
                     swiglu_limit=0.7, swiglu_alpha=1.702, routed_scaling_factor=2.0, use_gemma_norm=True,
                     sparse_attention_config={"sparse_num_index_heads": 1, "sparse_index_dim": 32, "sparse_block_size": 8, "sparse_topk_blocks": 9,
                                              "sparse_local_block": 1, "sparse_attention_freq": [0, 1]}),
               *gates("language_model.", "block_sparse_moe.gate", [1]), ignored=VISION),
]

CASES = UNQUANTIZED + QUANTIZED + EXPERTS + DELTA_CASES + MORE_EXPERTS + FAMILY_CASES + KIMI_K3_CASES + BOTH_CASES + DEEPSEEK_V41_CASES + SMALL_CASES
