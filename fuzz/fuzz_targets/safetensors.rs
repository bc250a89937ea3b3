//! A safetensors header next to a good config.json. Inputs are the first bytes of a file; its
//! tensors are zeros.

#![no_main]

use libfuzzer_sys::fuzz_target;
use serde_json::Value;
use thunder_fuzz::{TENSOR_BYTES, read, write, folder};

const CONFIG: &[u8] = include_bytes!("../../tests/golden/cases/qwen3-4bit-g64/config.json");

/// The length of the whole file, as its header says; none if that is no header.
fn length(bytes: &[u8]) -> Option<u64> {
    let (count, rest) = bytes.split_first_chunk::<8>()?;
    let header = rest.get(..usize::try_from(u64::from_le_bytes(*count)).ok()?)?;
    let tensors: Value = serde_json::from_slice(header).ok()?;
    let end = |tensor: &Value| tensor["data_offsets"][1].as_u64().filter(|end| *end <= TENSOR_BYTES);
    let data = tensors.as_object()?.values().filter_map(end).max().unwrap_or(0);
    Some(8 + header.len() as u64 + data)
}

fuzz_target!(|bytes: &[u8]| {
    write("config.json", CONFIG, 0);
    let len = length(bytes).unwrap_or_default();
    write("model.safetensors", &bytes[..bytes.len().min(len.max(8) as usize)], len);
    drop(read(folder()));
});
