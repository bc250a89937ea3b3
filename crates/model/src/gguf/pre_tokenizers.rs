//! How byte-pair tokenizers cut texts into pieces, by the names in `tokenizer.ggml.pre`.
//!
//! Expressions are those of the models' own tokenizer.json files.

use serde_json::{Value, json};

use crate::tokenizer::KIMI;

/// A way to cut texts.
#[derive(Debug)]
pub(super) struct PreTokenizer {
    /// The names in files.
    names: &'static [&'static str],
    /// Each expression cuts what the one before has left.
    expressions: &'static [&'static str],
    /// Texts are composed by Unicode's NFC first.
    nfc: bool,
    /// A piece that equals a token becomes that token, whatever the merges say.
    pub whole_first: bool,
    /// Texts begin with the BOS token if the file does not say.
    pub adds_bos: bool,
}

const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const QWEN2: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const QWEN35: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const TEKKEN: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const GPT4O: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";
const DIGIT: &str = r"\p{N}";
const DEEPSEEK_V3: [&str; 3] = [
    r"\p{N}{1,3}",
    "[一-龥\u{3040}-ゟ゠-ヿ]+",
    r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"##,
];

const fn plain(names: &'static [&'static str], expressions: &'static [&'static str]) -> PreTokenizer {
    PreTokenizer { names, expressions, nfc: false, whole_first: false, adds_bos: false }
}

const TABLE: [PreTokenizer; 11] = [
    PreTokenizer {
        whole_first: true,
        adds_bos: true,
        ..plain(&["llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "lfm2"], &[LLAMA3])
    },
    plain(&["dbrx", "smaug-bpe", "chatglm-bpe"], &[LLAMA3]),
    PreTokenizer { whole_first: true, ..plain(&["glm4", "glm5"], &[LLAMA3]) },
    PreTokenizer { nfc: true, ..plain(&["qwen2", "deepseek-r1-qwen", "megrez"], &[QWEN2]) },
    PreTokenizer { nfc: true, ..plain(&["qwen35"], &[QWEN35]) },
    plain(&["stablelm2", "hunyuan", "solar-open", "grok-2"], &[QWEN2]),
    PreTokenizer { whole_first: true, adds_bos: true, ..plain(&["tekken"], &[TEKKEN]) },
    PreTokenizer { whole_first: true, ..plain(&["kimi-k2"], &[KIMI]) },
    plain(&["gpt-4o", "llama4", "minimax-m2"], &[GPT4O]),
    plain(&["deepseek-v3", "hunyuan-dense"], &DEEPSEEK_V3),
    plain(&["smollm", "starcoder", "refact", "command-r", "codeshell", "exaone"], &[DIGIT, GPT2]),
];

/// Cuts as GPT-2 does.
const AS_GPT2: PreTokenizer = plain(&["gpt-2", "phi-2", "gigachat", "olmo", "exaone4", "mpt"], &[GPT2]);

impl PreTokenizer {
    /// The entry of a name.
    pub fn named(name: &str) -> Option<&'static Self> {
        TABLE.iter().chain([&AS_GPT2]).find(|entry| entry.names.contains(&name))
    }

    /// All names, for error texts.
    pub fn known() -> String {
        let names = TABLE.iter().chain([&AS_GPT2]).flat_map(|entry| entry.names);
        names.copied().collect::<Vec<_>>().join(", ")
    }

    /// `normalizer` of a tokenizer.json; null for none.
    pub fn normalizer(&self) -> Value {
        if self.nfc { json!({ "type": "NFC" }) } else { Value::Null }
    }

    /// `pre_tokenizer` of a tokenizer.json.
    pub fn pre_tokenizer(&self) -> Value {
        let split = |expression: &&str| json!({ "type": "Split", "pattern": { "Regex": expression }, "behavior": "Isolated", "invert": false });
        let mut steps: Vec<Value> = self.expressions.iter().map(split).collect();
        steps.push(json!({
            "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false
        }));
        json!({ "type": "Sequence", "pretokenizers": steps })
    }
}
