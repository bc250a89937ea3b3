//! Models made from the built-in one: a slower one with the same answers, and drafts that are
//! rarely or never right.

use std::ops::Range;
use std::path::Path;

use serde_json::{Map, Value, json};
use thunder_testing::Random;

/// How often guesses are right.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    Right,
    Sometimes,
    Wrong,
}

/// Layers of the built-in model.
pub const LAYERS: usize = 6;

/// The tensors of a safetensors file: the header's entries, and the bytes.
struct Tensors {
    header: Map<String, Value>,
    bytes: Vec<u8>,
}

impl Tensors {
    fn read(path: &Path) -> Self {
        let all = std::fs::read(path).unwrap();
        let header = 8 + u64::from_le_bytes(*all.first_chunk().unwrap()) as usize;
        Self { header: serde_json::from_slice(&all[8..header]).unwrap(), bytes: all[header..].to_vec() }
    }

    fn write(&self, path: &Path) {
        // Omits the bytes of replaced tensors, because the format allows no gaps.
        let (mut header, mut bytes) = (self.header.clone(), Vec::new());
        let mut names = self.names();
        names.sort_by_key(|name| self.range(name).start);
        for name in names {
            let range = self.range(&name);
            header[&name]["data_offsets"] = json!([bytes.len(), bytes.len() + range.len()]);
            bytes.extend_from_slice(&self.bytes[range]);
        }
        let header = serde_json::to_vec(&header).unwrap();
        let length = (header.len() as u64).to_le_bytes();
        std::fs::write(path, [&length[..], &header, &bytes].concat()).unwrap();
    }

    fn range(&self, name: &str) -> Range<usize> {
        let [from, to] = [0, 1].map(|end| self.header[name]["data_offsets"][end].as_u64().unwrap() as usize);
        from..to
    }

    fn names(&self) -> Vec<String> {
        self.header.keys().filter(|name| *name != "__metadata__").cloned().collect()
    }

    /// Adds a matrix, or replaces it, in bf16.
    fn set(&mut self, name: String, shape: &[usize], value: impl Fn(usize) -> f32) {
        let start = self.bytes.len();
        let bits = |index| ((value(index).to_bits() >> 16) as u16).to_le_bytes();
        self.bytes.extend((0..shape.iter().product()).flat_map(bits));
        let entry = json!({ "dtype": "BF16", "shape": shape, "data_offsets": [start, self.bytes.len()] });
        self.header.insert(name, entry);
    }

    /// Adds a tensor like another one.
    fn add_copy(&mut self, of: &str, name: String, zeroed: bool) {
        let (range, mut entry) = (self.range(of), self.header[of].clone());
        let start = self.bytes.len();
        self.bytes.extend_from_within(range);
        if zeroed {
            self.bytes[start..].fill(0);
        }
        entry["data_offsets"] = json!([start, self.bytes.len()]);
        self.header.insert(name, entry);
    }
}

/// A copy of the built-in model with changed weights and this number of layers.
fn changed(layers: usize, change: impl FnOnce(&mut Tensors)) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    for entry in std::fs::read_dir(thunder_testing::builtin_model()).unwrap() {
        let path = entry.unwrap().path();
        std::fs::copy(&path, folder.path().join(path.file_name().unwrap())).unwrap();
    }
    let config = folder.path().join("config.json");
    let mut values: Value = serde_json::from_slice(&std::fs::read(&config).unwrap()).unwrap();
    values["num_hidden_layers"] = layers.into();
    std::fs::write(config, values.to_string()).unwrap();
    let weights = folder.path().join("model.safetensors");
    let mut tensors = Tensors::read(&weights);
    change(&mut tensors);
    tensors.write(&weights);
    folder
}

/// The built-in model with `layers` layers, where additional ones add nothing to the residual
/// stream. It has the same answers, and takes longer.
pub fn thick(layers: usize) -> tempfile::TempDir {
    changed(layers, |tensors| {
        let last = format!("layers.{}.", LAYERS - 1);
        for name in tensors.names().iter().filter(|name| name.contains(&last)) {
            let adds = name.contains("o_proj") || name.contains("down_proj");
            let zeroed = adds && !name.ends_with(".weight");
            for layer in LAYERS..layers {
                tensors.add_copy(name, name.replace(&last, &format!("layers.{layer}.")), zeroed);
            }
        }
    })
}

/// A model with a layer that predicts further tokens, and with `layers` others.
///
/// The layer's next token depends only on the last one. It is right if the model's does too, and
/// sometimes if the model is the built-in one. It is wrong if its projection is noise.
pub fn ahead(layers: usize, kind: Kind) -> tempfile::TempDir {
    const WIDTH: usize = 384;
    let folder = changed(layers, |tensors| {
        let last = format!("layers.{}.", LAYERS - 1);
        let adds = |name: &str| {
            (name.contains("o_proj") || name.contains("down_proj")) && !name.ends_with(".weight")
        };
        let names = tensors.names();
        for name in names.iter().filter(|name| name.contains(&last)) {
            for layer in LAYERS..=layers {
                tensors.add_copy(name, name.replace(&last, &format!("layers.{layer}.")), adds(name));
            }
        }
        for name in names.iter().filter(|name| kind == Kind::Right && adds(name)) {
            let range = tensors.range(name);
            tensors.bytes[range].fill(0);
        }
        let own = |name: &str| format!("model.layers.{layers}.{name}.weight");
        tensors.add_copy("model.norm.weight", own("shared_head.norm"), false);
        tensors.set(own("enorm"), &[WIDTH], |_| 1.0);
        tensors.set(own("hnorm"), &[WIDTH], |_| 1.0);
        let noise = Random::new(3).floats(2 * WIDTH * WIDTH);
        tensors.set(own("eh_proj"), &[WIDTH, 2 * WIDTH], |index| match kind {
            Kind::Wrong => noise[index],
            Kind::Right | Kind::Sometimes => f32::from(index % (2 * WIDTH) == index / (2 * WIDTH)),
        });
    });
    let config = folder.path().join("config.json");
    let mut values: Value = serde_json::from_slice(&std::fs::read(&config).unwrap()).unwrap();
    values["num_nextn_predict_layers"] = 1.into();
    std::fs::write(config, values.to_string()).unwrap();
    folder
}

/// The first of the tokens that [`cycle`] knows.
pub const CYCLE_FIRST: u32 = 1000;
/// Number of these tokens.
pub const CYCLE: usize = 128;

/// A model that answers each of [`CYCLE`] tokens with the next one. Its layer that predicts further
/// tokens uses only the hidden state, so it is right if it gets the right one.
pub fn cycle(layers: usize) -> tempfile::TempDir {
    const WIDTH: usize = 384;
    const VOCAB: usize = 4096;
    let folder = ahead(layers, Kind::Right);
    let weights = folder.path().join("model.safetensors");
    let mut tensors = Tensors::read(&weights);
    // Rows of a Hadamard matrix, three times: they are orthogonal.
    let sign = |token: usize, column: usize| match (token & (column % CYCLE)).count_ones() % 2 {
        0 => 1.0f32,
        _ => -1.0,
    };
    let noise = Random::new(4).floats(VOCAB * WIDTH);
    let of_cycle = |row: usize| row.checked_sub(CYCLE_FIRST as usize).filter(|token| *token < CYCLE);
    let embedding = |index: usize| match of_cycle(index / WIDTH) {
        Some(token) => sign(token, index % WIDTH),
        None => noise[index],
    };
    let head = |index: usize| match of_cycle(index / WIDTH) {
        Some(token) => sign((token + CYCLE - 1) % CYCLE, index % WIDTH),
        None => 0.01 * noise[index],
    };
    let turn = |index: usize| match (index / (2 * WIDTH), index % (2 * WIDTH)) {
        (_, column) if column < WIDTH => 0.0,
        (row, column) => {
            let product = |token| sign((token + 1) % CYCLE, row) * sign(token, column - WIDTH);
            (0..CYCLE).map(product).sum::<f32>() / WIDTH as f32
        }
    };
    for part in ["weight", "scales", "biases"] {
        tensors.header.remove(&format!("model.embed_tokens.{part}"));
    }
    tensors.set("model.embed_tokens.weight".to_owned(), &[VOCAB, WIDTH], embedding);
    tensors.set("lm_head.weight".to_owned(), &[VOCAB, WIDTH], head);
    tensors.set("model.norm.weight".to_owned(), &[WIDTH], |_| 1.0);
    let of_layer = |name: &str| format!("model.layers.{layers}.{name}.weight");
    tensors.set(of_layer("shared_head.norm"), &[WIDTH], |_| 1.0);
    tensors.set(of_layer("eh_proj"), &[WIDTH, 2 * WIDTH], turn);
    tensors.write(&weights);
    let config = folder.path().join("config.json");
    let mut values: Value = serde_json::from_slice(&std::fs::read(&config).unwrap()).unwrap();
    values["tie_word_embeddings"] = false.into();
    std::fs::write(config, values.to_string()).unwrap();
    folder
}

/// The built-in model's first layers: sometimes right.
pub fn first_layers(layers: usize) -> tempfile::TempDir {
    changed(layers, |_| ())
}

/// The built-in model with random levels in place of its weights: never right.
pub fn random() -> tempfile::TempDir {
    changed(LAYERS, |tensors| {
        let mut random = Random::new(1);
        for name in tensors.names() {
            if tensors.header[&name]["dtype"] == "U32" {
                let range = tensors.range(&name);
                tensors.bytes[range].iter_mut().for_each(|byte| *byte = random.below(256) as u8);
            }
        }
    })
}

/// The built-in model with two tokens exchanged in its vocabulary.
pub fn other_vocabulary() -> tempfile::TempDir {
    let folder = first_layers(LAYERS);
    let path = folder.path().join("tokenizer.json");
    let mut tokenizer: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    let vocabulary = tokenizer["model"]["vocab"].as_object_mut().unwrap();
    let [one, other] = [300, 301].map(|id| {
        vocabulary.iter().find(|(_, of)| of.as_u64() == Some(id)).map(|(name, _)| name.clone()).unwrap()
    });
    vocabulary[&one] = 301.into();
    vocabulary[&other] = 300.into();
    std::fs::write(path, tokenizer.to_string()).unwrap();
    folder
}
