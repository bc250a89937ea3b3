//! The size of a device's memory, which only the drivers' own interfaces report.

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

/// Metal's recommended working set: what a GPU may use without memory being compressed or swapped.
/// `sysctl iogpu.wired_limit_mb` raises it.
#[cfg(target_vendor = "apple")]
pub(crate) fn device_bytes(adapter: &Adapter) -> Option<u64> {
    use objc2_metal::MTLDevice as _;

    // SAFETY: the adapter is not destroyed; only its properties are read.
    let adapter = unsafe { adapter.as_hal::<wgpu::hal::api::Metal>() }?;
    Some(adapter.raw_device().recommendedMaxWorkingSetSize())
}
