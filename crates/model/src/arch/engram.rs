//! Tables by the last tokens in config.json (engram, DeepSeek V4.1).

use serde::Deserialize;
use serde_json::Value;

use crate::engram::Pcg64;
use crate::spec::{EngramLayer, EngramShape};

/// The seed of a layer's factors is its number times this.
const SEED: u32 = 10007;

/// The fields of config.json.
#[derive(Debug, Deserialize)]
struct Fields {
    #[serde(default)]
    engram_layer_ids: Vec<usize>,
    #[serde(default)]
    engram_num_embeddings: Vec<usize>,
    #[serde(default)]
    engram_max_ngram_size: usize,
    #[serde(default)]
    engram_vocab_size: u64,
    #[serde(default)]
    engram_n_heads: usize,
    #[serde(default)]
    engram_head_dim: usize,
    #[serde(default = "pad")]
    engram_pad_token_id: u32,
    #[serde(default)]
    engram_compressed_vocab_size: u64,
}

const fn pad() -> u32 {
    2
}

/// The tables of a model with this many layers and tokens, if it has some.
pub(super) fn read(text: &Value, layers: usize, vocab: usize) -> Result<Option<EngramShape>, String> {
    let fields = Fields::deserialize(text).map_err(|error| error.to_string())?;
    if fields.engram_layer_ids.is_empty() {
        return Ok(None);
    }
    // Limits of the arithmetic: rows and numbers are u32, products 63 bits.
    for (field, value, range) in [
        ("engram_max_ngram_size", fields.engram_max_ngram_size as u64, 2..=6),
        ("engram_n_heads", fields.engram_n_heads as u64, 1..=32),
        ("engram_head_dim", fields.engram_head_dim as u64, 1..=1 << 12),
        ("engram_vocab_size", fields.engram_vocab_size, 2..=1 << 27),
        ("engram_compressed_vocab_size", fields.engram_compressed_vocab_size, 1..=1 << 24),
        ("the number of engram_layer_ids", fields.engram_layer_ids.len() as u64, 1..=16),
    ] {
        if !range.contains(&value) {
            let (least, most) = range.into_inner();
            return Err(format!("{field} is {value}: it must be between {least} and {most}"));
        }
    }
    let pad = fields.engram_pad_token_id;
    if pad as usize >= vocab {
        return Err(format!("engram_pad_token_id is {pad}: it must be a token below vocab_size, {vocab}"));
    }
    let ids = &fields.engram_layer_ids;
    if !ids.is_sorted_by(|a, b| a < b) || ids.iter().any(|id| *id >= layers) {
        return Err(format!("engram_layer_ids is {ids:?}: ascending numbers below {layers} are supported"));
    }
    let (longest, heads) = (fields.engram_max_ngram_size, fields.engram_n_heads);
    // Each table has the next prime, in the order of layers, lengths and heads.
    let mut primes = (fields.engram_vocab_size..).filter(|number| is_prime(*number));
    let layers: Vec<EngramLayer> = ids
        .iter()
        .map(|&layer| EngramLayer {
            layer,
            factors: factors(layer, longest, fields.engram_compressed_vocab_size),
            primes: primes.by_ref().take((longest - 1) * heads).collect(),
        })
        .collect();
    let rows: Vec<usize> = layers.iter().map(EngramLayer::rows).collect();
    if rows != fields.engram_num_embeddings {
        return Err(format!(
            "engram_num_embeddings is {:?}, but primes from {} on give {rows:?}",
            fields.engram_num_embeddings, fields.engram_vocab_size
        ));
    }
    if let Some(rows) = rows.iter().find(|rows| u32::try_from(**rows).is_err()) {
        return Err(format!("engram_num_embeddings has {rows}: less than 2^32 are supported"));
    }
    Ok(Some(EngramShape {
        longest,
        heads,
        width: fields.engram_head_dim,
        numbers: fields.engram_compressed_vocab_size as usize,
        pad,
        layers,
    }))
}

/// Odd factors whose products with numbers below `numbers` have at most 63 bits.
fn factors(layer: usize, count: usize, numbers: u64) -> Vec<u64> {
    let bound = i64::MAX as u64 / numbers / 2;
    let mut random = Pcg64::new(SEED.wrapping_mul(layer as u32));
    (0..count).map(|_| 2 * random.below(bound) + 1).collect()
}

fn is_prime(number: u64) -> bool {
    let divisors = || (2..).take_while(|divisor| divisor * divisor <= number);
    number >= 2 && divisors().all(|divisor| !number.is_multiple_of(divisor))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_table_has_the_next_prime_and_rows_are_hashes() {
        let config = json!({
            "engram_layer_ids": [0, 2], "engram_num_embeddings": [408, 480], "engram_max_ngram_size": 3,
            "engram_vocab_size": 97, "engram_n_heads": 2, "engram_head_dim": 32, "engram_compressed_vocab_size": 255,
        });
        let shape = read(&config, 3, 300).unwrap().unwrap();
        let primes: Vec<&[u64]> = shape.layers.iter().map(|layer| &layer.primes[..]).collect();
        assert_eq!(primes, [[97, 101, 103, 107], [109, 113, 127, 131]]);
        let layer = EngramLayer { layer: 0, factors: vec![3, 5, 7], primes: vec![97, 101, 103, 107] };
        let mut rows = Vec::new();
        layer.look_up(2, [50, 40, 30], &mut rows);
        // 150 xor 200 is 94; xor 210 is 140.
        assert_eq!(rows, [94, 97 + 94, 198 + 140 - 103, 301 + 140 - 107]);
        let refused = |field: &str, value: Value| {
            let mut config = config.clone();
            config[field] = value;
            read(&config, 3, 300).unwrap_err()
        };
        assert!(refused("engram_num_embeddings", json!([408, 481])).contains("[408, 480]"));
        assert!(refused("engram_pad_token_id", json!(300)).contains("engram_pad_token_id is 300"));
        assert!(refused("engram_layer_ids", json!([0, 3])).contains("below 3"));
        assert!(refused("engram_compressed_vocab_size", json!(0)).contains("between 1 and"));
    }
}
