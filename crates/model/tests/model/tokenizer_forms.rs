//! Tokenizers in forms other than tokenizer.json: tiktoken files (Kimi), tekken.json (Mistral) and
//! SentencePiece models, compared with the reference libraries' ids.
//!
//! The fixtures and how they were made: tests/golden/formats/make_tokenizers.py.

use std::fs;
use std::path::{Path, PathBuf};

use proptest::prelude::*;
use serde_json::{Value, json};
use thunder_model::tokenizer::{Tokenizer, TokenizerError};

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/formats/tokenizers").join(name)
}

/// Folders, and the file that holds each tokenizer.
const FORMS: [(&str, &str); 3] =
    [("kimi", "tiktoken.model"), ("tekken", "tekken.json"), ("sentencepiece", "tokenizer.model")];

#[test]
fn ids_are_those_of_the_reference_libraries() {
    for (name, _) in FORMS {
        let tokenizer = Tokenizer::load(&fixture(name)).unwrap();
        let expected = fs::read(fixture(name).join("expected.json")).unwrap();
        let cases: Vec<Value> = serde_json::from_slice(&expected).unwrap();
        assert!(cases.len() > 40, "{name} has its cases");
        for case in &cases {
            let text = case["text"].as_str().unwrap();
            let ids = |key: &str| -> Vec<u32> {
                case[key].as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
            };
            assert_eq!(tokenizer.encode(text, false).unwrap(), ids("ids"), "{name}: {text:?}");
            assert_eq!(tokenizer.encode(text, true).unwrap(), ids("ids_special"), "{name}: {text:?}");
            assert_eq!(tokenizer.decode(&ids("ids"), true), case["decoded"], "{name}: {text:?}");
        }
    }
}

#[test]
fn special_tokens_are_found_by_name() {
    let [kimi, tekken, piece] =
        ["kimi", "tekken", "sentencepiece"].map(|name| Tokenizer::load(&fixture(name)).unwrap());
    assert_eq!(kimi.token_id("[BOS]"), Some(600));
    assert_eq!(kimi.token_id("<|reserved_token_855|>"), Some(855));
    assert!(kimi.is_special(602) && !kimi.is_special(603), "<think> is text for users");
    assert_eq!(tekken.token_id("<s>"), Some(1));
    assert_eq!(tekken.token_id("<SPECIAL_19>"), Some(19));
    assert!(tekken.is_special(19) && !tekken.is_special(20));
    assert_eq!(tekken.token_bytes(20), [0], "ids of tokens follow those of special ones");
    assert_eq!(piece.token_id("<s>"), Some(1));
    assert!(piece.is_special(1));
}

/// A folder with another file, and the tokenizer_config.json of the fixture.
fn folder(name: &str, file: &str, content: &[u8]) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let config = fixture(name).join("tokenizer_config.json");
    if config.exists() {
        fs::copy(config, folder.path().join("tokenizer_config.json")).unwrap();
    }
    fs::write(folder.path().join(file), content).unwrap();
    folder
}

fn load(name: &str, file: &str, content: &[u8]) -> Result<Tokenizer, TokenizerError> {
    Tokenizer::load(folder(name, file, content).path())
}

#[test]
fn a_tokenizer_json_comes_first() {
    let content = fs::read(fixture("kimi").join("tiktoken.model")).unwrap();
    let folder = folder("kimi", "tiktoken.model", &content);
    fs::write(folder.path().join("tokenizer.json"), "{}").unwrap();
    let error = Tokenizer::load(folder.path()).unwrap_err().to_string();
    assert!(error.contains("tokenizer.json: not a tokenizer"), "{error}");
    let error = Tokenizer::load(&folder.path().join("none")).unwrap_err().to_string();
    assert!(error.contains("tokenizer.json, tekken.json, tiktoken.model or tokenizer.model"), "{error}");
}

#[test]
fn malformed_files_are_refused_with_a_reason() {
    let tekken = |edit: fn(&mut Value)| {
        let bytes = fs::read(fixture("tekken").join("tekken.json")).unwrap();
        let mut file: Value = serde_json::from_slice(&bytes).unwrap();
        edit(&mut file);
        file.to_string().into_bytes()
    };
    let piece = fs::read(fixture("sentencepiece").join("tokenizer.model")).unwrap();
    let unigram = [piece.as_slice(), &[0x12, 2, 3 << 3, 1]].concat();
    let rewrites = [piece.as_slice(), &[0x1a, 3, 0x12, 1, 0x41]].concat();
    for (name, file, content, expected) in [
        ("kimi", "tiktoken.model", b"".to_vec(), "no tokens"),
        ("kimi", "tiktoken.model", b"IQ==".to_vec(), "line 1, \"IQ==\""),
        ("kimi", "tiktoken.model", b"IQ== 0\n*** 1".to_vec(), "line 2, \"*** 1\""),
        ("kimi", "tiktoken.model", b"IQ== 4294967296".to_vec(), "line 1"),
        ("kimi", "tiktoken.model", b"IQ== 4000000000".to_vec(), "above 8388608"),
        ("kimi", "tiktoken.model", b"IQ== 0\nIg== 0".to_vec(), "token 0"),
        ("kimi", "tiktoken.model", b"IQ== 0\nIQ== 1".to_vec(), "token 1"),
        ("kimi", "tiktoken.model", vec![0xff, 0xfe], "not a list of tokens"),
        ("tekken", "tekken.json", b"{".to_vec(), "EOF"),
        (
            "tekken",
            "tekken.json",
            tekken(|file| file["config"]["pattern"] = json!("(")),
            "pre-tokenizer is malformed",
        ),
        (
            "tekken",
            "tekken.json",
            tekken(|file| file["config"]["default_vocab_size"] = json!(1u64 << 40)),
            "at most",
        ),
        (
            "tekken",
            "tekken.json",
            tekken(|file| file["config"]["default_num_special_tokens"] = json!(570)),
            "special",
        ),
        (
            "tekken",
            "tekken.json",
            tekken(|file| file["special_tokens"][3]["rank"] = json!(70)),
            "\"[INST]\" has the rank 70",
        ),
        ("tekken", "tekken.json", tekken(|file| file["special_tokens"][3]["rank"] = json!(2)), "there twice"),
        ("tekken", "tekken.json", tekken(|file| file["vocab"][7]["token_bytes"] = json!("?")), "not base64"),
        ("tekken", "tekken.json", tekken(|file| file["vocab"][7]["rank"] = json!(6)), "there twice"),
        ("tekken", "tokenizer.json", b"{\"decoder\": {\"type\": \"Fuse\n\"}}".to_vec(), "control character"),
        ("tekken", "tokenizer.json", b"{\"decoder\": {\"type\": \"Fu".to_vec(), "EOF while parsing"),
        (
            "tekken",
            "tokenizer.json",
            json!({ "normalizer": { "type": "Sequence", "normalizers": [
                { "type": "Precompiled", "precompiled_charsmap": "/////w==" }] } })
            .to_string()
            .into_bytes(),
            "its precompiled_charsmap is malformed",
        ),
        ("sentencepiece", "tokenizer.model", b"".to_vec(), "no tokens"),
        ("sentencepiece", "tokenizer.model", b"\x0b".to_vec(), "unknown type 3"),
        ("sentencepiece", "tokenizer.model", piece[..piece.len() / 2].to_vec(), "in the middle of a value"),
        ("sentencepiece", "tokenizer.model", rewrites, "it rewrites characters"),
        ("sentencepiece", "tokenizer.model", unigram, "unigram, which is not supported"),
    ] {
        let error = load(name, file, &content).unwrap_err().to_string();
        assert!(error.contains(expected) && error.contains(file), "{name}, {expected:?}: {error}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(150) })]

    /// Any result is fine, without a panic or exhausted memory.
    #[test]
    fn damaged_files_never_panic(
        form in prop::sample::select(FORMS.to_vec()), at in any::<prop::sample::Index>(), bytes in prop::collection::vec(any::<u8>(), 0..12),
        cut in any::<bool>(),
    ) {
        let (name, file) = form;
        let mut content = fs::read(fixture(name).join(file)).unwrap();
        let at = at.index(content.len());
        if cut {
            content.truncate(at);
        }
        let end = content.len().min(at + bytes.len());
        content.splice(at..end, bytes);
        if let Ok(tokenizer) = load(name, file, &content) {
            drop(tokenizer.encode("Hello, 世界! don't  x", true));
        }
    }

    /// Formats that preserve bytes return any text unchanged.
    #[test]
    fn texts_survive(text in any::<String>()) {
        for name in ["kimi", "tekken"] {
            let tokenizer = Tokenizer::load(&fixture(name)).unwrap();
            let ids = tokenizer.encode(&text, false).unwrap();
            prop_assert_eq!(&tokenizer.decode(&ids, false), &text);
        }
    }
}
