//! What only the drivers' own interfaces report: the size of a device's memory, and matrices of
//! bytes.

use wgpu::Adapter;

/// Bytes that the device may use for buffers, or `None` if the driver does not report it.
#[cfg(not(target_vendor = "apple"))]
pub(crate) fn device_bytes(adapter: &Adapter) -> Option<u64> {
    use ash::vk::MemoryHeapFlags;

    // SAFETY: the adapter is not destroyed; only its properties are read.
    let adapter = unsafe { adapter.as_hal::<wgpu::hal::api::Vulkan>() }?;
    let instance = adapter.shared_instance().raw_instance();
    // SAFETY: both handles belong to the adapter, which is alive.
    let properties = unsafe { instance.get_physical_device_memory_properties(adapter.raw_physical_device()) };
    let heaps = properties.memory_heaps_as_slice().iter();
    heaps.filter(|heap| heap.flags.contains(MemoryHeapFlags::DEVICE_LOCAL)).map(|heap| heap.size).max()
}

/// Bytes that this process may use of the device's memory now, next to other processes, or `None`
/// if the driver does not report it (`VK_EXT_memory_budget`).
#[cfg(not(target_vendor = "apple"))]
pub(crate) fn available_bytes(adapter: &Adapter) -> Option<u64> {
    use ash::vk::{
        MemoryHeapFlags, PhysicalDeviceMemoryBudgetPropertiesEXT, PhysicalDeviceMemoryProperties2,
    };

    // SAFETY: the adapter is not destroyed; only its properties are read.
    let adapter = unsafe { adapter.as_hal::<wgpu::hal::api::Vulkan>() }?;
    let (instance, device) = (adapter.shared_instance().raw_instance(), adapter.raw_physical_device());
    // SAFETY: both handles belong to the adapter, which is alive.
    let version = unsafe { instance.get_physical_device_properties(device) }.api_version;
    // SAFETY: as above.
    let extensions = unsafe { instance.enumerate_device_extension_properties(device) }.ok()?;
    if version < ash::vk::API_VERSION_1_1 {
        return None;
    }
    let is_budget = |name: &std::ffi::CStr| name == ash::ext::memory_budget::NAME;
    if !extensions.iter().any(|extension| extension.extension_name_as_c_str().is_ok_and(is_budget)) {
        return None;
    }
    let mut budget = PhysicalDeviceMemoryBudgetPropertiesEXT::default();
    let mut all = PhysicalDeviceMemoryProperties2::default().push_next(&mut budget);
    // SAFETY: the device has Vulkan 1.1 and the extension of the chained structure.
    unsafe { instance.get_physical_device_memory_properties2(device, &mut all) };
    let heaps = all.memory_properties;
    let heaps = heaps.memory_heaps_as_slice().iter().zip(budget.heap_budget);
    heaps.filter(|(heap, _)| heap.flags.contains(MemoryHeapFlags::DEVICE_LOCAL)).map(|(_, bytes)| bytes).max()
}

/// The same for Metal, which does not report what other processes use.
#[cfg(target_vendor = "apple")]
pub(crate) fn available_bytes(adapter: &Adapter) -> Option<u64> {
    device_bytes(adapter)
}

/// Metal's recommended working set: what a GPU may use without memory being compressed or swapped.
/// `sysctl iogpu.wired_limit_mb` raises it.
#[cfg(target_vendor = "apple")]
pub(crate) fn device_bytes(adapter: &Adapter) -> Option<u64> {
    use objc2_metal::MTLDevice as _;

    // SAFETY: the adapter is not destroyed; only its properties are read.
    let adapter = unsafe { adapter.as_hal::<wgpu::hal::api::Metal>() }?;
    Some(adapter.raw_device().recommendedMaxWorkingSetSize())
}

/// Whether a device has the matrices that [`crate::spirv`] makes, for subgroups of 32 lanes: signed
/// bytes, 16 × 32 and 32 × 16, with sums in i32.
#[cfg(not(target_vendor = "apple"))]
pub(crate) fn multiplies_bytes(adapter: &Adapter) -> bool {
    use ash::khr::cooperative_matrix;
    use ash::vk::{ComponentTypeKHR as Kind, ScopeKHR};

    // SAFETY: the adapter is not destroyed; only its properties are read.
    let Some(adapter) = (unsafe { adapter.as_hal::<wgpu::hal::api::Vulkan>() }) else { return false };
    if !adapter.physical_device_capabilities().supports_extension(cooperative_matrix::NAME) {
        return false;
    }
    let shared = adapter.shared_instance();
    let instance = cooperative_matrix::Instance::new(shared.entry(), shared.raw_instance());
    // SAFETY: the handle belongs to the adapter, which is alive and has the extension.
    let all =
        unsafe { instance.get_physical_device_cooperative_matrix_properties(adapter.raw_physical_device()) };
    all.is_ok_and(|all| {
        all.iter().any(|matrix| {
            [matrix.m_size, matrix.n_size, matrix.k_size] == [16, 16, crate::spirv::DEPTH]
                && [matrix.a_type, matrix.b_type] == [Kind::SINT8; 2]
                && [matrix.c_type, matrix.result_type] == [Kind::SINT32; 2]
                && matrix.scope == ScopeKHR::SUBGROUP
        })
    })
}

/// Metal has no such matrices.
#[cfg(target_vendor = "apple")]
pub(crate) fn multiplies_bytes(_adapter: &Adapter) -> bool {
    false
}
