//! Translates every kernel by naga's writers for Metal and SPIR-V, and checks what they do not.

use naga::back::{msl, spv};

use crate::device::MAX_ARGUMENT_BYTES;
use crate::kernel::{Kernel, Shape};
use crate::spirv::parsed;

/// Workgroup memory of Apple's GPUs and of most others, in bytes.
const WORKGROUP_BYTES: u32 = 32 << 10;
/// Workgroup memory of GPUs with matrices of 16 columns, in bytes.
const MATRIX_WORKGROUP_BYTES: u32 = 48 << 10;
/// Of workgroups that take up to this, two run on a multiprocessor of NVIDIA's, in bytes:
/// docs/lab/2026-11-27-matrices.md.
const SHARED_WORKGROUP_BYTES: u32 = 24 << 10;
/// Threads per workgroup that every GPU supports.
const MAX_THREADS: u32 = 1024;
/// Maximum buffers of a kernel: Metal has 31, and wgpu needs some itself.
const MAX_BUFFERS: usize = 12;

#[test]
fn every_kernel_translates_to_metal_and_spirv() {
    let kernels = Kernel::all();
    assert!(kernels.len() > 300, "only {} kernels", kernels.len());
    // Names in Metal that naga uses for kernels.
    for kernel in kernels {
        let text = kernel.source();
        if let Err(reason) = translate(&kernel, &text) {
            panic!("{kernel:?}: {reason}\n{text}");
        }
    }
}

fn translate(kernel: &Kernel, text: &str) -> Result<(), String> {
    let side = match kernel {
        Kernel::Matrices(form) => Some(form.tile().side),
        Kernel::Batch(_) | Kernel::AttendMatrices(_) | Kernel::AttendLatentMatrices(_) => Some(16),
        Kernel::PeakMatrices { side } => Some(*side),
        _ => None,
    };
    // Kernels that need features that not all devices have.
    let allowed: &[&str] = match kernel {
        Kernel::Batch(_)
        | Kernel::Matrices(_)
        | Kernel::AttendMatrices(_)
        | Kernel::AttendLatentMatrices(_)
        | Kernel::PeakMatrices { .. } => &["enable f16;", "enable wgpu_cooperative_matrix;", "coopLoad"],
        Kernel::Halve => &["enable f16;"],
        Kernel::Relay(_) => &["@volatile"],
        _ => &[],
    };
    let rest = allowed.iter().fold(text.to_owned(), |text, word| text.replace(word, ""));
    // Naga refuses these for Metal, gives them wrong types, or drops them silently.
    for word in ["enable ", "bitcast<vec2<f16>>", "bitcast<vec4<f16>>", "@volatile", "coopLoad", "$"] {
        if rest.contains(word) {
            return Err(format!("contains '{word}'"));
        }
    }
    let (module, info) = parsed(text)?;
    sizes(kernel, text, &module)?;
    let options = spv::Options { lang_version: (1, 3), ..Default::default() };
    spv::write_vec(&module, &info, &options, None).map_err(|error| format!("SPIR-V: {error}"))?;
    if let Some(Err(reason)) = kernel.spirv(text) {
        return Err(format!("SPIR-V: {reason}"));
    }
    if side == Some(16) || matches!(kernel, Kernel::Relay(_)) {
        // Metal's matrices have 8 columns, and it cannot import host memory.
        return Ok(());
    }
    let options = msl::Options { lang_version: (2, 4), fake_missing_bindings: true, ..Default::default() };
    let (metal, _) = msl::write_string(&module, &info, &options, &msl::PipelineOptions::default())
        .map_err(|error| format!("Metal: {error}"))?;
    let is_known = !metal.contains("simdgroup_half16x16") && metal.contains("kernel void");
    if is_known { Ok(()) } else { Err("Metal's compiler would refuse it".to_owned()) }
}

/// Checks limits of devices, which no writer does.
fn sizes(kernel: &Kernel, text: &str, module: &naga::Module) -> Result<(), String> {
    let of = |space: naga::AddressSpace| {
        let globals = module.global_variables.iter().filter(move |(_, global)| global.space == space);
        globals.map(|(_, global)| module.types[global.ty].inner.size(module.to_ctx())).sum::<u32>()
    };
    // A driver of NVIDIA's loads matrices in units of 16 bytes regardless of the variables'
    // alignment.
    let has_matrices = text.contains("coopLoad");
    let shared_sizes =
        module.global_variables.iter().filter(|(_, global)| global.space == naga::AddressSpace::WorkGroup);
    for (_, global) in shared_sizes.filter(|_| has_matrices) {
        let size = module.types[global.ty].inner.size(module.to_ctx());
        if !size.is_multiple_of(16) {
            return Err(format!("{:?} has {size} bytes, not a multiple of 16", global.name));
        }
    }
    let (shared, arguments) = (of(naga::AddressSpace::WorkGroup), of(naga::AddressSpace::Immediate));
    let buffers = module.global_variables.iter().filter(|(_, global)| global.binding.is_some()).count();
    let [x, y, z] = module.entry_points[0].workgroup_size;
    let most = match kernel {
        Kernel::Batch(_) => SHARED_WORKGROUP_BYTES,
        Kernel::Matrices(form) if form.shape == Shape::Middle => SHARED_WORKGROUP_BYTES,
        Kernel::Matrices(form) if form.tile().side == 16 => MATRIX_WORKGROUP_BYTES,
        Kernel::AttendMatrices(form) if !form.by_columns => SHARED_WORKGROUP_BYTES,
        Kernel::AttendMatrices(_) | Kernel::AttendLatentMatrices(_) => MATRIX_WORKGROUP_BYTES,
        _ => WORKGROUP_BYTES,
    };
    let within = shared <= most
        && arguments <= MAX_ARGUMENT_BYTES
        && x * y * z <= MAX_THREADS
        && buffers <= MAX_BUFFERS;
    if buffers != kernel.bindings().len() {
        return Err(format!("{buffers} buffers, but it is bound to {}", kernel.bindings().len()));
    }
    if within {
        Ok(())
    } else {
        Err(format!("{shared} bytes, {arguments} bytes of arguments, {buffers} buffers"))
    }
}
