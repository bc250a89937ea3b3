//! Texts and pairs of texts as tokens of encoders, against the Python library and SentencePiece.
//!
//! The fixtures and how they were made: tests/golden/README.md.

use std::path::Path;

use serde_json::Value;
use thunder_model::tokenizer::Tokenizer;

const LONGEST: usize = 80;

fn cases() -> [(Tokenizer, Value); 2] {
    ["bert", "xlm-roberta"].map(|name| {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/encoders").join(name);
        let texts = std::fs::read(folder.join("texts.json")).unwrap();
        (Tokenizer::load(&folder).unwrap(), serde_json::from_slice(&texts).unwrap())
    })
}

fn numbers(value: &Value) -> Vec<u32> {
    value.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
}

#[test]
fn texts_have_the_tokens_of_the_python_library_without_its_padding() {
    for (tokenizer, texts) in cases() {
        for case in texts["texts"].as_array().unwrap() {
            let (text, ids) = (case["text"].as_str().unwrap(), numbers(&case["ids"]));
            assert_eq!(tokenizer.encode(text, true).unwrap(), ids, "{text:?}");
            assert_eq!(tokenizer.encode_cut(text, LONGEST).unwrap(), ids, "{text:?}");
            // Tokens are cut at the end, before the token that ends every text.
            let most = 6.min(ids.len());
            let cut = tokenizer.encode_cut(text, most).unwrap();
            assert_eq!((&cut[..most - 1], cut[most - 1]), (&ids[..most - 1], ids[ids.len() - 1]), "{text:?}");
        }
    }
}

#[test]
fn pairs_have_types_and_no_special_tokens_of_their_texts() {
    for (tokenizer, texts) in cases() {
        for case in texts["pairs"].as_array().unwrap() {
            let [first, second] = [0, 1].map(|side| case["pair"][side].as_str().unwrap());
            let pair = tokenizer.encode_pair(first, second, LONGEST).unwrap();
            assert_eq!((pair.ids, pair.types), (numbers(&case["ids"]), numbers(&case["types"])), "{case}");
        }
        // The second text is cut first.
        let whole = tokenizer.encode_pair("capital of France", "Paris is the capital.", LONGEST).unwrap();
        for most in 3..whole.ids.len() {
            let cut = tokenizer.encode_pair("capital of France", "Paris is the capital.", most).unwrap();
            assert!(cut.ids.len() <= most.max(4), "{most}: {cut:?}");
            assert_eq!(cut.ids.last(), whole.ids.last());
        }
    }
}

#[test]
fn pieces_of_words_become_words_again() {
    let [(bert, _), (roberta, _)] = cases();
    let ids = bert.encode("the capital of france, and rome", true).unwrap();
    assert_eq!(bert.decode(&ids, true), "the capital of france , and rome");
    let ids = roberta.encode("The capital of France, and Rome", true).unwrap();
    assert_eq!(roberta.decode(&ids, true), "The capital of France, and Rome");
}
