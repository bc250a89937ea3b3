//! SPIR-V for what WGSL cannot say: cooperative matrices of bytes, and products of matrices by
//! elements.
//!
//! A kernel that needs them is written with what WGSL has, and its translation is changed:
//!
//! - A factor, 16 × 16, becomes a matrix of bytes with 32 columns (the left one) or rows (the right
//!   one). In memory nothing changes: loads name an address and a distance.
//! - A product of matrices has i32 sums, which are converted to f32. The matrix that it is added to
//!   is zero.
//! - The difference of two matrices becomes their product by elements. If it is the second operand
//!   of a sum, it is rounded before it is added; the first one may be fused with the addition.
//! - Drivers are asked not to unroll loops: NVIDIA's repeats a loop's text eight times, which then
//!   exceeds the instruction cache.
//!
//! Numbers of instructions and operands: the SPIR-V specification, and SPV_KHR_cooperative_matrix.

use std::collections::{HashMap, HashSet};

use naga::Module;
use naga::back::spv;
use naga::valid::{Capabilities, ModuleInfo, ShaderStages, SubgroupOperationSet, ValidationFlags, Validator};

const OP_CAPABILITY: u32 = 17;
const OP_TYPE_INT: u32 = 21;
const OP_CONSTANT: u32 = 43;
const OP_CONSTANT_NULL: u32 = 46;
const OP_DECORATE: u32 = 71;
const OP_CONVERT_S_TO_F: u32 = 111;
const OP_F_ADD: u32 = 129;
const OP_F_SUB: u32 = 131;
const OP_F_MUL: u32 = 133;
const OP_LOOP_MERGE: u32 = 246;
const OP_TYPE_MATRIX: u32 = 4456;
const OP_MULTIPLY_ADD: u32 = 4459;

const CAPABILITY_INT8: u32 = 39;
const NO_CONTRACTION: u32 = 42;
const DONT_UNROLL: u32 = 2;
/// Both factors, the third operand and the result are signed.
const ALL_SIGNED: u32 = 0xf;
/// Uses of a matrix.
const LEFT: u32 = 0;
const RIGHT: u32 = 1;

/// Columns of a left factor of bytes.
pub(crate) const DEPTH: u32 = 32;

/// Words before the first instruction; the fourth is the bound of all ids.
const HEADER: usize = 5;
const BOUND: usize = 3;

/// Parses and validates a kernel.
pub(crate) fn parsed(text: &str) -> Result<(Module, ModuleInfo), String> {
    let module = naga::front::wgsl::parse_str(text).map_err(|error| error.emit_to_string(text))?;
    let info = Validator::new(ValidationFlags::all(), Capabilities::all())
        .subgroup_stages(ShaderStages::COMPUTE)
        .subgroup_operations(SubgroupOperationSet::all())
        .validate(&module)
        .map_err(|error| error.emit_to_string(text))?;
    Ok((module, info))
}

/// Translates a kernel and changes its matrices.
pub(crate) fn with_bytes(text: &str) -> Result<Vec<u32>, String> {
    let (module, info) = parsed(text)?;
    let options = spv::Options {
        lang_version: (1, 3),
        flags: spv::WriterFlags::empty(),
        zero_initialize_workgroup_memory: spv::ZeroInitializeWorkgroupMemoryMode::None,
        force_loop_bounding: false,
        ..Default::default()
    };
    let words = spv::write_vec(&module, &info, &options, None).map_err(|error| error.to_string())?;
    Words::read(&words)?.changed()
}

/// A module's instructions: each with its number and its operands.
struct Words {
    header: [u32; HEADER],
    instructions: Vec<(u32, Vec<u32>)>,
}

impl Words {
    fn read(words: &[u32]) -> Result<Self, String> {
        let (header, mut rest) = words.split_first_chunk().ok_or("a module without a header")?;
        let mut instructions = Vec::new();
        while let Some(first) = rest.first() {
            let count = (first >> 16) as usize;
            let operands = rest.get(1..count).ok_or("an instruction that is cut off")?;
            instructions.push((first & 0xffff, operands.to_vec()));
            rest = &rest[count..];
        }
        Ok(Self { header: *header, instructions })
    }

    fn id(&mut self) -> u32 {
        self.header[BOUND] += 1;
        self.header[BOUND] - 1
    }

    /// The result of the first such instruction that ends with these operands.
    fn find(&self, number: u32, operands: &[u32]) -> Option<u32> {
        let is_it = |(n, all): &&(u32, Vec<u32>)| *n == number && all.get(1..) == Some(operands);
        self.instructions.iter().find(is_it).map(|(_, all)| all[0])
    }

    fn changed(mut self) -> Result<Vec<u32>, String> {
        let missing = |what: &str| format!("the translation has no {what}");
        let word = self.find(OP_TYPE_INT, &[32, 0]).ok_or_else(|| missing("u32"))?;
        let int = self.find(OP_TYPE_INT, &[32, 1]).unwrap_or_else(|| self.id());
        let (byte, depth) = (self.id(), self.id());
        // A matrix of i32 and its zero for each matrix of f32.
        let mut sums = HashMap::new();
        let constants: HashMap<u32, u32> = self
            .instructions
            .iter()
            .filter(|(number, all)| *number == OP_CONSTANT && all[0] == word)
            .map(|(_, all)| (all[1], all[2]))
            .collect();
        let mut products = HashSet::new();
        let mut exact = Vec::new();
        let mut out: Vec<(u32, Vec<u32>)> = Vec::with_capacity(self.instructions.len());
        let (mut has_types, mut has_int) = (false, false);
        for (number, operands) in std::mem::take(&mut self.instructions) {
            match (number, &operands[..]) {
                (OP_TYPE_MATRIX, &[result, _, scope, rows, columns, role]) => {
                    if !has_types {
                        has_types = true;
                        out.push((OP_TYPE_INT, vec![byte, 8, 1]));
                        if !has_int {
                            out.push((OP_TYPE_INT, vec![int, 32, 1]));
                        }
                        out.push((OP_CONSTANT, vec![word, depth, DEPTH]));
                    }
                    match constants.get(&role) {
                        Some(&LEFT) => out.push((number, vec![result, byte, scope, rows, depth, role])),
                        Some(&RIGHT) => out.push((number, vec![result, byte, scope, depth, columns, role])),
                        _ => {
                            let (ints, zero) = (self.id(), self.id());
                            out.push((number, operands));
                            out.push((number, vec![ints, int, scope, rows, columns, role]));
                            out.push((OP_CONSTANT_NULL, vec![ints, zero]));
                            sums.insert(result, (ints, zero));
                        }
                    }
                }
                // A later declaration of the type that was needed earlier.
                (OP_TYPE_INT, &[id, ..]) if id == int && has_types => {}
                (OP_TYPE_INT, &[id, ..]) if id == int => {
                    has_int = true;
                    out.push((number, operands));
                }
                (OP_LOOP_MERGE, &[merge, next, _]) => out.push((number, vec![merge, next, DONT_UNROLL])),
                (OP_MULTIPLY_ADD, &[kind, result, a, b, ..]) => {
                    let (ints, zero) = *sums.get(&kind).ok_or_else(|| missing("type of a product"))?;
                    let sum = self.id();
                    out.push((number, vec![ints, sum, a, b, zero, ALL_SIGNED]));
                    out.push((OP_CONVERT_S_TO_F, vec![kind, result, sum]));
                }
                (OP_F_SUB, &[kind, result, ..]) if sums.contains_key(&kind) => {
                    products.insert(result);
                    out.push((OP_F_MUL, operands));
                }
                (OP_F_ADD, &[kind, _, _, second]) if sums.contains_key(&kind) => {
                    exact.extend(products.contains(&second).then_some(second));
                    out.push((number, operands));
                }
                _ => out.push((number, operands)),
            }
        }
        let first_decoration =
            out.iter().position(|(number, _)| *number == OP_DECORATE).ok_or_else(|| missing("decoration"))?;
        let decorations = exact.into_iter().map(|id| (OP_DECORATE, vec![id, NO_CONTRACTION]));
        out.splice(first_decoration..first_decoration, decorations);
        out.insert(0, (OP_CAPABILITY, vec![CAPABILITY_INT8]));
        let mut words = self.header.to_vec();
        for (number, operands) in out {
            words.push((operands.len() as u32 + 1) << 16 | number);
            words.extend(operands);
        }
        Ok(words)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::Format;
    use crate::kernel::{Batch, Input, Kernel};

    #[test]
    fn matrices_become_those_of_bytes_and_differences_products() {
        let format = Format::all().into_iter().find(|format| Batch::exists(*format, Input::Bytes)).unwrap();
        let kernel = Kernel::Batch(Batch::all(format, Input::Bytes, false)[1]);
        let words = kernel.spirv(&kernel.source()).unwrap().unwrap();
        let Words { instructions, .. } = Words::read(&words).unwrap();
        let all = |number: u32| -> Vec<&[u32]> {
            instructions.iter().filter(|(n, _)| *n == number).map(|(_, all)| &all[..]).collect()
        };
        let byte = all(OP_TYPE_INT).iter().find(|all| all[1] == 8).unwrap()[0];
        let sums: Vec<u32> = all(OP_CONVERT_S_TO_F).iter().map(|all| all[2]).collect();
        assert_eq!(all(OP_TYPE_MATRIX).iter().filter(|all| all[1] == byte).count(), 2, "left and right");
        // Two blocks ahead, with 2 x 2 matrices each.
        assert_eq!(all(OP_MULTIPLY_ADD).len(), 8);
        for product in all(OP_MULTIPLY_ADD) {
            assert!(product.len() == 6 && product[5] == ALL_SIGNED && sums.contains(&product[1]));
        }
        let of_sums = all(OP_CONVERT_S_TO_F)[0][0];
        assert!(all(OP_F_SUB).iter().all(|all| all[0] != of_sums), "a difference of matrices is left");
        let exact = all(OP_DECORATE).iter().filter(|all| all[1] == NO_CONTRACTION).count();
        assert_eq!(exact, 8, "offsets times sums are rounded before they are added");
        assert!(all(OP_LOOP_MERGE).iter().all(|all| all[2] == DONT_UNROLL));
    }

    #[test]
    fn words_that_are_no_module_are_an_error() {
        for words in [&[][..], &[0; 4], &[0, 0, 0, 0, 0, 0], &[0, 0, 0, 0, 0, 3 << 16 | 17, 1]] {
            assert!(Words::read(words).is_err(), "{words:?}");
        }
        let missing = Words::read(&[0; 5]).unwrap().changed();
        assert!(missing.is_err_and(|error| error.contains("u32")));
    }
}
