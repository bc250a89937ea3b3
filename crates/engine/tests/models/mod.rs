//! Models made of the built-in one: a slower one that says the same, and drafts that are right
//! seldom or never.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::ops::Range;
use std::path::Path;

use serde_json::{Map, Value, json};
use thunder_testing::Random;

/// Layers of the built-in model.
pub const LAYERS: usize = 6;

/// The tensors of a safetensors file: what the header says of each, and its bytes.
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
        let header = serde_json::to_vec(&self.header).unwrap();
        let length = (header.len() as u64).to_le_bytes();
        std::fs::write(path, [&length[..], &header, &self.bytes].concat()).unwrap();
    }

    fn range(&self, name: &str) -> Range<usize> {
        let [from, to] = [0, 1].map(|end| self.header[name]["data_offsets"][end].as_u64().unwrap() as usize);
        from..to
    }

    fn names(&self) -> Vec<String> {
        self.header.keys().filter(|name| *name != "__metadata__").cloned().collect()
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

/// The built-in model with `layers` layers: further ones add nothing to the residual stream. It
/// says what the built-in model says, and takes longer.
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

/// The built-in model's first layers: right now and then.
pub fn first_layers(layers: usize) -> tempfile::TempDir {
    changed(layers, |_| ())
}

/// The built-in model with random levels in the place of its weights: never right.
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
