//! The tokenizer against Hugging Face's Python library (tests/fixtures/text/make_tokenizers.py).

use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

use proptest::prelude::*;
use serde_json::Value;
use thunder_model::tokenizer::{Tokenizer, TokenizerError};

const STYLES: [&str; 5] = ["llama3", "qwen", "mistral", "metaspace", "unigram"];

fn folder(style: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/text").join(style)
}

fn load(style: &str) -> Arc<Tokenizer> {
    Arc::new(Tokenizer::load(&folder(style)).unwrap())
}

fn cases(style: &str) -> Vec<Value> {
    let text = std::fs::read_to_string(folder(style).join("expected.json")).unwrap();
    let cases: Vec<Value> = serde_json::from_str(&text).unwrap();
    assert!(cases.len() > 20, "{style} has its cases");
    cases
}

fn ids(case: &Value, key: &str) -> Vec<u32> {
    case[key].as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
}

fn streamed(tokenizer: &Arc<Tokenizer>, ids: &[u32]) -> String {
    let mut stream = tokenizer.stream();
    let mut text: String = ids.iter().map(|&id| stream.push(id)).collect();
    text += &stream.finish();
    text
}

#[test]
fn ids_and_texts_equal_those_of_hugging_face() {
    for style in STYLES {
        let tokenizer = load(style);
        for case in cases(style) {
            let text = case["text"].as_str().unwrap();
            let expected = ids(&case, "ids");
            assert_eq!(tokenizer.encode(text, false).unwrap(), expected, "{style}: {text:?}");
            assert_eq!(tokenizer.encode(text, true).unwrap(), ids(&case, "ids_special"), "{style}: {text:?}");
            assert_eq!(tokenizer.decode(&expected, true), case["decoded"], "{style}: {text:?}");
            assert_eq!(tokenizer.decode(&expected, false), case["decoded_special"], "{style}: {text:?}");
            assert_eq!(streamed(&tokenizer, &expected), case["decoded"], "{style}: {text:?}");
        }
    }
}

#[test]
fn a_long_run_of_spaces_is_split_like_in_python() {
    // The library's regular expressions give up after a number of steps. The ids would then differ
    // from Python's.
    let tokenizer = load("llama3");
    let text = format!("{}x", " ".repeat(500_000));
    let ids = tokenizer.encode(&text, false).unwrap();
    let last = tokenizer.encode(" x", false).unwrap();
    assert!(ids.ends_with(&last), "the last space belongs to the word");
    assert_eq!(tokenizer.decode(&ids, true), text);
    let error = tokenizer.encode(&format!(" {text}"), false).unwrap_err().to_string();
    assert!(error.contains("500001 bytes of white space"), "{error}");
}

#[test]
fn a_stream_holds_back_unfinished_characters() {
    for style in ["llama3", "qwen", "mistral", "metaspace"] {
        let tokenizer = load(style);
        let ids = tokenizer.encode("🎉", false).unwrap();
        let mut stream = tokenizer.stream();
        let texts: Vec<String> = ids.iter().map(|&id| stream.push(id)).collect();
        assert!(ids.len() >= 4, "{style}: the emoji is one token a byte");
        assert_eq!(texts.concat(), "🎉", "{style}");
        assert_eq!(texts.iter().filter(|text| !text.is_empty()).count(), 1, "{style}: {texts:?}");
        assert_eq!(stream.finish(), "", "{style}");

        let cut: String = ids[..ids.len() - 1].iter().map(|&id| stream.push(id)).collect();
        assert_eq!(cut, "", "{style}");
        assert_eq!(stream.finish(), "\u{fffd}", "{style}");
        assert_eq!(stream.finish(), "", "{style}: finish leaves nothing");
    }
}

#[test]
fn special_tokens_are_hidden_and_other_added_tokens_shown() {
    let tokenizer = load("qwen");
    let ids = tokenizer.encode("<|im_start|>a<think>b</think><|im_end|>", false).unwrap();
    assert_eq!(streamed(&tokenizer, &ids), "a<think>b</think>");
    assert_eq!(tokenizer.decode(&ids, false), "<|im_start|>a<think>b</think><|im_end|>");
    let end = tokenizer.token_id("<|im_end|>").unwrap();
    assert!(tokenizer.is_special(end));
    assert_eq!(tokenizer.token_bytes(end), b"");
    let think = tokenizer.token_id("<think>").unwrap();
    assert!(!tokenizer.is_special(think));
    assert_eq!(tokenizer.token_bytes(think), b"<think>");
    assert_eq!(tokenizer.token_id("no such token"), None);
}

#[test]
fn token_bytes_are_the_bytes_inside_a_text() {
    for (style, space, byte) in
        [("llama3", "Ġ", "ð"), ("mistral", "▁", "<0xF0>"), ("metaspace", "▁", "<0xF0>")]
    {
        let tokenizer = load(style);
        assert_eq!(tokenizer.token_bytes(tokenizer.token_id(space).unwrap()), b" ", "{style}");
        assert_eq!(tokenizer.token_bytes(tokenizer.token_id(byte).unwrap()), [0xF0], "{style}");
        assert_eq!(tokenizer.token_bytes(1 << 30), b"", "{style}: no such token");
    }
}

#[test]
fn no_text_has_more_bytes_than_its_tokens_can_hold() {
    for style in STYLES {
        let tokenizer = load(style);
        for case in cases(style) {
            let (text, tokens) = (case["text"].as_str().unwrap(), ids(&case, "ids").len());
            assert!(text.len() <= tokenizer.most_text_bytes(tokens), "{style}: {text:?} has {tokens} tokens");
        }
        assert!(tokenizer.most_text_bytes(2048) < 2048 * 256, "{style}: a useful limit");
    }
}

#[test]
fn tokens_in_tokenizer_config_are_added() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::copy(self::folder("llama3").join("tokenizer.json"), folder.path().join("tokenizer.json"))
        .unwrap();
    let plain = Tokenizer::load(folder.path()).unwrap();
    assert!(plain.encode("<|extra|>", false).unwrap().len() > 1, "works without tokenizer_config.json");
    let config = r#"{"added_tokens_decoder": {"424": {"content": "<|later|>", "special": true},
                                              "423": {"content": "<|extra|>", "special": true}}}"#;
    std::fs::write(folder.path().join("tokenizer_config.json"), config).unwrap();
    let with = Tokenizer::load(folder.path()).unwrap();
    assert_eq!(with.encode("<|extra|><|later|>", false).unwrap(), [423, 424]);
    assert!(with.is_special(423));
}

#[test]
fn limits_for_training_are_ignored() {
    let folder = tempfile::tempdir().unwrap();
    let text = std::fs::read_to_string(self::folder("llama3").join("tokenizer.json")).unwrap();
    let mut file: Value = serde_json::from_str(&text).unwrap();
    file["truncation"] = serde_json::json!({
        "direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0
    });
    std::fs::write(folder.path().join("tokenizer.json"), file.to_string()).unwrap();
    let tokenizer = Tokenizer::load(folder.path()).unwrap();
    assert!(tokenizer.encode("one two three four five six seven", false).unwrap().len() > 4);
}

#[test]
fn bad_files_are_named_with_the_reason() {
    let folder = tempfile::tempdir().unwrap();
    let error = |folder: &Path| match Tokenizer::load(folder) {
        Err(TokenizerError::Load { path, reason }) => format!("{path}: {reason}"),
        other => panic!("{other:?}"),
    };
    let missing = error(folder.path());
    assert!(missing.contains("tokenizer.json") && missing.contains("not found"), "{missing}");
    std::fs::write(folder.path().join("tokenizer.json"), "{\"version\": ").unwrap();
    let broken = error(folder.path());
    assert!(broken.contains("not a tokenizer"), "{broken}");

    let text = std::fs::read_to_string(self::folder("llama3").join("tokenizer.json")).unwrap();
    let good: Value = serde_json::from_str(&text).unwrap();
    let mut file = good.clone();
    file["decoder"] =
        serde_json::json!({"type": "CTC", "pad_token": "x", "word_delimiter_token": "|", "cleanup": true});
    std::fs::write(folder.path().join("tokenizer.json"), file.to_string()).unwrap();
    let decoder = error(folder.path());
    assert!(decoder.contains("not supported") && decoder.contains("CTC"), "{decoder}");

    std::fs::write(folder.path().join("tokenizer.json"), good.to_string()).unwrap();
    std::fs::write(folder.path().join("tokenizer_config.json"), "[").unwrap();
    let config = error(folder.path());
    assert!(config.contains("tokenizer_config.json"), "{config}");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_stream_gives_the_decoded_text(style in 0..STYLES.len(), tokens in prop::collection::vec(0_u32..440, 0..60)) {
        let tokenizer = load(STYLES[style]);
        prop_assert_eq!(streamed(&tokenizer, &tokens), tokenizer.decode(&tokens, true));
    }

    /// Any text, against the library's own decoder.
    #[test]
    fn texts_decode_like_in_the_library(
        style in 0..STYLES.len(),
        text in "([a-z ]|\\PC|[\\n\\t]|[🎉👩‍👧🇩🇪❤️]|[一-龥ぁ-ん]|[a-z][\u{300}-\u{36f}]){0,40}",
    ) {
        let tokenizer = load(STYLES[style]);
        let ids = tokenizer.encode(&text, false).unwrap();
        let library = tokenizers::Tokenizer::from_file(folder(STYLES[style]).join("tokenizer.json")).unwrap();
        let encoding = library.encode(text.as_str(), false).unwrap();
        prop_assert_eq!(encoding.get_ids(), &ids);
        let decoded = library.decode(&ids, true).unwrap();
        prop_assert_eq!(&streamed(&tokenizer, &ids), &decoded);
        let bytes: Vec<u8> = ids.iter().flat_map(|&id| tokenizer.token_bytes(id)).collect();
        let joined = String::from_utf8_lossy(&bytes).into_owned();
        // In the middle of a text, the space before the first word is kept.
        let whole = joined.strip_suffix(decoded.as_str()).is_some_and(|before| before.is_empty() || before == " ");
        prop_assert!(whole, "{:?} against {:?}", joined, decoded);
    }

    /// Byte-level tokens in any order; the library replaces invalid bytes in the same way.
    #[test]
    fn random_bytes_decode_like_in_the_library(tokens in prop::collection::vec(0_u32..420, 0..60)) {
        let tokenizer = load("llama3");
        let library = tokenizers::Tokenizer::from_file(folder("llama3").join("tokenizer.json")).unwrap();
        prop_assert_eq!(streamed(&tokenizer, &tokens), library.decode(&tokens, true).unwrap());
    }
}
