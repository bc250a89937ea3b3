//! The parts of a tokenizer.json that make the library panic if they are malformed: when it is
//! loaded, or later for a text.

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use serde::Deserialize;
use serde_json::Value;

/// The library unwraps the result of parsing these. Everything else is only skipped.
#[derive(Deserialize)]
struct Parts {
    #[serde(default)]
    normalizer: Value,
    /// Of interest is only that it is JSON.
    #[serde(default, rename = "decoder")]
    _decoder: Value,
}

/// Refuses a file on which the library would panic.
pub(super) fn check(file: &[u8]) -> Result<(), String> {
    let parts: Parts = serde_json::from_slice(file).map_err(|error| error.to_string())?;
    check_normalizer(&parts.normalizer)
}

/// Looks at the normalizer itself, and at those in a sequence.
fn check_normalizer(normalizer: &Value) -> Result<(), String> {
    match normalizer {
        Value::Object(fields) => {
            if fields.get("type").is_some_and(|kind| kind == "Precompiled") {
                check_character_map(fields.get("precompiled_charsmap").and_then(Value::as_str))
                    .map_err(|reason| format!("its precompiled_charsmap is malformed: {reason}"))?;
            }
            fields.values().try_for_each(check_normalizer)
        }
        Value::Array(items) => items.iter().try_for_each(check_normalizer),
        _ => Ok(()),
    }
}

/// SentencePiece's map of characters in base64: the bytes of a trie, the trie, and the texts that
/// its leaves point to, each ended by a zero.
fn check_character_map(map: Option<&str>) -> Result<(), String> {
    let map = BASE64_STANDARD.decode(map.ok_or("it is no text")?).map_err(|error| error.to_string())?;
    let (len, rest) = map.split_first_chunk::<4>().ok_or("it is shorter than a number")?;
    let len = u32::from_le_bytes(*len) as usize / 4 * 4;
    let (trie, texts) = rest
        .split_at_checked(len)
        .ok_or_else(|| format!("it has a trie of {len} bytes, but {} are left", rest.len()))?;
    let texts = std::str::from_utf8(texts).map_err(|error| format!("its texts are not UTF-8: {error}"))?;
    let words = trie.chunks_exact(4).map(|word| u32::from_le_bytes([word[0], word[1], word[2], word[3]]));
    check_trie(&words.map(|word| word as usize).collect::<Vec<_>>(), texts)
}

/// Visits all nodes of a double array as `spm_precompiled` reads it (of Darts).
fn check_trie(words: &[usize], texts: &str) -> Result<(), String> {
    let offset = |word: usize| (word >> 10) << ((word & (1 << 9)) >> 6);
    let outside = |place: usize| format!("its trie has {} words, a node is at {place}", words.len());
    let first = words.first().ok_or("its trie is empty")?;
    let mut visited = vec![false; words.len()];
    let mut nodes = vec![offset(*first)];
    while let Some(node) = nodes.pop() {
        match visited.get_mut(node) {
            None => return Err(outside(node)),
            Some(true) => continue,
            Some(visited) => *visited = true,
        }
        for byte in 1..=0xff {
            let word = *words.get(node ^ byte).ok_or_else(|| outside(node ^ byte))?;
            if word & ((1 << 31) | 0xff) != byte {
                continue;
            }
            let child = node ^ byte ^ offset(word);
            if (word >> 8) & 1 == 1 {
                let leaf = words.get(child).ok_or_else(|| outside(child))?;
                let text = leaf & ((1 << 31) - 1);
                if !texts.is_char_boundary(text) {
                    return Err(format!("its texts have {} bytes, one begins at {text}", texts.len()));
                }
            }
            nodes.push(child);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A file with this character map.
    fn file(words: &[u32], texts: &[u8]) -> Vec<u8> {
        let trie: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        let map = [&(trie.len() as u32).to_le_bytes()[..], &trie, texts].concat();
        let map =
            serde_json::json!({ "type": "Precompiled", "precompiled_charsmap": BASE64_STANDARD.encode(map) });
        serde_json::json!({ "normalizer": { "type": "Sequence", "normalizers": [map] } })
            .to_string()
            .into_bytes()
    }

    /// The first node is at 0; "a" leads from it to the leaf at 256.
    fn trie(text: u32) -> Vec<u32> {
        let mut words = vec![0; 512];
        words[0x61] = (0x161 << 10) | (1 << 8) | 0x61;
        words[0x100] = (1 << 31) | text;
        words
    }

    #[test]
    fn a_good_map_passes_and_the_library_reads_it() {
        let file = file(&trie(0), "ä\0".as_bytes());
        check(&file).unwrap();
        let file: Value = serde_json::from_slice(&file).unwrap();
        let map = file["normalizer"]["normalizers"][0].to_string();
        let map: tokenizers::normalizers::Precompiled = serde_json::from_str(&map).unwrap();
        assert_eq!(map.normalize_string("ab"), "äb");
    }

    #[test]
    fn maps_on_which_the_library_would_panic_are_refused() {
        let mut outside = trie(0);
        outside[0x61] = (0xfff61 << 10) | 0x61;
        let first = [vec![0xfff << 10], vec![0; 511]].concat();
        for (words, texts, reason) in [
            (vec![], &b""[..], "its trie is empty"),
            (vec![0; 200], b"", "its trie has 200 words, a node is at 200"),
            (first, b"", "a node is at 4095"),
            (outside, b"", "a node is at 1048320"),
            (trie(3), "ä\0".as_bytes(), ""),
            (trie(4), "ä\0".as_bytes(), "its texts have 3 bytes, one begins at 4"),
            (trie(1), "ä\0".as_bytes(), "one begins at 1"),
            (trie(0), b"\xff", "its texts are not UTF-8"),
        ] {
            let result = check(&file(&words, texts));
            match reason {
                "" => assert_eq!(result, Ok(())),
                _ => assert!(
                    result.as_ref().is_err_and(|error| error.contains(reason)),
                    "{reason}: {result:?}"
                ),
            }
        }
    }
}
