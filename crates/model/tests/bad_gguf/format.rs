//! Bad files of Llama and the errors that they must give, and random bytes, which must not panic or
//! exhaust memory.

use std::error::Error;
use std::path::Path;

use proptest::prelude::*;
use thunder_testing::gguf::Gguf;

use crate::files::{check_with, open, read_with, tries};

const HIDDEN: u64 = 32;
const CHANNELS: u64 = 64;
const TOKENS: u64 = 262;
/// The number of Q4_K.
const Q4_K: u32 = 12;
/// The number of Q8_0, and the bytes of its blocks.
const Q8_0: u32 = 8;
const Q8_0_BYTES: usize = 34;

/// A good file of one layer.
fn good() -> Gguf {
    let mut tokens: Vec<String> = ["<unk>", "<s>", "</s>"].map(str::to_owned).to_vec();
    tokens.extend((0..=255).map(|byte| format!("<0x{byte:02X}>")));
    tokens.extend(["▁", "a", "▁a"].map(str::to_owned));
    let count = tokens.len();
    assert_eq!(count as u64, TOKENS);
    let types: Vec<i32> = (0..count).map(|id| [2, 3, 3].get(id).copied().unwrap_or(1)).collect();
    let scores: Vec<u8> = (0..count).flat_map(|id| (-(id as f32)).to_le_bytes()).collect();
    let mut file = Gguf::default()
        .text("general.architecture", "llama")
        .number("llama.block_count", 1)
        .number("llama.context_length", 64)
        .number("llama.embedding_length", HIDDEN as u32)
        .number("llama.feed_forward_length", CHANNELS as u32)
        .number("llama.attention.head_count", 2)
        .number("llama.attention.head_count_kv", 1)
        .number("llama.rope.dimension_count", 16)
        .float("llama.attention.layer_norm_rms_epsilon", 1e-5)
        .float("llama.rope.freq_base", 1e4)
        .text("tokenizer.ggml.model", "llama")
        .texts("tokenizer.ggml.tokens", &tokens)
        .numbers("tokenizer.ggml.token_type", &types)
        .list("tokenizer.ggml.scores", 6, count as u64, &scores)
        .number("tokenizer.ggml.bos_token_id", 1)
        .number("tokenizer.ggml.eos_token_id", 2)
        .text("tokenizer.chat_template", "{{ messages[0]['content'] }}");
    let matrices = [
        ("token_embd", TOKENS, HIDDEN),
        ("blk.0.attn_q", HIDDEN, HIDDEN),
        ("blk.0.attn_k", 16, HIDDEN),
        ("blk.0.attn_v", 16, HIDDEN),
        ("blk.0.attn_output", HIDDEN, HIDDEN),
        ("blk.0.ffn_gate", CHANNELS, HIDDEN),
        ("blk.0.ffn_up", CHANNELS, HIDDEN),
        ("blk.0.ffn_down", HIDDEN, CHANNELS),
    ];
    for (name, rows, columns) in matrices {
        let bytes = (rows * columns / 32) as usize * Q8_0_BYTES;
        file = file.tensor(&format!("{name}.weight"), &[columns, rows], Q8_0, vec![1; bytes]);
    }
    for name in ["output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"] {
        file = file.floats(&format!("{name}.weight"), &[HIDDEN], &[1.0; HIDDEN as usize]);
    }
    file
}

/// Reads everything that is read before weights are packed.
fn read(path: &Path) -> Result<(), Box<dyn Error>> {
    let folder = open(path)?;
    folder.tokenizer()?;
    folder.chat_template()?;
    Ok(())
}

fn read_bytes(bytes: &[u8]) -> Result<(), Box<dyn Error>> {
    read_with(bytes, read)
}

/// The first place of some bytes.
fn find(file: &[u8], bytes: &[u8]) -> usize {
    file.windows(bytes.len()).position(|window| window == bytes).expect("it is there")
}

/// Overwrites 8 bytes.
fn patched(mut file: Vec<u8>, at: usize, number: u64) -> Vec<u8> {
    file[at..at + 8].copy_from_slice(&number.to_le_bytes());
    file
}

fn cut(to: impl Fn(usize) -> usize) -> Vec<u8> {
    let mut file = good().bytes();
    file.truncate(to(file.len()));
    file
}

/// What is wrong, the file, and what the error must contain.
type Case = crate::files::Case<Vec<u8>>;

const CASES: [Case; 60] = [
    ("cut in its first bytes", || cut(|_| 3), &["model.gguf", "ends inside of its first four bytes"]),
    ("cut in its version", || cut(|_| 6), &["ends inside of its version"]),
    ("cut in its counts", || cut(|_| 14), &["ends inside of the number of tensors"]),
    ("cut after its counts", || cut(|_| 40), &["names 11 tensors", "can hold 0 at most"]),
    ("cut in the tokens", || cut(|_| 900), &["tokenizer.ggml.tokens"]),
    (
        "cut between two tensors' entries",
        || {
            let file = good().bytes();
            let at = find(&file, b"blk.0.ffn_up");
            file[..at - 8].to_vec()
        },
        &["ends inside of a tensor's name"],
    ),
    ("cut in the data", || cut(|len| len - 1), &["truncated", "download it again"]),
    ("cut before the data", || cut(|len| len - 10_000), &["truncated"]),
    (
        "another kind of file",
        || [b"PK\x03\x04".to_vec(), vec![0; 100]].concat(),
        &["not a GGUF file: it begins with [50, 4b"],
    ),
    (
        "version 1",
        || [&b"GGUF"[..], &1u32.to_le_bytes(), &[0; 64]].concat(),
        &["GGUF version 1: versions 2 and 3"],
    ),
    ("a future version", || [&b"GGUF"[..], &9u32.to_le_bytes(), &[0; 64]].concat(), &["GGUF version 9"]),
    ("big-endian", || [&b"GGUF"[..], &3u32.to_be_bytes(), &[0; 64]].concat(), &["big-endian machines"]),
    (
        "2^60 tensors",
        || patched(good().bytes(), 8, 1 << 60),
        &["names 1152921504606846976 tensors", "can hold"],
    ),
    (
        "2^64 - 1 values",
        || patched(good().bytes(), 16, u64::MAX),
        &["names 18446744073709551615 metadata values"],
    ),
    ("more values than there are", || patched(good().bytes(), 16, 500), &["model.gguf"]),
    ("fewer values than there are", || patched(good().bytes(), 16, 3), &["model.gguf"]),
    (
        "a key of 2^62 bytes",
        || patched(good().bytes(), 24, 1 << 62),
        &["ends inside of metadata key 0", "4611686018427387904 bytes"],
    ),
    (
        "a key of 100 KB",
        || good().text(&"k".repeat(100_000), "x").bytes(),
        &["metadata key", "has 100000 bytes, 65535 are the most"],
    ),
    (
        "a text of 2^63 bytes",
        || good().value("x", 8, &(1u64 << 63).to_le_bytes()).bytes(),
        &["ends inside of x"],
    ),
    (
        "a list of 2^61 numbers",
        || good().list("x", 10, 1 << 61, &[]).bytes(),
        &["names 2305843009213693952 items of x"],
    ),
    (
        "a list of 2^61 texts",
        || good().list("x", 8, 1 << 61, &[]).bytes(),
        &["names 2305843009213693952 items of x"],
    ),
    (
        "lists in lists",
        || {
            let inner = [&9u32.to_le_bytes()[..], &1u64.to_le_bytes()].concat();
            good().list("x", 9, 1, &inner.repeat(50)).bytes()
        },
        &["x has lists in lists, more than 4 deep"],
    ),
    (
        "a list of an unknown type",
        || good().list("x", 77, 1, &[0; 8]).bytes(),
        &["x has the unknown type 77"],
    ),
    ("a value of an unknown type", || good().value("x", 13, &[0; 8]).bytes(), &["x has the unknown type 13"]),
    (
        "a key that is not UTF-8",
        || {
            let mut file = good().bytes();
            let at = find(&file, b"llama.block_count");
            file[at] = 0xff;
            file
        },
        &["metadata key 1 is not UTF-8"],
    ),
    (
        "two values for a key",
        || good().value_twice("llama.block_count").bytes(),
        &["two values for \"llama.block_count\""],
    ),
    (
        "alignment 0",
        || good().number("general.alignment", 0).bytes(),
        &["general.alignment is 0, not a power of two"],
    ),
    ("alignment 24", || good().number("general.alignment", 24).bytes(), &["general.alignment is 24"]),
    (
        "alignment as a text",
        || good().text("general.alignment", "32").bytes(),
        &["general.alignment is a text"],
    ),
    (
        "alignment 2^31",
        || good().number("general.alignment", 1 << 31).bytes(),
        &["is no multiple of the alignment"],
    ),
    ("no architecture", || good().without("general.architecture").bytes(), &["no general.architecture"]),
    (
        "an unknown architecture",
        || good().text("general.architecture", "mamba").bytes(),
        &["\"mamba\", is not supported", "llama", "qwen3"],
    ),
    (
        "an architecture that is a number",
        || good().number("general.architecture", 7).bytes(),
        &["general.architecture is 7, not a text"],
    ),
    (
        "no layers",
        || good().number("llama.block_count", 0).bytes(),
        &["llama.block_count is 0", "1 to 4096 must be left"],
    ),
    (
        "a missing size",
        || good().without("llama.embedding_length").bytes(),
        &["it has no llama.embedding_length"],
    ),
    (
        "a size that is a text",
        || good().text("llama.embedding_length", "32").bytes(),
        &["llama.embedding_length is a text"],
    ),
    (
        "2^32 - 1 layers",
        || good().number("llama.block_count", u32::MAX).bytes(),
        &["llama.block_count is 4294967295"],
    ),
    ("heads that do not divide", || good().number("llama.attention.head_count", 3).bytes(), &["model.gguf"]),
    (
        "sizes that differ from layer to layer",
        || good().list("llama.feed_forward_length", 4, 2, &[64, 0, 0, 0, 32, 0, 0, 0]).bytes(),
        &["llama.feed_forward_length differs from layer to layer"],
    ),
    (
        "an unknown rotary scaling",
        || good().text("llama.rope.scaling.type", "dynamic").bytes(),
        &["dynamic", "yarn"],
    ),
    (
        "values of another width",
        || good().number("llama.attention.value_length", 8).bytes(),
        &["llama.attention.value_length is 8"],
    ),
    (
        "rotary divisors of zero",
        || good().floats("rope_freqs.weight", &[8], &[0.0; 8]).bytes(),
        &["rope_freqs.weight holds 0"],
    ),
    (
        "rotary divisors of another length",
        || good().floats("rope_freqs.weight", &[4], &[1.0; 4]).bytes(),
        &["rope_freqs.weight", "F32 [8]"],
    ),
    (
        "no embedding",
        || good().without_tensor("token_embd.weight").bytes(),
        &["no tensor \"token_embd.weight\""],
    ),
    (
        "a missing matrix",
        || good().without_tensor("blk.0.ffn_up.weight").bytes(),
        &["\"blk.0.ffn_up.weight\" is not in"],
    ),
    (
        "a matrix of another shape",
        || good().tensor("blk.0.attn_v.weight", &[HIDDEN, 32], Q8_0, vec![0; 32 * Q8_0_BYTES]).bytes(),
        &["blk.0.attn_v.weight", "Q8_0 [32, 32]", "[32, 16]"],
    ),
    (
        "a quantized norm",
        || good().tensor("output_norm.weight", &[HIDDEN], Q8_0, vec![0; 34]).bytes(),
        &["output_norm.weight", "quantized"],
    ),
    (
        "an unsupported type",
        || good().tensor("blk.0.ffn_up.weight", &[256, 8], 34, vec![0; 8 * 54]).bytes(),
        &["blk.0.ffn_up.weight", "TQ1_0, which is not supported", "Q4_K", "MXFP4"],
    ),
    (
        "an unknown type",
        || good().edit("blk.0.ffn_up.weight", |_, kind, _| *kind = 99).bytes(),
        &["blk.0.ffn_up.weight", "unknown type 99", "Q4_K"],
    ),
    (
        "rows that are no whole blocks",
        || good().edit("blk.0.ffn_up.weight", |_, kind, _| *kind = Q4_K).bytes(),
        &["blk.0.ffn_up.weight", "rows of Q4_K are whole blocks of 256"],
    ),
    (
        "a dimension of 0",
        || good().edit("blk.0.ffn_up.weight", |dimensions, _, _| dimensions[1] = 0).bytes(),
        &["blk.0.ffn_up.weight", "[32, 0]"],
    ),
    (
        "no dimensions",
        || good().edit("blk.0.ffn_up.weight", |dimensions, _, _| dimensions.clear()).bytes(),
        &["blk.0.ffn_up.weight", "has 0 dimensions"],
    ),
    (
        "too many dimensions",
        || good().edit("blk.0.ffn_up.weight", |dimensions, _, _| *dimensions = vec![32; 5]).bytes(),
        &["blk.0.ffn_up.weight", "has 5 dimensions"],
    ),
    (
        "2^96 elements",
        || good().edit("blk.0.ffn_up.weight", |dimensions, _, _| *dimensions = vec![1 << 32; 3]).bytes(),
        &["blk.0.ffn_up.weight", "not possible"],
    ),
    (
        "2^62 elements",
        || {
            good()
                .edit("blk.0.ffn_up.weight", |dimensions, _, _| *dimensions = vec![1 << 31, 1 << 31])
                .bytes()
        },
        &["model.gguf"],
    ),
    (
        "an offset past the end",
        || good().edit("blk.0.ffn_up.weight", |_, _, offset| *offset = Some(1 << 40)).bytes(),
        &["truncated"],
    ),
    (
        "an offset near 2^64",
        || good().edit("blk.0.ffn_up.weight", |_, _, offset| *offset = Some(u64::MAX - 31)).bytes(),
        &["blk.0.ffn_up.weight", "no file is that long"],
    ),
    (
        "an offset between two alignments",
        || good().edit("blk.0.ffn_up.weight", |_, _, offset| *offset = Some(33)).bytes(),
        &["begins at 33, which is no multiple of the alignment, 32"],
    ),
    (
        "tensors that overlap",
        || good().edit("blk.0.ffn_up.weight", |_, _, offset| *offset = Some(64)).bytes(),
        &["\"token_embd.weight\" and \"blk.0.ffn_up.weight\" overlap"],
    ),
    (
        "two tensors of one name",
        || good().twice("blk.0.ffn_up.weight").bytes(),
        &["two tensors named \"blk.0.ffn_up.weight\""],
    ),
];

/// Files whose weights can be read, but no texts.
const TEXT_CASES: [Case; 12] = [
    (
        "no tokenizer",
        || good().text("tokenizer.ggml.model", "no_vocab").bytes(),
        &["model.gguf: the file has no tokenizer"],
    ),
    ("no tokens", || good().without("tokenizer.ggml.tokens").bytes(), &["the file has no tokenizer"]),
    (
        "an unknown tokenizer",
        || good().text("tokenizer.ggml.model", "bert").bytes(),
        &["\"bert\", which is not supported: gpt2"],
    ),
    (
        "tokens that are numbers",
        || good().numbers("tokenizer.ggml.tokens", &[1, 2]).bytes(),
        &["tokenizer.ggml.tokens is a list of 2, not a list of texts"],
    ),
    (
        "a token that is not UTF-8",
        || good().list("tokenizer.ggml.tokens", 8, 1, &[1, 0, 0, 0, 0, 0, 0, 0, 0xff]).bytes(),
        &["tokenizer.ggml.tokens: item 0 is not UTF-8"],
    ),
    (
        "fewer types than tokens",
        || good().numbers("tokenizer.ggml.token_type", &[1]).bytes(),
        &["token_type has 1 items for 262 tokens"],
    ),
    ("no scores", || good().without("tokenizer.ggml.scores").bytes(), &["no tokenizer.ggml.scores"]),
    (
        "too few tokens for bytes",
        || {
            good()
                .without("tokenizer.ggml.bos_token_id")
                .without("tokenizer.ggml.eos_token_id")
                .texts("tokenizer.ggml.tokens", &["a"])
                .numbers("tokenizer.ggml.token_type", &[1])
                .list("tokenizer.ggml.scores", 6, 1, &[0; 4])
                .bytes()
        },
        &["does not hold the token \"<0x00>\""],
    ),
    (
        "a BOS token that is not there",
        || good().number("tokenizer.ggml.bos_token_id", 9999).bytes(),
        &["bos_token_id is 9999: there are 262 tokens"],
    ),
    (
        "byte pairs without a way to cut",
        || good().text("tokenizer.ggml.model", "gpt2").bytes(),
        &["no tokenizer.ggml.pre"],
    ),
    (
        "an unknown way to cut",
        || good().text("tokenizer.ggml.model", "gpt2").text("tokenizer.ggml.pre", "my-own").bytes(),
        &["tokenizer.ggml.pre is \"my-own\"", "llama-bpe", "qwen2"],
    ),
    (
        "a template that is no template",
        || good().text("tokenizer.chat_template", "{% if %}").bytes(),
        &["chat template of", "model.gguf"],
    ),
];

#[test]
fn the_good_file_is_good() {
    read_bytes(&good().bytes()).expect("it is good");
    read_bytes(&good().alignment(4096).bytes()).expect("any power of two will do");
}

#[test]
fn every_bad_file_gives_its_reason() {
    check_with(CASES.iter().chain(&TEXT_CASES), |file| read_bytes(file));
}

#[test]
fn a_file_cut_anywhere_gives_an_error() {
    let file = good().bytes();
    let step = if thunder_testing::is_long() { 1 } else { 97 };
    for len in (0..file.len()).step_by(step) {
        assert!(read_bytes(&file[..len]).is_err(), "{len} of {} bytes", file.len());
    }
}

#[test]
fn an_empty_file_and_a_folder_give_errors() {
    assert!(read_bytes(&[]).is_err());
    let folder = tempfile::tempdir().expect("a folder");
    let error = read(&folder.path().join("nothing.gguf")).expect_err("it is not there").to_string();
    assert!(error.contains("nothing.gguf: no such file"), "{error}");
}

proptest! {
    #![proptest_config(tries())]

    /// The result does not matter: there must be one, without a panic, an endless loop or exhausted
    /// memory.
    #[test]
    fn random_damage_never_panics(
        damage in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
        header_only in any::<bool>(),
    ) {
        let mut file = good().bytes();
        let end = if header_only { find(&file, b"token_embd.weight") } else { file.len() };
        for (at, byte) in damage {
            file[at.index(end)] = byte;
        }
        drop(read_bytes(&file));
    }

    #[test]
    fn random_numbers_in_places_of_lengths_never_panic(at in any::<prop::sample::Index>(), number in any::<u64>(), bits in 0u32..64) {
        let file = good().bytes();
        let end = find(&file, b"output_norm.weight");
        let at = at.index(end);
        drop(read_bytes(&patched(file, at, number >> bits)));
    }

    #[test]
    fn random_values_never_panic(
        key in prop::sample::select(KEYS.to_vec()), kind in 0u32..14, bytes in prop::collection::vec(any::<u8>(), 0..40),
    ) {
        drop(read_bytes(&good().value(key, kind, &bytes).bytes()));
    }

    #[test]
    fn random_files_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..400), counts in any::<[u8; 2]>()) {
        let counts = counts.map(|count| u64::from(count).to_le_bytes());
        let file = [&b"GGUF"[..], &3u32.to_le_bytes(), &counts[0], &counts[1], &bytes].concat();
        prop_assert!(read_bytes(&file).is_err());
    }
}

/// Keys that are read.
const KEYS: [&str; 22] = [
    "general.architecture",
    "general.alignment",
    "split.count",
    "split.no",
    "split.tensors.count",
    "general.sampling.temp",
    "llama.block_count",
    "llama.embedding_length",
    "llama.attention.head_count",
    "llama.attention.head_count_kv",
    "llama.attention.key_length",
    "llama.rope.dimension_count",
    "llama.rope.scaling.type",
    "llama.rope.scaling.factor",
    "llama.expert_count",
    "tokenizer.ggml.model",
    "tokenizer.ggml.tokens",
    "tokenizer.ggml.token_type",
    "tokenizer.ggml.scores",
    "tokenizer.ggml.eos_token_id",
    "tokenizer.ggml.add_bos_token",
    "tokenizer.chat_template",
];
