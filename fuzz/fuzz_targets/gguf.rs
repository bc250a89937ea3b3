//! A GGUF file's header: metadata, table of tensors, the model that they describe, tokenizer and
//! chat template. Inputs are the first bytes of a file; its tensors are zeros.

#![no_main]

use libfuzzer_sys::fuzz_target;
use thunder_fuzz::{TENSOR_BYTES, read, write};

fuzz_target!(|bytes: &[u8]| {
    // Both an error and a model are right: a panic, exhausted memory or an endless loop is not.
    let path = write("model.gguf", bytes, bytes.len() as u64 + TENSOR_BYTES);
    drop(read(&path));
    let cut = write("model.gguf", bytes, 0);
    drop(read(&cut));
});
