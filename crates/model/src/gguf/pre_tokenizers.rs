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

/// Letters of the alphabets that have two cases.
const DEEPSEEK_LETTERS: &str = concat!(
    r"\s?[",
    "A-Za-z\u{b5}\u{c0}-\u{d6}\u{d8}-\u{f6}\u{f8}-\u{1ba}\u{1bc}-\u{1bf}\u{1c4}-\u{293}",
    "\u{295}-\u{2af}\u{370}-\u{373}\u{376}\u{377}\u{37b}-\u{37d}\u{37f}\u{386}\u{388}-\u{38a}",
    "\u{38c}\u{38e}-\u{3a1}\u{3a3}-\u{3f5}\u{3f7}-\u{481}\u{48a}-\u{52f}\u{531}-\u{556}",
    "\u{10a0}-\u{10c5}\u{13a0}-\u{13f5}\u{13f8}-\u{13fd}\u{1c90}-\u{1cba}\u{1cbd}-\u{1cbf}",
    "\u{1d00}-\u{1d2b}\u{1d6b}-\u{1d77}\u{1d79}-\u{1d9a}\u{1e00}-\u{1f15}\u{1f18}-\u{1f1d}",
    "\u{1f20}-\u{1f45}\u{1f48}-\u{1f4d}\u{1f50}-\u{1f57}\u{1f59}\u{1f5b}\u{1f5d}\u{1f5f}-\u{1f7d}",
    "\u{1f80}-\u{1fb4}\u{1fb6}-\u{1fbc}\u{1fbe}\u{1fc2}-\u{1fc4}\u{1fc6}-\u{1fcc}",
    "\u{1fd0}-\u{1fd3}\u{1fd6}-\u{1fdb}\u{1fe0}-\u{1fec}\u{1ff2}-\u{1ff4}\u{1ff6}-\u{1ffc}",
    "\u{2102}\u{2107}\u{210a}-\u{2113}\u{2115}\u{2119}-\u{211d}\u{2124}\u{2126}\u{2128}",
    "\u{212a}-\u{212d}\u{212f}-\u{2134}\u{2139}\u{213c}-\u{213f}\u{2145}-\u{2149}\u{214e}\u{2183}",
    "\u{2184}\u{2c00}-\u{2c7b}\u{2c7e}-\u{2ce4}\u{2ceb}-\u{2cee}\u{2cf2}\u{2cf3}\u{a640}-\u{a66d}",
    "\u{a680}-\u{a69b}\u{a722}-\u{a76f}\u{a771}-\u{a787}\u{a78b}-\u{a78e}\u{ab70}-\u{abbf}",
    "\u{fb00}-\u{fb06}\u{fb13}-\u{fb17}\u{ff21}-\u{ff3a}\u{ff41}-\u{ff5a}\u{10400}-\u{1044f}",
    "\u{104b0}-\u{104d3}\u{104d8}-\u{104fb}\u{10c80}-\u{10cb2}\u{10cc0}-\u{10cf2}",
    "\u{118a0}-\u{118df}\u{1e900}-\u{1e943}",
    "]+"
);
const DEEPSEEK_LLM: [&str; 6] = [
    r"[\r\n]",
    DEEPSEEK_LETTERS,
    "\\s?[!-/:-~\u{ff01}-\u{ff0f}\u{ff1a}-\u{ff5e}\u{2018}-\u{201f}\u{3000}-\u{3002}]+",
    r"\s+$",
    CJK,
    r"\p{N}+",
];
const DEEPSEEK_CODER: [&str; 5] = [r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", CJK, DIGIT];
const CJK: &str = "[\u{4e00}-\u{9fa5}\u{800}-\u{4e00}\u{ac00}-\u{d7ff}]+";
const YOUTU: [&str; 2] = [
    "[\u{ac00}-\u{d7a3}\u{3131}-\u{318e}]+|[\u{ff01}\u{2026}\u{201c}\u{201d}\u{2018}\u{2019}\u{2014}\u{ff1a}\u{ff1b}\u{ff0c}\u{3001}-\u{303f}\u{fe30}-\u{fe4f}]+|[\u{3105}-\u{312f}]+|[\u{4e00}-\u{9fa5}\u{3040}-\u{309f}\u{30a0}-\u{30ff}]+",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
];
const SEED_CODER: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+";
/// Several words can be one piece.
const EXAONE_MOE: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+";
const MINICPM5: [&str; 2] = [
    r"\p{N}{1,3}",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}+| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
];
/// From the last digit of a number, three at a time.
const THREE_DIGITS: &str = r"\d{1,3}(?=(?:\d{3})*\b)";
const VIKING: &str = " ?[^(\\s|.,!?\u{2026}\u{3002}\u{ff0c}\u{3001}\u{964}\u{6d4}\u{60c})]+";
const SUPERBPE: [&str; 2] = [r"\p{N}+", r"(?=(\d{3})+(?!\d))"];

const fn plain(names: &'static [&'static str], expressions: &'static [&'static str]) -> PreTokenizer {
    PreTokenizer { names, expressions, nfc: false, whole_first: false, adds_bos: false }
}

const TABLE: [PreTokenizer; 20] = [
    PreTokenizer {
        whole_first: true,
        adds_bos: true,
        ..plain(&["llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "lfm2", "midm-2.0"], &[LLAMA3])
    },
    plain(&["dbrx", "smaug-bpe", "chatglm-bpe"], &[LLAMA3]),
    PreTokenizer { whole_first: true, ..plain(&["glm4", "glm5"], &[LLAMA3]) },
    PreTokenizer { nfc: true, ..plain(&["qwen2", "deepseek-r1-qwen", "megrez", "f2llmv2"], &[QWEN2]) },
    PreTokenizer { nfc: true, ..plain(&["qwen35"], &[QWEN35]) },
    plain(&["stablelm2", "hunyuan", "solar-open", "grok-2", "kormo"], &[QWEN2]),
    PreTokenizer { whole_first: true, adds_bos: true, ..plain(&["tekken"], &[TEKKEN]) },
    PreTokenizer { whole_first: true, ..plain(&["kimi-k2"], &[KIMI]) },
    plain(&["gpt-4o", "llama4", "kanana2", "minimax-m2"], &[GPT4O]),
    plain(&["tiny_aya", "cohere2moe"], &[THREE_DIGITS, GPT4O]),
    plain(&["deepseek-llm"], &DEEPSEEK_LLM),
    plain(&["deepseek-coder"], &DEEPSEEK_CODER),
    plain(&["deepseek-v3", "hunyuan-dense", "joyai-llm"], &DEEPSEEK_V3),
    PreTokenizer { whole_first: true, ..plain(&["youtu"], &YOUTU) },
    plain(&["seed-coder"], &[SEED_CODER]),
    plain(&["exaone-moe"], &[EXAONE_MOE]),
    PreTokenizer { whole_first: true, ..plain(&["minicpm5"], &MINICPM5) },
    plain(&["viking"], &[VIKING, DIGIT]),
    plain(&["superbpe"], &SUPERBPE),
    plain(
        &["smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b", "mellum2"],
        &[DIGIT, GPT2],
    ),
];

/// Cuts as GPT-2 does.
const AS_GPT2: PreTokenizer = plain(
    &[
        "gpt-2",
        "phi-2",
        "gigachat",
        "olmo",
        "exaone4",
        "mpt",
        "mellum",
        "a.x-4.0",
        "jais",
        "trillion",
        "granite-docling",
    ],
    &[GPT2],
);

/// Names of tokenizers that do not cut texts, and have a character that stands for a space.
pub(super) const WHOLE_TEXTS: [&str; 2] = ["sarvam-moe", "gemma4"];

impl PreTokenizer {
    /// The entry of a name.
    pub fn named(name: &str) -> Option<&'static Self> {
        TABLE.iter().chain([&AS_GPT2]).find(|entry| entry.names.contains(&name))
    }

    /// All names.
    pub fn known() -> Vec<&'static str> {
        let names = TABLE.iter().chain([&AS_GPT2]).flat_map(|entry| entry.names);
        names.chain(&WHOLE_TEXTS).copied().collect()
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
