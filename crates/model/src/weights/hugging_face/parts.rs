//! The tensors that make a matrix, by encoding.

use safetensors::tensor::Dtype;
use thunder_compute::{Encoding, Float, Fp8Scales, IntegerLayout};

use super::{HuggingFace, Module};
use crate::error::ModelError;

/// A tensor that a matrix needs.
pub(super) struct Part {
    pub name: String,
    /// Without the dimension of a stack.
    pub shape: Vec<usize>,
    /// `None`: any type of plain numbers.
    pub dtype: Option<Dtype>,
}

/// The tensors of one matrix.
pub(super) struct Parts {
    pub weight: Part,
    pub scales: Option<Part>,
    pub offsets: Option<Part>,
    /// The type of scales, and of offsets that are plain numbers.
    pub number: Option<Float>,
}

impl Parts {
    /// The tensors of a matrix of this shape.
    pub fn of(
        files: &HuggingFace,
        module: &Module,
        encoding: Encoding,
        [rows, cols]: [usize; 2],
    ) -> Result<Self, ModelError> {
        let path = &module.path;
        let part = |end: &str, shape: &[usize], dtype: Option<Dtype>| Part {
            name: format!("{path}{end}"),
            shape: shape.to_vec(),
            dtype,
        };
        let number = match encoding {
            Encoding::Affine { scales, .. }
            | Encoding::Fp8 { scales: Fp8Scales::Float(scales), .. }
            | Encoding::Integers { scales, .. } => Some(scales),
            _ => None,
        };
        let (weight, scales, offsets) = match encoding {
            // `_blocks` has 16 bytes for each group of 32.
            Encoding::Mxfp4 if module.elements == "_blocks" => {
                let rows = if module.turn.is_some() { 2 * rows } else { rows };
                let scales = part("_scales", &[rows, cols / 32], Some(Dtype::U8));
                (part("_blocks", &[rows, cols / 32, 16], Some(Dtype::U8)), Some(scales), None)
            }
            // Nibbles as MLX's words have them, in bytes.
            Encoding::Mxfp4 if module.elements == ".weight_packed" => {
                let scales = part(".weight_scale", &[rows, cols / 32], Some(Dtype::U8));
                (part(".weight_packed", &[rows, cols / 2], Some(Dtype::U8)), Some(scales), None)
            }
            Encoding::Affine { bits, group, .. } => {
                let numbers = |end| Some(part(end, &[rows, cols / group], None));
                let words = cols * bits as usize / 32;
                (part(".weight", &[rows, words], Some(Dtype::U32)), numbers(".scales"), numbers(".biases"))
            }
            Encoding::Mxfp4 if files.has_bytes(&format!("{path}.weight")) => {
                let scales = part(".scale", &[rows, cols / 32], Some(Dtype::F8_E8M0));
                (part(".weight", &[rows, cols / 2], Some(Dtype::I8)), Some(scales), None)
            }
            Encoding::Mxfp4 | Encoding::Mxfp8 | Encoding::Nvfp4 => {
                let (bits, group) = match encoding {
                    Encoding::Mxfp8 => (8, 32),
                    Encoding::Nvfp4 => (4, 16),
                    _ => (4, 32),
                };
                let scales = part(".scales", &[rows, cols / group], Some(Dtype::U8));
                (part(".weight", &[rows, cols * bits / 32], Some(Dtype::U32)), Some(scales), None)
            }
            Encoding::Fp8 { block, scales: format } => {
                let scales = format!(".{}", files.fp8_scale(path));
                let shape = files.fp8_scale_shape(&format!("{path}{scales}"), block, [rows, cols]);
                let exponents = (format == Fp8Scales::Exponents).then_some(Dtype::F8_E8M0);
                (
                    part(".weight", &[rows, cols], Some(Dtype::F8_E4M3)),
                    Some(part(&scales, &shape, exponents)),
                    None,
                )
            }
            Encoding::Integers { layout, bits, group, .. } => {
                integers(files, module, &part, (layout, bits, group), [rows, cols])?
            }
            Encoding::Float(_) | Encoding::Blocks(_) => {
                (part(module.elements, &[rows, cols], None), None, None)
            }
        };
        Ok(Self { weight, scales, offsets, number })
    }
}

/// Makes a part of a name's end, a shape and a type.
type MakePart<'a> = dyn Fn(&str, &[usize], Option<Dtype>) -> Part + 'a;

fn integers(
    files: &HuggingFace,
    module: &Module,
    part: &MakePart<'_>,
    (layout, bits, group): (IntegerLayout, u32, usize),
    [rows, cols]: [usize; 2],
) -> Result<(Part, Option<Part>, Option<Part>), ModelError> {
    let per_word = 32 / bits as usize;
    let groups = cols.checked_div(group).unwrap_or(1);
    let words = Some(Dtype::I32);
    if layout == IntegerLayout::Rows || layout == IntegerLayout::RowsWithZeros {
        // The unpacked shape, which is also in the config.
        files.files.mark_read(&format!("{}.weight_shape", module.path));
        let zeros = part(".weight_zero_point", &[rows.div_ceil(per_word), groups], words);
        return Ok((
            part(".weight_packed", &[rows, cols / per_word], words),
            Some(part(".weight_scale", &[rows, groups], None)),
            (layout == IntegerLayout::RowsWithZeros).then_some(zeros),
        ));
    }
    if rows % per_word != 0 {
        return Err(ModelError::Shape {
            name: format!("{}.qweight", module.path),
            actual: format!("packed in words of {per_word} rows"),
            expected: format!("{rows} rows, which are no whole number of words"),
        });
    }
    let shape = match layout {
        IntegerLayout::Awq => [cols, rows / per_word],
        _ => [cols / per_word, rows],
    };
    Ok((
        part(".qweight", &shape, words),
        Some(part(".scales", &[groups, rows], None)),
        Some(part(".qzeros", &[groups, rows / per_word], words)),
    ))
}

impl HuggingFace {
    /// True if a tensor is made of bytes with a sign.
    fn has_bytes(&self, name: &str) -> bool {
        self.files.get(name).is_some_and(|tensor| tensor.dtype == Dtype::I8)
    }

    /// The required shape of a tensor of scales. A single number may be a list of one, or have no
    /// axes.
    fn fp8_scale_shape(&self, name: &str, [rows, cols]: [usize; 2], shape: [usize; 2]) -> Vec<usize> {
        let count = |size: usize, unit: usize| if unit == 0 { 1 } else { size.div_ceil(unit) };
        let full = vec![count(shape[0], rows), count(shape[1], cols)];
        let significant = |shape: &[usize]| shape.iter().copied().filter(|n| *n != 1).collect::<Vec<_>>();
        match self.files.get(name) {
            Some(tensor) if significant(tensor.shape) == significant(&full) => tensor.shape.to_vec(),
            _ => full,
        }
    }
}
