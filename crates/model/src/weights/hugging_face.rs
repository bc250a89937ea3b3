//! Safetensors under Hugging Face's or MLX's names, plain or quantized.

mod parts;

use std::path::Path;

use safetensors::tensor::Dtype;
use thunder_compute::{Encoding, FilePages, Float, Fp8Scales, IntegerLayout, RowOrder};

use super::mapped::{MappedFiles, absent_indices};
use super::names::{Name, Names};
use super::quantization::{Method, Mode};
use super::role::{ExpertRole, LayerRole};
use super::safetensors::{SafetensorsFiles, Tensor};
use super::{Quantization, Role, StoredMatrix, WeightSource};
use crate::error::ModelError;
use parts::{Part, Parts};

/// Suffixes of a module's name for the tensor of its elements, one for each way to store them.
const ELEMENTS: [&str; 4] = [".weight", ".qweight", ".weight_packed", "_blocks"];

/// The safetensors files of a folder.
#[derive(Debug)]
pub struct HuggingFace {
    files: SafetensorsFiles,
    names: Names,
    quantization: Quantization,
}

/// Where the tensors of a role's matrix are.
struct Module {
    /// Precedes the tensors' own names.
    path: String,
    /// The suffix of the tensor of elements.
    elements: &'static str,
    /// True if the tensors are stacks over all experts or heads.
    stacked: bool,
    /// The rows of two matrices alternate: this one's are the first (0) or the second (1).
    turn: Option<usize>,
}

impl HuggingFace {
    /// Maps the files of a folder: those in model.safetensors.index.json, or model.safetensors.
    ///
    /// # Errors
    /// When a file is missing, truncated or malformed.
    pub fn open(folder: &Path, quantization: Quantization) -> Result<Self, ModelError> {
        let files = SafetensorsFiles::open(folder)?;
        let names = Names::find(&files);
        Ok(Self { files, names, quantization })
    }

    /// The module of a role, if the files have it.
    fn find(&self, role: Role) -> Option<Module> {
        // A stack may be a parameter by itself and not a module's weight. A stack with gate and up
        // of all experts side by side is a parameter or a plain weight; in other formats the rows
        // of both alternate.
        let is_parameter = matches!(role, Role::Expert { role: ExpertRole::GateUp, .. });
        // These may be parameters as well.
        let is_bare = matches!(
            role,
            Role::OutputStreams
                | Role::Layer(
                    _,
                    LayerRole::MixerStreams | LayerRole::FeedForwardStreams | LayerRole::IndexGates
                )
        );
        let elements = |name: &Name| {
            let may_end = |end: &str| !is_parameter || end == ".weight";
            let of_module = |end: &&str| may_end(end) && self.files.has(&format!("{}{end}", name.path));
            let parameter = || ((name.stacked || is_bare) && self.files.has(&name.path)).then_some("");
            ELEMENTS.into_iter().find(of_module).or_else(parameter)
        };
        let plain = self.names.of(role).into_iter().find_map(|name| {
            let elements = elements(&name)?;
            Some(Module { path: name.path, elements, stacked: name.stacked, turn: None })
        });
        plain.or_else(|| {
            let (path, turn) = self.names.by_turns(role)?;
            let elements = "_blocks";
            let found = self.files.has(&format!("{path}{elements}"));
            found.then_some(Module { path, elements, stacked: true, turn: Some(turn) })
        })
    }

    /// The module of a role. If the files have none, the one whose bias they have, or the first
    /// possible one.
    fn module(&self, role: Role) -> Module {
        self.find(role).unwrap_or_else(|| {
            let mut names = self.names.of(role);
            let found = names.iter().position(|name| self.files.has(&format!("{}.bias", name.path)));
            let found = found.or_else(|| self.likely(&names));
            let Name { path, stacked } = names.swap_remove(found.unwrap_or(0));
            Module { path, elements: ELEMENTS[0], stacked, turn: None }
        })
    }

    /// The name for which the files have neighbours in a layer, because families use different
    /// names.
    fn likely(&self, names: &[Name]) -> Option<usize> {
        names.iter().position(|name| {
            let module = name.path.strip_suffix(".weight").unwrap_or(&name.path);
            let around = module.rsplit_once('.').map(|(around, _)| around);
            around.is_some_and(|around| !is_layer(around) && self.files.has_inside(around))
        })
    }

    /// The whole name of a role's vector.
    fn vector_name(&self, role: Role) -> String {
        let mut names = self.names.of(role);
        let found = names.iter().position(|name| self.files.has(&name.path)).or_else(|| self.likely(&names));
        // An error names the one that most families have.
        let usual = usize::from(matches!(role, Role::Layer(_, LayerRole::FeedForwardNorm)));
        names.swap_remove(found.unwrap_or(usual)).path
    }

    fn tensor(&self, name: &str) -> Result<Tensor<'_>, ModelError> {
        self.files.get(name).ok_or_else(|| {
            let mut end: Vec<_> = name.rsplit('.').take(3).collect();
            end.reverse();
            let other = self.files.name_ending(&end.join(".")).map(|other| format!("; there is {other:?}"));
            let other = other.unwrap_or_default();
            let hint =
                format!("{other}: the folder is incomplete or of another architecture than its config says");
            ModelError::NoTensor { name: name.to_owned(), hint }
        })
    }

    /// The `len` numbers of a tensor that is not a matrix.
    fn decoded(&self, name: &str, tensor: &Tensor<'_>, len: usize) -> Result<Vec<f32>, ModelError> {
        let (bytes, _) = self.files.files().noted_copy(tensor.bytes);
        decode(name, &Tensor { bytes: &bytes, ..*tensor }, len)
    }

    /// A tensor that must have this shape and, if given, type.
    fn shaped(&self, name: &str, shape: &[usize], dtype: Option<Dtype>) -> Result<Tensor<'_>, ModelError> {
        let tensor = self.tensor(name)?;
        // Several matrices may be one below the other (MLX's groups of heads).
        let is_below = matches!((tensor.shape, shape), ([count, rows, cols], [all, width])
            if count.checked_mul(*rows) == Some(*all) && cols == width);
        if (tensor.shape != shape && !is_below) || dtype.is_some_and(|dtype| dtype != tensor.dtype) {
            let expected = match dtype {
                Some(dtype) => format!("{dtype:?} {shape:?}"),
                None => format!("{shape:?}"),
            };
            return Err(ModelError::Shape {
                name: name.to_owned(),
                actual: format!("{:?} {:?}", tensor.dtype, tensor.shape),
                expected,
            });
        }
        Ok(tensor)
    }

    fn encoding(&self, module: &Module) -> Result<Encoding, ModelError> {
        let path = &module.path;
        let weight = format!("{path}{}", module.elements);
        let tensor = self.tensor(&weight)?;
        let unsaid = |actual: &str| ModelError::Shape {
            name: weight.clone(),
            actual: actual.to_owned(),
            expected: "as the quantization in config.json says".into(),
        };
        let scales = |name: &str| {
            let name = format!("{path}.{name}");
            float(&name, &self.tensor(&name)?)
        };
        match (module.elements, self.quantization.method()) {
            ("_blocks", Some(Method::Mxfp4)) => return Ok(Encoding::Mxfp4),
            ("_blocks", _) => return Err(unsaid("in MXFP4 blocks")),
            (".qweight", Some(Method::Gptq { bits, group, add })) => {
                let (layout, scales) = (IntegerLayout::Gptq { add: *add }, scales("scales")?);
                return Ok(Encoding::Integers { layout, bits: *bits, group: *group, scales });
            }
            (".qweight", Some(Method::Awq { group })) => {
                let (layout, scales) = (IntegerLayout::Awq, scales("scales")?);
                return Ok(Encoding::Integers { layout, bits: 4, group: *group, scales });
            }
            (".qweight", _) => return Err(unsaid("quantized by GPTQ or AWQ (\".qweight\")")),
            (".weight_packed", Some(Method::Packed { bits, group, zeros })) => {
                let layout = if *zeros { IntegerLayout::RowsWithZeros } else { IntegerLayout::Rows };
                let scales = scales("weight_scale")?;
                return Ok(Encoding::Integers { layout, bits: *bits, group: *group, scales });
            }
            (".weight_packed", Some(Method::PackedMxfp4)) => return Ok(Encoding::Mxfp4),
            (".weight_packed", _) => return Err(unsaid("quantized (\".weight_packed\")")),
            (_, Some(Method::Fp8 { block })) if tensor.dtype == Dtype::F8_E4M3 => {
                let name = self.fp8_scale(path);
                let stored = self.files.get(&format!("{path}.{name}"));
                // Tables of DeepSeek V4.1 have scales for each row, unlike its matrices.
                let by_row = |scales: &Tensor<'_>| {
                    scales.shape.len() == 2 && scales.shape[0] == tensor.shape[0] && tensor.shape[0] > 1
                };
                let rows = if stored.as_ref().is_some_and(by_row) { 1 } else { block[0] };
                let scales = match stored.map(|tensor| tensor.dtype) {
                    Some(Dtype::F8_E8M0) => Fp8Scales::Exponents,
                    _ => Fp8Scales::Float(scales(name)?),
                };
                return Ok(Encoding::Fp8 { block: [rows, block[1]], scales });
            }
            // DeepSeek V4's experts: two 4-bit floats in a byte.
            (_, Some(Method::Fp8 { .. })) if tensor.dtype == Dtype::I8 => return Ok(Encoding::Mxfp4),
            _ if tensor.dtype == Dtype::F8_E4M3 => return Err(unsaid("of 8-bit floats")),
            _ => {}
        }
        let Some(scales_tensor) = self.files.get(&format!("{path}.scales")) else {
            return Ok(Encoding::Float(float(&weight, &tensor)?));
        };
        let settings = self.quantization.of(path).ok_or_else(|| ModelError::Shape {
            name: weight.clone(),
            actual: "quantized (it has scales)".into(),
            expected: "unquantized: config.json has no \"quantization\"".into(),
        })?;
        if settings.mode != Mode::Affine && self.files.has(&format!("{path}.global_scale")) {
            return Err(unsaid("quantized with a global scale, which is not supported"));
        }
        Ok(match settings.mode {
            Mode::Mxfp4 => Encoding::Mxfp4,
            Mode::Mxfp8 => Encoding::Mxfp8,
            Mode::Nvfp4 => Encoding::Nvfp4,
            Mode::Affine => {
                let scales = float(&format!("{path}.scales"), &scales_tensor)?;
                Encoding::Affine { bits: settings.bits, group: settings.group_size, scales }
            }
        })
    }

    /// DeepSeek's or compressed-tensors' name of the scales of 8-bit floats. Both multiply.
    fn fp8_scale(&self, path: &str) -> &'static str {
        // DeepSeek V3's, V4's, and the usual one.
        let names = ["weight_scale_inv", "scale", "weight_scale"];
        names.into_iter().find(|name| self.files.has(&format!("{path}.{name}"))).unwrap_or(names[2])
    }

    /// A tensor of a module, or one expert's or head's part of it if it is a stack.
    fn part(&self, part: &Part, stack: Option<(usize, usize)>) -> Result<Tensor<'_>, ModelError> {
        let Part { name, shape, dtype } = part;
        let Some((index, count)) = stack else { return self.shaped(name, shape, *dtype) };
        let all = self.shaped(name, &[&[count], shape.as_slice()].concat(), *dtype)?;
        let bytes = all.bytes.len() / count;
        Ok(Tensor { bytes: &all.bytes[index * bytes..][..bytes], ..all })
    }

    /// Scales or offsets, which must be of this type.
    fn numbers(
        &self,
        part: &Part,
        stack: Option<(usize, usize)>,
        scales: Option<Float>,
    ) -> Result<&[u8], ModelError> {
        let tensor = self.part(part, stack)?;
        match (part.dtype, scales) {
            (None, Some(scales)) if float(&part.name, &tensor)? != scales => Err(ModelError::Shape {
                name: part.name.clone(),
                actual: format!("{:?}", tensor.dtype),
                expected: format!("{scales:?}, as the scales are"),
            }),
            _ => Ok(tensor.bytes),
        }
    }

    /// Groups must be runs of columns, because the packed layout has no others. `name` is the list
    /// of each column's group, in which -1 marks such a run.
    fn check_group_order(&self, name: &str, cols: usize, group: usize) -> Result<(), ModelError> {
        if !self.files.has(name) {
            return Ok(());
        }
        let tensor = self.shaped(name, &[cols], Some(Dtype::I32))?;
        let (bytes, is_there) = self.files.files().noted_copy(tensor.bytes);
        if !is_there {
            return Ok(());
        }
        let groups = bytes.as_chunks::<4>().0.iter().map(|bytes| i32::from_le_bytes(*bytes));
        let in_order = |(column, found): (usize, i32)| {
            found == -1 || usize::try_from(found) == Ok(column.checked_div(group).unwrap_or(0))
        };
        match groups.enumerate().all(in_order) {
            true => Ok(()),
            false => Err(ModelError::Shape {
                name: name.to_owned(),
                actual: "a list of scattered groups (act-order)".into(),
                expected: format!(
                    "groups of {group} columns that follow each other; take a version without act-order"
                ),
            }),
        }
    }
}

impl WeightSource for HuggingFace {
    fn has(&self, role: Role) -> bool {
        self.find(role).is_some() || self.names.of(role).iter().any(|name| self.files.has(&name.path))
    }

    fn format(&self, role: Role) -> Result<Encoding, ModelError> {
        self.encoding(&self.module(role))
    }

    fn matrix(&self, role: Role, shape: [usize; 2]) -> Result<StoredMatrix<'_>, ModelError> {
        let module = self.module(role);
        let stack = role.in_stack().filter(|_| module.stacked);
        let encoding = self.encoding(&module)?;
        let [rows, cols] = shape;
        let unit = encoding.column_unit();
        if cols % unit != 0 {
            return Err(ModelError::Shape {
                name: format!("{}{}", module.path, module.elements),
                actual: format!("quantized in groups of {unit}"),
                expected: format!("{cols} columns, which are no whole number of groups"),
            });
        }
        let Parts { weight, scales, offsets, number } = Parts::of(self, &module, encoding, shape)?;
        if let Encoding::Integers { layout, group, .. } = encoding {
            let gptq = matches!(layout, IntegerLayout::Gptq { .. });
            let end = if gptq { "g_idx" } else { "weight_g_idx" };
            self.check_group_order(&format!("{}.{end}", module.path), cols, group)?;
        }
        // If rows alternate, the second matrix begins with the second row.
        let own = |bytes: &'_ [u8], part: &Part| match module.turn {
            None | Some(0) => 0,
            Some(turn) => turn * bytes.len() / part.shape[0],
        };
        let elements = self.part(&weight, stack)?.bytes;
        let apart = |part: Option<Part>| match part {
            None => Ok::<_, ModelError>(None),
            Some(part) => {
                let bytes = self.numbers(&part, stack, number)?;
                Ok(Some(&bytes[own(bytes, &part)..]))
            }
        };
        Ok(StoredMatrix {
            rows,
            cols,
            encoding,
            weight: &elements[own(elements, &weight)..],
            scales: apart(scales)?,
            offsets: apart(offsets)?,
            row_order: RowOrder::AsStored,
            rows_apart: if module.turn.is_some() { 2 } else { 1 },
            pages: Some(self),
        })
    }

    fn is_transposed(&self, role: Role, [outputs, inputs]: [usize; 2], usual: bool) -> bool {
        // Only stacks that are parameters of their own are.
        let Some(module) = self.find(role).filter(|module| module.elements.is_empty()) else { return false };
        match self.files.get(&module.path).map(|tensor| tensor.shape) {
            Some(&[_, rows, cols]) if outputs != inputs => [rows, cols] == [inputs, outputs],
            Some(_) => usual,
            None => false,
        }
    }

    fn bias(&self, role: Role, len: usize) -> Result<Vec<f32>, ModelError> {
        let module = self.module(role);
        let dot = if ["_blocks", ""].contains(&module.elements) { '_' } else { '.' };
        let turns = if module.turn.is_some() { 2 } else { 1 };
        let part = Part { name: format!("{}{dot}bias", module.path), shape: vec![turns * len], dtype: None };
        let tensor = self.part(&part, role.in_stack().filter(|_| module.stacked))?;
        let all = self.decoded(&part.name, &tensor, turns * len)?;
        Ok(all.into_iter().skip(module.turn.unwrap_or(0)).step_by(turns).collect())
    }

    fn vector(&self, role: Role, shape: &[usize]) -> Result<Vec<f32>, ModelError> {
        let name = self.vector_name(role);
        let tensor = self.tensor(&name)?;
        // Axes of length one are ignored: MLX moves them in convolutions, and ERNIE has one before
        // the router's correction.
        let long = |shape: &[usize]| shape.iter().copied().filter(|&len| len != 1).collect::<Vec<_>>();
        let tensor = match long(tensor.shape) == long(shape) {
            true => tensor,
            false => self.shaped(&name, shape, None)?,
        };
        self.decoded(&name, &tensor, shape.iter().product())
    }

    fn indices(&self, role: Role, shape: &[usize]) -> Result<Vec<u32>, ModelError> {
        let name = self.vector_name(role);
        let tensor = self.shaped(&name, shape, None)?;
        if !self.files.files().note(tensor.bytes) {
            return Ok(absent_indices(shape));
        }
        let found: Option<Vec<u32>> = match tensor.dtype {
            Dtype::I64 => tensor
                .bytes
                .as_chunks::<8>()
                .0
                .iter()
                .map(|bytes| u32::try_from(i64::from_le_bytes(*bytes)).ok())
                .collect(),
            Dtype::I32 => tensor
                .bytes
                .as_chunks::<4>()
                .0
                .iter()
                .map(|bytes| u32::try_from(i32::from_le_bytes(*bytes)).ok())
                .collect(),
            _ => None,
        };
        found.ok_or_else(|| ModelError::Shape {
            name,
            actual: format!("{:?}", tensor.dtype),
            expected: "I32 or I64 from 0 on".into(),
        })
    }

    /// MLX-LM adds the one to the norms of a model with a delta rule, and recognises a converted
    /// folder by its convolutions, `[channels, taps, 1]`. It does not change the norms of other
    /// models.
    fn norms_less_one(&self) -> bool {
        let convolution =
            self.files.name_ending("linear_attn.conv1d.weight").and_then(|name| self.files.get(name));
        convolution.is_none_or(|tensor| tensor.shape.get(1) == Some(&1))
    }

    fn bytes(&self) -> u64 {
        self.files.bytes()
    }

    fn unread(&self) -> Vec<String> {
        self.files.unread()
    }

    fn is_quantized(&self) -> bool {
        self.quantization.is_any()
    }

    fn files(&self) -> &MappedFiles {
        self.files.files()
    }

    fn fingerprint(&self) -> [u8; 32] {
        self.files.fingerprint()
    }
}

impl FilePages for HuggingFace {
    fn read(&self, bytes: &[u8], to: &mut [u8]) {
        self.files.read(bytes, to);
    }

    fn need(&self, bytes: &[u8]) {
        self.files.need(bytes);
    }

    fn release(&self, bytes: &[u8]) {
        self.files.release(bytes);
    }
}

/// True for `layers.3` and what precedes it.
fn is_layer(module: &str) -> bool {
    module.rsplit('.').next().is_some_and(|part| part.bytes().all(|byte| byte.is_ascii_digit()))
        && !module.contains("experts.")
}

/// The `len` numbers of a tensor of a file that is read separately. Errors say what is wrong with
/// it.
pub(crate) fn float_tensor(
    file: &safetensors::SafeTensors<'_>,
    name: &str,
    shape: &[usize],
) -> Result<Vec<f32>, String> {
    let view = file.tensor(name).map_err(|error| error.to_string())?;
    if view.shape() != shape {
        return Err(format!("tensor {name:?} has the shape {:?}, not {shape:?}", view.shape()));
    }
    let tensor = Tensor { dtype: view.dtype(), shape: view.shape(), bytes: view.data() };
    decode(name, &tensor, shape.iter().product()).map_err(|error| error.to_string())
}

pub(super) fn decode(name: &str, tensor: &Tensor<'_>, len: usize) -> Result<Vec<f32>, ModelError> {
    let mut values = vec![0.0; len];
    float(name, tensor)?.decode(tensor.bytes, &mut values);
    match values.iter().position(|value| !value.is_finite()) {
        Some(at) => Err(ModelError::NotFinite { name: name.to_owned(), at, value: values[at] }),
        None => Ok(values),
    }
}

fn float(name: &str, tensor: &Tensor<'_>) -> Result<Float, ModelError> {
    match tensor.dtype {
        Dtype::F32 => Ok(Float::F32),
        Dtype::F16 => Ok(Float::F16),
        Dtype::BF16 => Ok(Float::BF16),
        other => Err(ModelError::Shape {
            name: name.to_owned(),
            actual: format!("{other:?}"),
            expected: "F32, F16 or BF16 (or U32 with scales)".into(),
        }),
    }
}
