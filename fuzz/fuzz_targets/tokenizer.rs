//! A tokenizer's file in each of its forms: tokenizer.json, tekken.json, tiktoken.model and
//! SentencePiece's tokenizer.model.

#![no_main]

use std::fs;

use libfuzzer_sys::fuzz_target;
use thunder_fuzz::{folder, use_tokenizer, write};
use thunder_model::tokenizer::Tokenizer;

const NAMES: [&str; 4] = ["tokenizer.json", "tekken.json", "tiktoken.model", "tokenizer.model"];

fuzz_target!(|bytes: &[u8]| {
    for name in NAMES {
        let path = write(name, bytes, 0);
        if let Ok(tokenizer) = Tokenizer::load(folder()) {
            use_tokenizer(&tokenizer);
        }
        fs::remove_file(path).expect("it was written");
    }
});
