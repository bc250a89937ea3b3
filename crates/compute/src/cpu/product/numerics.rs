//! How a product computes: the format in which activations are multiplied with weights, and the
//! instructions.

use crate::cpu::isa::Isa;
use crate::cpu::layout::matrix::Linear;
#[cfg(target_arch = "x86_64")]
use crate::cpu::product::amx;
use crate::cpu::product::quantize::Activations;
use crate::source::{Float, PackedFormat};

/// The format in which activations enter a product.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::cpu) enum ActivationFormat {
    F32,
    Bf16,
    /// Quantized to integers, with a sum for each `group` columns.
    Quantized {
        group: usize,
    },
}

/// The inputs of the choice of a format.
#[derive(Debug, Clone, Copy)]
pub(in crate::cpu) struct Numerics {
    pub isa: Isa,
    pub activations: Activations,
    /// True for prompt tokens, which may be rounded to bf16.
    pub prompts: bool,
}

impl Numerics {
    /// The format of rows that are multiplied with weights of this encoding.
    pub fn format(self, encoding: PackedFormat) -> ActivationFormat {
        let Self { isa, activations, prompts } = self;
        match (activations, encoding) {
            _ if prompts && activations.allows_bf16() && takes_bf16(isa, encoding) => ActivationFormat::Bf16,
            (Activations::F32, _) | (_, PackedFormat::Float(_)) => ActivationFormat::F32,
            (_, PackedFormat::Affine { group, .. }) => ActivationFormat::Quantized { group },
        }
    }

    /// True if all parts of a matrix use these rows in bf16.
    pub fn bf16_only(self, w: &Linear) -> bool {
        w.parts.iter().all(|part| self.format(part.format) == ActivationFormat::Bf16)
    }
}

/// True if prompts are multiplied with weights of this encoding in bf16. Without a matrix unit,
/// bf16 is faster only if integers are impossible.
fn takes_bf16(isa: Isa, encoding: PackedFormat) -> bool {
    match (isa, encoding) {
        (_, PackedFormat::Float(Float::F32)) => false,
        #[cfg(target_arch = "x86_64")]
        (Isa::Amx, _) | (Isa::Avx512Bf16, PackedFormat::Float(_)) => true,
        _ => false,
    }
}

/// True if this many quantized rows, each of `planes` bytes a number, are multiplied by tiles.
#[cfg_attr(not(target_arch = "x86_64"), expect(unused_variables, reason = "no matrix unit is used there"))]
pub(in crate::cpu) fn takes_tiles(isa: Isa, rows: usize, planes: usize) -> bool {
    match isa {
        #[cfg(target_arch = "x86_64")]
        Isa::Amx => amx::exact_pays(rows, planes),
        _ => false,
    }
}
