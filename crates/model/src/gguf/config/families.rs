//! The architectures of GGUF, and what they leave unsaid.

use thunder_compute::HeadSharing;

use super::hybrid;

/// How an architecture of GGUF is called in config.json, and what it leaves unsaid.
#[derive(Debug)]
pub(in crate::gguf) struct Family {
    /// `general.architecture`.
    pub(super) architecture: &'static str,
    /// The family of files with experts; GGUF may use one name for both.
    pub(super) experts: bool,
    /// config.json's `model_type`.
    pub(super) model_type: &'static str,
    /// Rows of query and key heads are stored in pairs, as rotations of neighbours need them.
    pub paired_heads: bool,
    /// Attention is latent.
    pub(super) latent: bool,
    /// An indexer selects the tokens of latent attention.
    pub(super) indexer: bool,
    /// The weights of the chosen experts are divided by their sum unless the file says otherwise;
    /// `None`: `model_type` says it.
    pub(super) renormalise: Option<bool>,
    /// A sliding window is in every layer but each of this number; `None`: in every layer.
    pub(super) full_every: Option<usize>,
    /// Each layer of this number does not rotate; 0: all rotate.
    pub(super) unrotated_every: usize,
    /// Norms of queries and keys.
    pub(super) norm: Norm,
    /// config.json's name of `logit_scale`, for families that have one.
    pub(super) logit_scale: Option<&'static str>,
    /// Gemma: layers of the size whose scores have another scale.
    pub(super) wide_scale_layers: Option<u64>,
    /// The file's width of the shared expert is that of one without a gate.
    pub(super) plain_shared: bool,
    pub state_spaces: StateSpaces,
    /// `rope.scaling.finetuned` says whether heads are rotated.
    pub(super) finetuned_rotates: bool,
    /// Layers without a window have heads of another width and number (Gemma 4).
    pub(super) global_heads: bool,
    /// Values have another width than keys, and layers with a window have another number of KV
    /// heads (MiMo V2).
    pub(super) window_heads: bool,
    /// There are several residual streams.
    pub(super) streams: bool,
    /// Attention is to compressed tokens (DeepSeek V4).
    pub(super) compressed: bool,
    /// Layers without attention have a gated short convolution (LFM2).
    pub(super) convolutions: bool,
    /// The delta rule of layers without attention.
    pub(super) delta: Delta,
}

/// The delta rule of layers without attention.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Delta {
    /// All layers attend.
    None,
    /// A decay for each head; how value heads share a key head.
    Gated(HeadSharing),
    /// A decay for each channel.
    Channels,
}

/// Which layers have a state space.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::gguf) enum StateSpaces {
    /// None.
    None,
    /// Layers are a mixer or a feed-forward (Nemotron-H).
    Apart,
    /// Some have one in place of attention (Granite 4).
    ForAttention,
}

/// Whether queries and keys are normed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Norm {
    /// As `model_type` says.
    AsFamily,
    /// If the file has the norms.
    IfStored,
    /// Unless it is Llama 4 Maverick.
    UnlessMaverick,
}

const DENSE: Family = Family {
    architecture: "",
    experts: false,
    model_type: "",
    paired_heads: false,
    latent: false,
    indexer: false,
    renormalise: None,
    full_every: None,
    unrotated_every: 0,
    norm: Norm::AsFamily,
    logit_scale: None,
    wide_scale_layers: None,
    plain_shared: false,
    state_spaces: StateSpaces::None,
    finetuned_rotates: false,
    global_heads: false,
    window_heads: false,
    streams: false,
    compressed: false,
    convolutions: false,
    delta: Delta::None,
};

const fn dense(architecture: &'static str, model_type: &'static str, paired_heads: bool) -> Family {
    Family { architecture, model_type, paired_heads, ..DENSE }
}

const fn experts(architecture: &'static str, model_type: &'static str, renormalise: Option<bool>) -> Family {
    Family { architecture, model_type, experts: true, renormalise, ..DENSE }
}

/// Granite 3 and 4.
const GRANITE: Family = Family {
    logit_scale: Some("logits_scaling"),
    finetuned_rotates: true,
    ..dense("granite", "granite", true)
};

/// Granite with windows and sinks.
const GRANITE_SWA: Family =
    Family { logit_scale: Some("logits_scaling"), ..dense("granite_swa", "granite_swa", true) };

/// Granite 4 with state spaces.
const GRANITE_HYBRID: Family = Family {
    architecture: "granitehybrid",
    model_type: "granitemoehybrid",
    state_spaces: StateSpaces::ForAttention,
    ..GRANITE
};

pub(super) const FAMILIES: [Family; 63] = [
    // Llama 2 and 3, and Mistral, which GGUF does not tell from Llama.
    dense("llama", "llama", true),
    dense("mistral3", "ministral3", true),
    dense("qwen2", "qwen2", false),
    dense("qwen3", "qwen3", false),
    dense("seed_oss", "seed_oss", false),
    dense("ernie4_5", "ernie4_5", false),
    // SmolLM3 rotates three layers of four (llama.cpp's smollm3.cpp, `n_no_rope_layer_step`).
    Family { unrotated_every: 4, ..dense("smollm3", "smollm3", true) },
    // Mixtral.
    Family { paired_heads: true, ..experts("llama", "mixtral", None) },
    experts("qwen2moe", "qwen2_moe", Some(false)),
    experts("qwen3moe", "qwen3_moe", Some(true)),
    Family { norm: Norm::IfStored, ..experts("glm4moe", "glm4_moe", Some(false)) },
    Family { full_every: Some(2), ..experts("gpt-oss", "gpt_oss", None) },
    // Versions 2 and 3, R1, Kimi K2 and GLM-4.7-Flash: see `model_type`.
    Family { latent: true, ..experts("deepseek2", "deepseek_v3", Some(false)) },
    Family { latent: true, indexer: true, ..experts("deepseek32", "deepseek_v32", Some(false)) },
    Family { latent: true, indexer: true, ..experts("glm-dsa", "glm_moe_dsa", Some(false)) },
    dense("phi3", "phi3", false),
    // OLMo 2 is OLMo 3 without windows, of which three layers of four have one.
    Family { full_every: Some(4), ..dense("olmo2", "olmo3", false) },
    GRANITE,
    Family {
        architecture: "granitemoe",
        experts: true,
        model_type: "granitemoeshared",
        plain_shared: true,
        ..GRANITE
    },
    GRANITE_SWA,
    Family { experts: true, model_type: "granitemoe_swa", plain_shared: true, ..GRANITE_SWA },
    GRANITE_HYBRID,
    Family { experts: true, plain_shared: true, ..GRANITE_HYBRID },
    dense("glm4", "glm4", false),
    Family { full_every: Some(2), wide_scale_layers: Some(46), ..dense("gemma2", "gemma2", false) },
    Family { norm: Norm::IfStored, logit_scale: Some("logit_scale"), ..dense("command-r", "cohere", false) },
    Family { full_every: Some(4), logit_scale: Some("logit_scale"), ..dense("cohere2", "cohere2", false) },
    dense("hunyuan-dense", "hunyuan_v1_dense", false),
    Family { plain_shared: true, ..experts("hunyuan-moe", "hunyuan_v1_moe", None) },
    Family { norm: Norm::UnlessMaverick, ..experts("llama4", "llama4_text", None) },
    experts("minimax-m2", "minimax_m2", None),
    Family { state_spaces: StateSpaces::Apart, ..dense("nemotron_h", "nemotron_h", false) },
    Family {
        state_spaces: StateSpaces::Apart,
        plain_shared: true,
        ..experts("nemotron_h_moe", "nemotron_h", Some(true))
    },
    // The largest has 62 layers.
    Family { full_every: Some(6), wide_scale_layers: Some(62), ..dense("gemma3", "gemma3_text", false) },
    Family { global_heads: true, ..dense("gemma4", "gemma4_text", false) },
    Family { global_heads: true, ..experts("gemma4", "gemma4_text", None) },
    Family { full_every: Some(4), ..dense("exaone4", "exaone4", false) },
    Family { delta: Delta::Gated(HeadSharing::Grouped), ..experts("qwen3next", "qwen3_next", Some(true)) },
    // llama.cpp's converter changes the order of value heads.
    Family { delta: Delta::Gated(HeadSharing::Tiled), ..dense("qwen35", "qwen3_5_text", false) },
    Family {
        delta: Delta::Gated(HeadSharing::Tiled),
        ..experts("qwen35moe", "qwen3_5_moe_text", Some(true))
    },
    Family { latent: true, delta: Delta::Channels, ..experts("kimi-linear", "kimi_linear", Some(true)) },
    Family { latent: true, delta: Delta::Channels, ..experts("kimi-k3", "kimi_linear", Some(true)) },
    dense("arcee", "arcee", true),
    Family { logit_scale: Some("logits_scaling"), ..dense("minicpm", "minicpm", true) },
    Family { latent: true, ..dense("minicpm3", "minicpm3", false) },
    // Youtu.
    Family { latent: true, ..dense("deepseek2", "youtu", false) },
    // Models that see, whose language models are the plain ones.
    dense("qwen2vl", "qwen2", false),
    dense("qwen3vl", "qwen3", false),
    experts("qwen3vlmoe", "qwen3_moe", Some(true)),
    // Sarvam 30B.
    Family { plain_shared: true, ..experts("bailingmoe2", "sarvam_moe", Some(true)) },
    dense("gemma", "gemma", false),
    experts("olmoe", "olmoe", Some(false)),
    Family { plain_shared: true, ..experts("ernie4_5-moe", "ernie4_5_moe", None) },
    Family { full_every: Some(4), ..experts("mellum", "mellum", Some(true)) },
    experts("dots1", "dots1", Some(false)),
    Family { full_every: Some(4), plain_shared: true, ..experts("exaone-moe", "exaone_moe", Some(true)) },
    // Hunyuan 3.
    Family { plain_shared: true, ..experts("hy_v3", "hy_v3", Some(true)) },
    Family { window_heads: true, ..experts("mimo2", "mimo_v2_flash", Some(true)) },
    Family { latent: true, ..experts("mistral4", "mistral4", Some(true)) },
    Family { streams: true, compressed: true, ..experts("deepseek4", "deepseek_v4", Some(true)) },
    Family { convolutions: true, ..dense("lfm2", "lfm2", false) },
    Family { convolutions: true, ..experts("lfm2moe", "lfm2_moe", None) },
    // GLM-5.3.
    Family {
        latent: true,
        indexer: true,
        streams: true,
        delta: Delta::Channels,
        ..experts("glm5-next", "glm5_next_text", Some(true))
    },
];

impl Family {
    /// True if a key may differ from layer to layer, or means something else than elsewhere.
    pub(super) fn has_own(&self, key: &str) -> bool {
        let kv_heads = key == "attention.head_count_kv";
        (self.state_spaces != StateSpaces::None && hybrid::DIFFERS.contains(&key))
            || (self.global_heads
                && (kv_heads || ["attention.key_length", "feed_forward_length"].contains(&key)))
            || ((self.window_heads || self.convolutions) && kv_heads)
            || (self.delta == Delta::Channels && kv_heads)
    }
}
