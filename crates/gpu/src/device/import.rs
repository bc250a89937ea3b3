//! Host memory that several devices import (VK_EXT_external_memory_host).

use std::sync::Arc;

use thunder_collectives::SharedMemory;

pub(super) use raw::open;

use super::Device;
use crate::buffer::Memory;

impl Device {
    /// A buffer of the first `bytes` bytes of `shared`, or why the driver refuses.
    pub fn import(&mut self, shared: &Arc<SharedMemory>, bytes: usize) -> Result<Memory, String> {
        if !self.imports {
            return Err("its driver does not import the host's memory".to_owned());
        }
        // SAFETY: `imported` keeps the memory, and is dropped after all buffers.
        let buffer = unsafe { raw::import(&self.device, shared, bytes)? };
        self.imported.push(Arc::clone(shared));
        self.next_id += 1;
        Ok(Memory::new(buffer, self.next_id))
    }
}

#[cfg(not(target_vendor = "apple"))]
mod raw {
    use ash::{ext, vk};
    use thunder_collectives::SharedMemory;
    use wgpu::hal::api::Vulkan;
    use wgpu::{Adapter, BufferDescriptor, BufferUsages, DeviceDescriptor, Queue};

    const KIND: vk::ExternalMemoryHandleTypeFlags = vk::ExternalMemoryHandleTypeFlags::HOST_ALLOCATION_EXT;

    /// Opens a device that can import host memory; `None` if its driver cannot.
    pub(in super::super) fn open(
        adapter: &Adapter,
        description: &DeviceDescriptor<'_>,
    ) -> Option<(wgpu::Device, Queue)> {
        // SAFETY: the adapter is not destroyed.
        let hal = unsafe { adapter.as_hal::<Vulkan>() }?;
        if !hal.physical_device_capabilities().supports_extension(ext::external_memory_host::NAME) {
            return None;
        }
        let (features, limits) = (description.required_features, &description.required_limits);
        // SAFETY: the request contains only what the adapter has, as for any device, and one
        // extension that the driver lists.
        let opened = unsafe {
            hal.open_with_callback(
                features,
                limits,
                &description.memory_hints,
                Some(Box::new(|arguments| arguments.extensions.push(ext::external_memory_host::NAME))),
            )
        };
        drop(hal);
        // SAFETY: the device was just opened, by this adapter and with these features.
        unsafe { adapter.create_device_from_hal::<Vulkan>(opened.ok()?, description) }.ok()
    }

    /// A buffer of the first `bytes` bytes of `shared`, or why the driver refuses.
    ///
    /// # Safety
    ///
    /// `shared` must outlive the buffer.
    pub unsafe fn import(
        device: &wgpu::Device,
        shared: &SharedMemory,
        bytes: usize,
    ) -> Result<wgpu::Buffer, String> {
        // SAFETY: the device is not destroyed.
        let hal = unsafe { device.as_hal::<Vulkan>() }.ok_or("it is no Vulkan device")?;
        let (raw, instance) = (hal.raw_device(), hal.shared_instance().raw_instance());
        let mut host = vk::PhysicalDeviceExternalMemoryHostPropertiesEXT::default();
        let mut properties = vk::PhysicalDeviceProperties2::default().push_next(&mut host);
        // SAFETY: both handles belong to the device, which is alive.
        unsafe { instance.get_physical_device_properties2(hal.raw_physical_device(), &mut properties) };
        let (address, unit) = (shared.address(), host.min_imported_host_pointer_alignment);
        if !(address as u64).is_multiple_of(unit) || !(bytes as u64).is_multiple_of(unit) {
            return Err(format!("it imports memory in units of {unit} bytes"));
        }
        let extension = ext::external_memory_host::Device::new(instance, raw);
        let mut pointer = vk::MemoryHostPointerPropertiesEXT::default();
        let mut external = vk::ExternalMemoryBufferCreateInfo::default().handle_types(KIND);
        let wanted = vk::BufferCreateInfo::default()
            .size(bytes as u64)
            .usage(vk::BufferUsageFlags::STORAGE_BUFFER)
            .push_next(&mut external);
        // SAFETY: the memory is mapped for at least `bytes` bytes as long as `shared`, which
        // outlives the buffer. Handles are used after their creation, and destroyed if a later
        // call fails.
        let (buffer, memory, size) = unsafe {
            (extension.fp().get_memory_host_pointer_properties_ext)(
                raw.handle(),
                KIND,
                address.cast(),
                &mut pointer,
            )
            .result()
            .map_err(|error| format!("its driver refuses the host's memory: {error}"))?;
            let buffer = raw.create_buffer(&wanted, None).map_err(|error| error.to_string())?;
            let needs = raw.get_buffer_memory_requirements(buffer);
            let kinds = instance.get_physical_device_memory_properties(hal.raw_physical_device());
            let allowed = needs.memory_type_bits & pointer.memory_type_bits;
            let is_coherent = |index: &u32| {
                let flags = kinds.memory_types[*index as usize].property_flags;
                allowed >> index & 1 == 1 && flags.contains(vk::MemoryPropertyFlags::HOST_COHERENT)
            };
            let bound = (0..kinds.memory_type_count).find(is_coherent).map(|index| {
                let mut import = vk::ImportMemoryHostPointerInfoEXT::default()
                    .handle_type(KIND)
                    .host_pointer(address.cast());
                let wanted = vk::MemoryAllocateInfo::default()
                    .allocation_size(bytes as u64)
                    .memory_type_index(index)
                    .push_next(&mut import);
                let memory = raw.allocate_memory(&wanted, None)?;
                raw.bind_buffer_memory(buffer, memory, 0).inspect_err(|_| raw.free_memory(memory, None))?;
                Ok::<_, vk::Result>(memory)
            });
            match bound {
                Some(Ok(memory)) => (buffer, memory, needs.size),
                failed => {
                    raw.destroy_buffer(buffer, None);
                    return Err(format!("its driver imports no coherent memory of the host: {failed:?}"));
                }
            }
        };
        drop(hal);
        // SAFETY: wgpu owns buffer and memory from now on. The memory counts as initialized.
        Ok(unsafe {
            let owned = wgpu::hal::vulkan::Buffer::from_raw_managed(buffer, memory, 0, size);
            let description = BufferDescriptor {
                label: None,
                size: bytes as u64,
                usage: BufferUsages::STORAGE,
                mapped_at_creation: false,
            };
            device.create_buffer_from_hal::<Vulkan>(owned, &description)
        })
    }
}

#[cfg(target_vendor = "apple")]
mod raw {
    use thunder_collectives::SharedMemory;
    use wgpu::{Adapter, DeviceDescriptor, Queue};

    /// Metal imports no memory: ranks on a Mac share its GPU, so they do not exchange this way.
    pub(in super::super) fn open(_: &Adapter, _: &DeviceDescriptor<'_>) -> Option<(wgpu::Device, Queue)> {
        None
    }

    /// # Safety
    ///
    /// None is needed; it is that of the other systems.
    pub unsafe fn import(_: &wgpu::Device, _: &SharedMemory, _: usize) -> Result<wgpu::Buffer, String> {
        Err("Metal imports no memory".to_owned())
    }
}
