//! An untrained tokenizer: the 256 bytes, placeholder names for all other ids, and one token that
//! ends a text.

use serde_json::{Map, Value, json};

/// The token that ends a text. Its id is the last one.
const END: &str = "<|end|>";

/// Smallest vocabulary: the bytes and the end token.
pub(super) const LEAST_TOKENS: usize = 257;

/// A minimal template, so that the chat API accepts requests.
const TEMPLATE: &str = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}\
    {% if add_generation_prompt %}assistant: {% endif %}";

/// tokenizer.json and its companion files, by name.
pub(super) fn files(vocab: usize) -> [(&'static str, Value); 3] {
    let end = vocab - 1;
    let tokenizer = json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": [{
            "id": end, "content": END, "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false, "special": true,
        }],
        "normalizer": null,
        "pre_tokenizer": byte_level(),
        "post_processor": null,
        "decoder": byte_level(),
        "model": {
            "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
            "vocab": vocabulary(vocab), "merges": [],
        },
    });
    let config = json!({
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "chat_template": TEMPLATE,
        "clean_up_tokenization_spaces": false,
    });
    let generation = json!({ "do_sample": false, "eos_token_id": end });
    [("tokenizer.json", tokenizer), ("tokenizer_config.json", config), ("generation_config.json", generation)]
}

fn byte_level() -> Value {
    json!({ "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false })
}

fn vocabulary(vocab: usize) -> Map<String, Value> {
    let end = vocab - 1;
    let bytes = byte_characters().into_iter().map(String::from);
    let names = (256..end).map(|id| format!("<|t{id}|>"));
    bytes.chain(names).chain([END.to_owned()]).zip((0..).map(Value::from)).collect()
}

/// The character of each byte in byte-level vocabularies (GPT-2's): printable Latin-1 bytes are
/// themselves, the others are the code points from U+0100, in order.
fn byte_characters() -> Vec<char> {
    let mut next = '\u{100}'..;
    (0..=u8::MAX)
        .filter_map(|byte| match byte {
            b'!'..=b'~' | 0xa1..=0xac | 0xae.. => Some(char::from(byte)),
            _ => next.next(),
        })
        .collect()
}
