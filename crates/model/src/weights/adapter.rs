//! Low-rank adapters (LoRA, arXiv 2106.09685): folders as PEFT or MLX-LM write them.
//!
//! An adapter changes products of a model: `W · x` becomes `W · x + scale * up · (down · x)`, where
//! `down` is `[rank, inputs]` and `up` is `[outputs, rank]`. Both are called by other names in
//! files: `lora_A` and `lora_B`.

mod config;

use std::collections::HashMap;
use std::ops::Range;
use std::path::{Path, PathBuf};

use super::names::adapted_module;
use super::role::LayerRole;
use super::safetensors::SafetensorsFiles;
use crate::error::ModelError;
use crate::spec::{FeedForwardSpec, LayerSpec, MixerSpec, ModelSpec};
use config::AdapterConfig;

/// Maximum accepted rank; beyond it, merged weights are smaller than the adapter.
const MAX_RANK: usize = 1024;

/// An adapter's folder, opened: headers are read, matrices are not.
#[derive(Debug)]
pub struct Adapter {
    /// The name that requests ask for.
    pub name: String,
    path: PathBuf,
    files: SafetensorsFiles,
    modules: HashMap<(usize, LayerRole), Module>,
}

/// The two matrices of a module that the adapter changes.
#[derive(Debug)]
struct Module {
    /// Names of the tensors.
    down: String,
    up: String,
    /// True if the files have the inputs first: `[inputs, rank]` and `[rank, outputs]`.
    transposed: bool,
    /// Inputs and outputs of the module, over all ranks.
    inputs: usize,
    outputs: usize,
    rank: usize,
    scale: f32,
}

/// Outputs of a product that a rank computes.
#[derive(Debug, Clone)]
pub(crate) struct AdaptedOutputs {
    /// The modules that may contain these outputs, each with the module's first output: a separate
    /// projection, or one that is shared with others.
    pub modules: Vec<(LayerRole, usize)>,
    /// The outputs, counted from that first one.
    pub rows: Range<usize>,
}

/// An adapter's part in a product, in f32.
#[derive(Debug, PartialEq)]
pub(crate) struct LowRank {
    /// `[rank, columns]`.
    pub down: Vec<f32>,
    /// `[rows, rank]`, including the scale. Zero where an output belongs to another module than the
    /// column.
    pub up: Vec<f32>,
    /// The ranks of all modules of the product together.
    pub rank: usize,
}

impl Adapter {
    /// Opens an adapter for a model.
    ///
    /// # Errors
    /// When a file is missing or malformed, or the adapter changes what cannot be changed here.
    pub fn open(name: &str, path: &Path, spec: &ModelSpec) -> Result<Self, ModelError> {
        let config = AdapterConfig::read(path)?;
        let files = SafetensorsFiles::open_file(&config.weights)?;
        let mut adapter =
            Self { name: name.to_owned(), path: path.to_owned(), files, modules: HashMap::new() };
        for tensor in adapter.files.names() {
            let (module, is_down) = config.split(&tensor).ok_or_else(|| {
                adapter.wrong(format!(
                    "the tensor {tensor:?} is not supported: matrices of LoRA ({:?}, {:?}) are",
                    config.down, config.up
                ))
            })?;
            if !is_down {
                let down = format!("{module}{}", config.down);
                match adapter.files.has(&down) {
                    true => continue,
                    false => return Err(adapter.wrong(format!("there is {tensor:?}, but no {down:?}"))),
                }
            }
            let unknown = || {
                adapter.wrong(format!(
                    "it changes {module:?}: supported are the projections of grouped-query attention (q_proj, k_proj, \
                     v_proj, qkv_proj, o_proj) and of dense MLPs (gate_proj, up_proj, gate_up_proj, down_proj) of the \
                     model's {} layers; train without this module, or merge the adapter into the model",
                    spec.layers.len()
                ))
            };
            let (layer, role) = adapted_module(&module).ok_or_else(unknown)?;
            let shape = spec.layers.get(layer).and_then(|of| shape(of, spec.hidden, role));
            let shape = shape.ok_or_else(unknown)?;
            let found = adapter.module(&config, &module, shape)?;
            if adapter.modules.insert((layer, role), found).is_some() {
                return Err(adapter.wrong(format!("it changes {module:?} twice")));
            }
        }
        match adapter.modules.is_empty() {
            true => Err(adapter.wrong("it has no matrices".to_owned())),
            false => Ok(adapter),
        }
    }

    /// A module's tensors, checked against the model's `[outputs, inputs]`.
    fn module(
        &self,
        config: &AdapterConfig,
        module: &str,
        [outputs, inputs]: [usize; 2],
    ) -> Result<Module, ModelError> {
        let (down, up) = (format!("{module}{}", config.down), format!("{module}{}", config.up));
        let shape = |name: &str| {
            let tensor = self.files.get(name);
            let tensor = tensor.ok_or_else(|| self.wrong(format!("the tensor {name:?} is missing")))?;
            match (tensor.shape, config.transposed) {
                (&[a, b], false) | (&[b, a], true) => Ok([a, b]),
                (other, _) => {
                    Err(self.wrong(format!("the tensor {name:?} is {other:?}, but must be a matrix")))
                }
            }
        };
        let ([rank, columns], [rows, up_rank]) = (shape(&down)?, shape(&up)?);
        if (rows, columns, rank) != (outputs, inputs, up_rank) {
            return Err(self.wrong(format!(
                "{module:?} has matrices of [{rank}, {columns}] and [{rows}, {up_rank}], but the model's module has \
                 {inputs} inputs and {outputs} outputs: the adapter is for another model"
            )));
        }
        if !(1..=MAX_RANK).contains(&rank) {
            return Err(self.wrong(format!(
                "{module:?} has rank {rank}, but 1 to {MAX_RANK} are supported: merge the adapter into the model"
            )));
        }
        let scale = config.scale(module, rank);
        if !scale.is_finite() {
            return Err(self.wrong(format!("{module:?} has the scale {scale}: check alpha and rank")));
        }
        Ok(Module { down, up, transposed: config.transposed, inputs, outputs, rank, scale })
    }

    /// The module that outputs are of, and its first output among them.
    fn find(&self, layer: usize, outputs: &AdaptedOutputs) -> Option<(&Module, usize)> {
        let found = |(role, first): &(LayerRole, usize)| Some((self.modules.get(&(layer, *role))?, *first));
        outputs.modules.iter().find_map(found)
    }

    /// The modules of a product, each once.
    fn modules_of(&self, layer: usize, outputs: &[AdaptedOutputs]) -> Vec<&Module> {
        let mut all: Vec<&Module> = Vec::new();
        for (module, _) in outputs.iter().filter_map(|outputs| self.find(layer, outputs)) {
            if !all.iter().any(|other| std::ptr::eq(*other, module)) {
                all.push(module);
            }
        }
        all
    }

    /// The rank of the adapter's part in a product with these outputs; 0 if it changes none.
    pub(crate) fn rank(&self, layer: usize, outputs: &[AdaptedOutputs]) -> usize {
        self.modules_of(layer, outputs).iter().map(|module| module.rank).sum()
    }

    /// Reads the adapter's part in a product with these outputs and these of its inputs.
    ///
    /// # Errors
    /// When a tensor has another type than plain numbers, or numbers that are none.
    pub(crate) fn read(
        &self,
        layer: usize,
        outputs: &[AdaptedOutputs],
        columns: &Range<usize>,
    ) -> Result<LowRank, ModelError> {
        let modules = self.modules_of(layer, outputs);
        let rank = modules.iter().map(|module| module.rank).sum();
        let rows = outputs.iter().map(|outputs| outputs.rows.len()).sum::<usize>();
        let (mut down, mut up) = (Vec::with_capacity(rank * columns.len()), vec![0.0; rows * rank]);
        let mut before = 0;
        for module in modules {
            let numbers = self.numbers(&module.down, module.rank * module.inputs)?;
            let number = |row: usize, column: usize| match module.transposed {
                true => numbers[column * module.rank + row],
                false => numbers[row * module.inputs + column],
            };
            for row in 0..module.rank {
                down.extend(columns.clone().map(|column| number(row, column)));
            }
            let numbers = self.numbers(&module.up, module.outputs * module.rank)?;
            let mut row = 0;
            for outputs in outputs {
                let of_this = self.find(layer, outputs).filter(|(found, _)| std::ptr::eq(*found, module));
                for output in outputs.rows.clone() {
                    if let Some((_, first)) = of_this {
                        for index in 0..module.rank {
                            let place = match module.transposed {
                                true => index * module.outputs + first + output,
                                false => (first + output) * module.rank + index,
                            };
                            up[row * rank + before + index] = numbers[place] * module.scale;
                        }
                    }
                    row += 1;
                }
            }
            before += module.rank;
        }
        Ok(LowRank { down, up, rank })
    }

    fn numbers(&self, name: &str, len: usize) -> Result<Vec<f32>, ModelError> {
        let tensor = self.files.get(name);
        let tensor = tensor.ok_or_else(|| self.wrong(format!("the tensor {name:?} is missing")))?;
        super::hugging_face::decode(name, &tensor, len)
    }

    fn wrong(&self, reason: String) -> ModelError {
        ModelError::Adapter { path: self.path.clone(), reason }
    }

    /// Tells this adapter from others: the place and the contents of its tensors.
    pub fn fingerprint(&self) -> [u8; 32] {
        self.files.fingerprint()
    }

    /// Bytes of all its matrices.
    pub fn bytes(&self) -> u64 {
        self.files.bytes()
    }
}

/// `[outputs, inputs]` of a layer's module, if adapters can change it.
fn shape(layer: &LayerSpec, hidden: usize, role: LayerRole) -> Option<[usize; 2]> {
    match (&layer.mixer, &layer.feed_forward, role) {
        (MixerSpec::Attention(of), _, role) => {
            let (queries, kv) = (of.heads * of.head_dim, of.kv_heads * of.head_dim);
            let (values, inputs) = (of.kv_heads * of.value_dim, of.heads * of.value_dim);
            let attention = match role {
                // With a gate, a query projection has the gate's rows between the queries'.
                LayerRole::Query if !of.output_gate => Some([queries, hidden]),
                LayerRole::Key if !of.values_are_keys => Some([kv, hidden]),
                LayerRole::Value if !of.values_are_keys => Some([values, hidden]),
                LayerRole::Qkv if !of.output_gate && !of.values_are_keys => {
                    Some([queries + kv + values, hidden])
                }
                LayerRole::AttentionOut => Some([hidden, inputs]),
                _ => None,
            };
            attention.or_else(|| dense_shape(&layer.feed_forward, hidden, role))
        }
        (_, feed_forward, role) => dense_shape(feed_forward, hidden, role),
    }
}

fn dense_shape(feed_forward: &FeedForwardSpec, hidden: usize, role: LayerRole) -> Option<[usize; 2]> {
    let FeedForwardSpec::Mlp(of) = feed_forward else { return None };
    match role {
        LayerRole::Gate | LayerRole::GateUp if of.activation.is_none() => None,
        LayerRole::Gate | LayerRole::Up => Some([of.channels, hidden]),
        LayerRole::GateUp => Some([2 * of.channels, hidden]),
        LayerRole::Down => Some([hidden, of.channels]),
        _ => None,
    }
}
