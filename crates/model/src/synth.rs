//! Model folders of real shapes with random weights, in MLX's affine format or bf16, to measure a
//! cluster before downloading anything.
//!
//! Quantized weights need no quantizer: any bits are valid levels, and the scales give them the
//! right size.

mod disk;
mod random;
mod shapes;
mod tensors;
#[cfg(test)]
mod tests;
mod text;

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::Path;

use safetensors::tensor::Dtype;
use serde_json::{Map, Value, json};

use crate::arch;
use crate::error::ModelError;
pub use shapes::{Shape, Stretch};
use tensors::{Quantization, Tensor};

/// Largest weight file, unless one tensor is larger.
const SHARD_BYTES: u64 = 4 << 30;

/// Bytes per write: a compromise between system calls and cache use.
const PIECE_BYTES: usize = 1 << 20;

/// Writes a model folder, quantized to `bits` in groups of `group`, or in bf16 without bits. The
/// same arguments give the same bytes. `progress` gets the bytes written so far and their total.
///
/// # Errors
/// When the shape cannot be quantized like this, the folder is not empty, or the disk is too small
/// or fails. A failed write deletes its files.
pub fn write(
    shape: &Shape,
    bits: Option<u32>,
    group: usize,
    folder: &Path,
    seed: u64,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<(), ModelError> {
    let layout = Layout::new(shape, bits.map(|bits| (bits, group)), seed, SHARD_BYTES)?;
    layout.write(folder, progress)
}

/// Writes the outline of a model folder: like [`write`], but the weights are holes in the files,
/// which take no space. For plans, which read headers only; computed results would be meaningless.
///
/// # Errors
/// When the shape cannot be quantized like this, the folder is not empty, or the disk fails.
pub fn outline(shape: &Shape, bits: Option<u32>, group: usize, folder: &Path) -> Result<(), ModelError> {
    let layout = Layout::new(shape, bits.map(|bits| (bits, group)), 0, SHARD_BYTES)?;
    fs::create_dir_all(folder).map_err(|error| ModelError::io(folder, "a place to be written to", error))?;
    let io = |path: &Path| {
        let path = path.to_owned();
        move |source| ModelError::Io { path, source }
    };
    for shard in &layout.shards {
        let path = folder.join(&shard.name);
        let mut file = File::create_new(&path).map_err(io(&path))?;
        file.write_all(&shard.header).and_then(|()| file.set_len(shard.bytes())).map_err(io(&path))?;
    }
    for (name, text) in &layout.texts {
        let path = folder.join(name);
        fs::write(&path, text).map_err(io(&path))?;
    }
    Ok(())
}

/// Writes the weights of any spec, without config and texts.
#[cfg(test)]
pub(crate) fn write_weights(
    spec: &crate::ModelSpec,
    quantization: Quantization,
    folder: &Path,
) -> Result<(), ModelError> {
    let tensors = tensors::tensors(spec, quantization, 7).expect("columns divide into groups");
    let shards = shards(tensors, SHARD_BYTES);
    let texts = vec![("model.safetensors.index.json", index(&shards).to_string())];
    Layout { what: "a test's model".into(), shards, texts }.write(folder, &mut |_, _| {})
}

/// All files of a folder. Weights are generated while they are written.
struct Layout {
    /// For error texts.
    what: String,
    shards: Vec<Shard>,
    /// Small files by name. config.json is the last, so a folder that has it is complete.
    texts: Vec<(&'static str, String)>,
}

/// One weight file.
struct Shard {
    name: String,
    header: Vec<u8>,
    tensors: Vec<Tensor>,
}

impl Layout {
    fn new(
        shape: &Shape,
        quantization: Quantization,
        seed: u64,
        shard_bytes: u64,
    ) -> Result<Self, ModelError> {
        let refuse = |reason: String| ModelError::Synth { name: shape.name.to_owned(), reason };
        if shape.vocab < text::LEAST_TOKENS {
            let reason = format!("{} tokens are too few: the bytes need {}", shape.vocab, text::LEAST_TOKENS);
            return Err(refuse(reason));
        }
        let what = match quantization {
            Some((bits, group)) => format!("{} with {bits} bits in groups of {group}", shape.name),
            None => format!("{} in bf16", shape.name),
        };
        let config = shape.config(quantization, shape.vocab as u32 - 1);
        // config.json is checked by its readers.
        let mut spec = arch::spec(&config, Path::new("config.json"))?;
        spec.ahead = spec.ahead.filter(|_| shape.ahead);
        crate::weights::Quantization::read(&config, Path::new("config.json"))?;
        let tensors = tensors::tensors(&spec, quantization, seed).map_err(|columns| {
            let group = quantization.map_or(0, |(_, group)| group);
            refuse(format!(
                "its matrices of {columns} columns do not divide into groups of {group}: use smaller groups"
            ))
        })?;
        let shards = shards(tensors, shard_bytes);
        let mut texts = vec![("model.safetensors.index.json", index(&shards).to_string())];
        texts.extend(text::files(shape.vocab).map(|(name, json)| (name, json.to_string())));
        texts.push(("config.json", format!("{config:#}")));
        Ok(Self { what, shards, texts })
    }

    fn bytes(&self) -> u64 {
        let texts: usize = self.texts.iter().map(|(_, text)| text.len()).sum();
        texts as u64 + self.shards.iter().map(Shard::bytes).sum::<u64>()
    }

    fn write(&self, folder: &Path, progress: &mut dyn FnMut(u64, u64)) -> Result<(), ModelError> {
        let io = |error| ModelError::io(folder, "a place to be written to", error);
        match fs::read_dir(folder).map(|mut entries| entries.next().is_none()) {
            Ok(true) => {}
            Ok(false) => return Err(ModelError::NotEmpty { path: folder.to_owned() }),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(io(error)),
        }
        self.check_space(folder, disk::free_bytes)?;
        fs::create_dir_all(folder).map_err(io)?;
        let result = self.write_files(folder, progress);
        if result.is_err() {
            let shards = self.shards.iter().map(|shard| shard.name.as_str());
            for name in shards.chain(self.texts.iter().map(|(name, _)| *name)) {
                // The first error matters more than an error of the clean-up.
                fs::remove_file(folder.join(name)).ok();
            }
        }
        result
    }

    fn check_space(&self, folder: &Path, free: fn(&Path) -> io::Result<u64>) -> Result<(), ModelError> {
        let io = |error| ModelError::io(folder, "a place to be written to", error);
        let absolute = std::path::absolute(folder).map_err(io)?;
        let there = absolute.ancestors().find(|path| path.is_dir()).unwrap_or(&absolute);
        let (needed, available) = (self.bytes(), free(there).map_err(io)?);
        if needed > available {
            let (what, path) = (self.what.clone(), there.to_owned());
            return Err(ModelError::NoSpace { what, path, needed, available });
        }
        Ok(())
    }

    fn write_files(&self, folder: &Path, progress: &mut dyn FnMut(u64, u64)) -> Result<(), ModelError> {
        let (mut done, total) = (0, self.bytes());
        let mut piece = vec![0; PIECE_BYTES];
        for shard in &self.shards {
            let path = folder.join(&shard.name);
            shard
                .write(&path, &mut piece, &mut |bytes| {
                    done += bytes;
                    progress(done, total);
                })
                .map_err(|source| ModelError::Io { path, source })?;
        }
        for (name, text) in &self.texts {
            let path = folder.join(name);
            fs::write(&path, text).map_err(|source| ModelError::Io { path, source })?;
            done += text.len() as u64;
            progress(done, total);
        }
        Ok(())
    }
}

impl Shard {
    fn bytes(&self) -> u64 {
        self.header.len() as u64 + self.tensors.iter().map(Tensor::bytes).sum::<u64>()
    }

    fn write(&self, path: &Path, piece: &mut [u8], progress: &mut dyn FnMut(u64)) -> io::Result<()> {
        let mut file = File::create_new(path)?;
        file.write_all(&self.header)?;
        progress(self.header.len() as u64);
        for tensor in &self.tensors {
            let mut filler = tensor.filler();
            let mut left = tensor.bytes();
            while left > 0 {
                let len = left.min(piece.len() as u64);
                let piece = &mut piece[..len as usize];
                filler.fill(piece);
                file.write_all(piece)?;
                left -= len;
                progress(len);
            }
        }
        Ok(())
    }
}

/// Distributes tensors over files of at most `shard_bytes`; a larger tensor gets a separate file.
fn shards(tensors: Vec<Tensor>, shard_bytes: u64) -> Vec<Shard> {
    let mut files: Vec<Vec<Tensor>> = vec![Vec::new()];
    let mut bytes = 0;
    for tensor in tensors {
        if bytes > 0 && bytes + tensor.bytes() > shard_bytes {
            files.push(Vec::new());
            bytes = 0;
        }
        bytes += tensor.bytes();
        if let Some(file) = files.last_mut() {
            file.push(tensor);
        }
    }
    let count = files.len();
    files
        .into_iter()
        .enumerate()
        .map(|(index, tensors)| Shard {
            name: match count {
                1 => "model.safetensors".to_owned(),
                _ => format!("model-{:05}-of-{count:05}.safetensors", index + 1),
            },
            header: header(&tensors),
            tensors,
        })
        .collect()
}

/// The start of a safetensors file: the length of a JSON object, then the object, padded to whole
/// words.
fn header(tensors: &[Tensor]) -> Vec<u8> {
    let mut entries = Map::new();
    entries.insert("__metadata__".into(), json!({ "format": "mlx" }));
    let mut start = 0;
    for tensor in tensors {
        let end = start + tensor.bytes();
        let dtype = if tensor.dtype == Dtype::U32 { "U32" } else { "BF16" };
        let entry = json!({ "dtype": dtype, "shape": tensor.shape, "data_offsets": [start, end] });
        entries.insert(tensor.name.clone(), entry);
        start = end;
    }
    let mut text = Value::Object(entries).to_string().into_bytes();
    text.resize(text.len().next_multiple_of(8), b' ');
    let mut header = (text.len() as u64).to_le_bytes().to_vec();
    header.append(&mut text);
    header
}

/// model.safetensors.index.json.
fn index(shards: &[Shard]) -> Value {
    let bytes: u64 = shards.iter().flat_map(|shard| &shard.tensors).map(Tensor::bytes).sum();
    let files: Map<String, Value> = shards
        .iter()
        .flat_map(|shard| shard.tensors.iter().map(|tensor| (tensor.name.clone(), shard.name.clone().into())))
        .collect();
    json!({ "metadata": { "total_size": bytes }, "weight_map": files })
}
