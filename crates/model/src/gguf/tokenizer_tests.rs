use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};
use thunder_testing::gguf::Gguf;

use super::super::files::GgufFiles;
use super::super::pre_tokenizers::PreTokenizer;
use super::tokenizer;
use crate::tokenizer::Tokenizer;

fn fixture(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
}

/// The tokenizer of a file with this metadata.
fn of(file: Gguf) -> Tokenizer {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    fs::write(&path, file.floats("output_norm.weight", &[1], &[1.0]).bytes()).unwrap();
    tokenizer(&GgufFiles::open(&path).unwrap()).unwrap()
}

fn cases(path: &Path) -> Vec<Value> {
    serde_json::from_slice(&fs::read(path).unwrap()).unwrap()
}

/// Tokens in the order of their ids.
fn by_id(ids: &HashMap<String, u32>) -> Vec<String> {
    let mut tokens: Vec<_> = ids.iter().collect();
    tokens.sort_by_key(|(_, id)| **id);
    tokens.into_iter().map(|(text, _)| text.clone()).collect()
}

/// Gemma 4's files have the merges of a tokenizer.json that replaces spaces and puts none before.
#[test]
fn byte_pairs_of_whole_texts_give_the_ids_of_tokenizer_json() {
    let fixture = fixture("tests/fixtures/text/mistral");
    let mut file: Value = serde_json::from_slice(&fs::read(fixture.join("tokenizer.json")).unwrap()).unwrap();
    file["normalizer"] = json!({ "type": "Replace", "pattern": { "String": " " }, "content": "▁" });
    file["decoder"]["decoders"].as_array_mut().unwrap().pop();
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("tokenizer.json"), file.to_string()).unwrap();
    let expected = Tokenizer::load(folder.path()).unwrap();

    let mut ids: HashMap<String, u32> = serde_json::from_value(file["model"]["vocab"].clone()).unwrap();
    let added: Vec<String> = file["added_tokens"]
        .as_array()
        .unwrap()
        .iter()
        .map(|t| t["content"].as_str().unwrap().into())
        .collect();
    for (token, id) in added.iter().zip(file["added_tokens"].as_array().unwrap()) {
        ids.insert(token.clone(), id["id"].as_u64().unwrap() as u32);
    }
    let tokens = by_id(&ids);
    let merges: Vec<[String; 2]> = serde_json::from_value(file["model"]["merges"].clone()).unwrap();
    let merges: Vec<String> = merges.iter().map(|pair| pair.join(" ")).collect();
    let kinds: Vec<i32> = tokens.iter().map(|token| if added.contains(token) { 3 } else { 1 }).collect();
    let found = of(Gguf::default()
        .text("tokenizer.ggml.model", "gemma4")
        .texts("tokenizer.ggml.tokens", &tokens)
        .numbers("tokenizer.ggml.token_type", &kinds)
        .texts("tokenizer.ggml.merges", &merges)
        .bool("tokenizer.ggml.add_bos_token", true)
        .number("tokenizer.ggml.bos_token_id", 1));
    let cases = cases(&fixture.join("expected.json"));
    assert!(cases.len() > 20);
    for case in &cases {
        let text = case["text"].as_str().unwrap();
        for special in [false, true] {
            let ids = found.encode(text, special).unwrap();
            assert_eq!(ids, expected.encode(text, special).unwrap(), "{text:?}");
            assert_eq!(found.decode(&ids, true), expected.decode(&ids, true), "{text:?}");
        }
    }
}

/// The two tokens that become `token`, by the ranks below its own.
fn parts_of(token: &[u8], ranks: &HashMap<Vec<u8>, u32>) -> Vec<Vec<u8>> {
    let mut parts: Vec<Vec<u8>> = token.iter().map(|byte| vec![*byte]).collect();
    loop {
        let joined = |at: usize| [&parts[at][..], &parts[at + 1]].concat();
        let rank = |at: usize| ranks.get(&joined(at)).copied().filter(|rank| *rank < ranks[token]);
        let Some((_, at)) = (0..parts.len() - 1).filter_map(|at| Some((rank(at)?, at))).min() else {
            return parts;
        };
        parts[at] = joined(at);
        parts.remove(at + 1);
    }
}

/// llama.cpp's converter makes merges of tiktoken's ranks.
#[test]
fn the_pre_tokenizer_of_kimi_gives_the_ids_of_tiktoken() {
    let fixture = fixture("../../tests/golden/formats/tokenizers/kimi");
    // GPT-2's table: printable bytes stand for themselves, the others for characters from 256 on.
    let mut others = (256u32..).filter_map(char::from_u32);
    let letters: Vec<char> = (0u8..=255)
        .map(|byte| match byte {
            b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF => char::from(byte),
            _ => others.next().unwrap(),
        })
        .collect();
    let spelled = |bytes: &[u8]| -> String { bytes.iter().map(|byte| letters[usize::from(*byte)]).collect() };
    let file = fs::read_to_string(fixture.join("tiktoken.model")).unwrap();
    let ranks: HashMap<Vec<u8>, u32> = file
        .lines()
        .map(|line| line.split_once(' ').unwrap())
        .map(|(bytes, rank)| (STANDARD.decode(bytes).unwrap(), rank.trim().parse().unwrap()))
        .collect();
    let mut by_rank: Vec<(&Vec<u8>, &u32)> = ranks.iter().collect();
    by_rank.sort_by_key(|(_, rank)| **rank);
    let merges: Vec<String> = by_rank
        .iter()
        .filter(|(token, _)| token.len() > 1)
        .map(|(token, _)| parts_of(token, &ranks))
        .filter(|parts| parts.len() == 2)
        .map(|parts| format!("{} {}", spelled(&parts[0]), spelled(&parts[1])))
        .collect();
    let reference = Tokenizer::load(&fixture).unwrap();
    let first_special = by_rank.len() as u32;
    let mut tokens: Vec<String> = by_rank.iter().map(|(token, _)| spelled(token)).collect();
    let mut kinds = vec![1; tokens.len()];
    for id in first_special..first_special + 256 {
        tokens.push(reference.decode(&[id], false));
        kinds.push(if reference.is_special(id) { 3 } else { 4 });
    }
    let found = of(Gguf::default()
        .text("tokenizer.ggml.model", "gpt2")
        .text("tokenizer.ggml.pre", "kimi-k2")
        .texts("tokenizer.ggml.tokens", &tokens)
        .numbers("tokenizer.ggml.token_type", &kinds)
        .texts("tokenizer.ggml.merges", &merges));
    let cases = cases(&fixture.join("expected.json"));
    assert!(cases.len() > 40);
    for case in &cases {
        let text = case["text"].as_str().unwrap();
        let expected: Vec<u32> = serde_json::from_value(case["ids"].clone()).unwrap();
        assert_eq!(found.encode(text, false).unwrap(), expected, "{text:?}");
        assert_eq!(found.decode(&expected, true), case["decoded"], "{text:?}");
    }
}

/// tests/golden/gguf/make_tokens.py: what llama.cpp makes of texts by each name.
#[derive(serde::Deserialize)]
struct Cut {
    vocabulary: Pieces,
    whole: Pieces,
    texts: Vec<String>,
    groups: Vec<Group>,
}

#[derive(serde::Deserialize)]
struct Pieces {
    tokens: Vec<String>,
    merges: Vec<String>,
}

/// Names by which texts are cut alike.
#[derive(serde::Deserialize)]
struct Group {
    names: Vec<String>,
    /// llama.cpp's, for each text.
    ids: Vec<Vec<u32>>,
    /// By the text's number: the ids of the published expression, where llama.cpp has another.
    #[serde(default)]
    published: HashMap<usize, Vec<u32>>,
    #[serde(default)]
    whole: bool,
}

#[test]
fn texts_are_cut_as_llama_cpp_does_by_every_name() {
    let file = fs::read(fixture("../../tests/golden/gguf/pre_tokenizers.json")).unwrap();
    let cut: Cut = serde_json::from_slice(&file).unwrap();
    let mut seen = Vec::new();
    let mut wrong = Vec::new();
    for group in &cut.groups {
        let pieces = if group.whole { &cut.whole } else { &cut.vocabulary };
        for name in &group.names {
            let found = of(Gguf::default()
                .text("tokenizer.ggml.model", "gpt2")
                .text("tokenizer.ggml.pre", name)
                .texts("tokenizer.ggml.tokens", &pieces.tokens)
                .texts("tokenizer.ggml.merges", &pieces.merges));
            for (number, text) in cut.texts.iter().enumerate() {
                let expected = group.published.get(&number).unwrap_or(&group.ids[number]);
                let ids = found.encode(text, false).unwrap();
                if ids != *expected {
                    wrong.push(format!("{name}: {text:?} becomes {ids:?}, not {expected:?}"));
                }
            }
            seen.push(name.as_str());
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    let mut known = PreTokenizer::known();
    known.sort_unstable();
    seen.sort_unstable();
    assert_eq!(seen, known, "the names that are tested are those that we know");
}

/// llama.cpp's own vocabularies, texts and ids, in its folder `models` (up to 16 MB each).
#[test]
#[ignore = "THUNDER_LLAMA_VOCABULARIES is the folder"]
fn published_vocabularies_give_the_ids_of_llama_cpp() {
    let folder = PathBuf::from(std::env::var_os("THUNDER_LLAMA_VOCABULARIES").unwrap());
    let (mut compared, mut wrong) = (0, Vec::new());
    for entry in fs::read_dir(&folder).unwrap() {
        let path = entry.unwrap().path();
        let Some(inputs) = path.to_str().and_then(|name| name.strip_suffix(".inp")) else { continue };
        // These files end before the padding that their headers describe.
        let mut bytes = fs::read(inputs).unwrap();
        bytes.resize(bytes.len().next_multiple_of(32), 0);
        let padded = tempfile::NamedTempFile::with_suffix(".gguf").unwrap();
        fs::write(padded.path(), bytes).unwrap();
        let found = match tokenizer(&GgufFiles::open(padded.path()).unwrap()) {
            Ok(found) => found,
            Err(error) => {
                println!("{inputs}: {error}");
                continue;
            }
        };
        let texts = fs::read_to_string(&path).unwrap();
        let expected = fs::read_to_string(format!("{inputs}.out")).unwrap();
        for (text, expected) in texts.split("\n__ggml_vocab_test__\n").zip(expected.lines()) {
            let ids = found.encode(text, false).unwrap();
            let expected: Vec<u32> = expected.split_whitespace().map(|id| id.parse().unwrap()).collect();
            // llama.cpp does not compose accents, as Qwen's own tokenizer does.
            if inputs.contains("qwen") && text.contains(['\u{300}', '\u{301}']) {
                continue;
            }
            if ids != expected {
                wrong.push(format!("{inputs}: {text:?} becomes {ids:?}, not {expected:?}"));
            }
            compared += 1;
        }
        println!("{inputs}: compared");
    }
    assert!(compared > 0 && wrong.is_empty(), "{}", wrong.join("\n"));
}
