//! Gates in the queue: later submissions wait at a gate, without computing, until the host opens
//! it.

use std::sync::Arc;

use thunder_compute::ComputeError;

use super::Device;

/// Gates of one device, numbered from 1 and opened in this order.
#[derive(Debug, Clone)]
pub(crate) struct Gates(Arc<raw::Gates>);

impl Gates {
    /// `None` if the driver has no gates.
    pub fn new(device: &Device) -> Option<Self> {
        Some(Self(Arc::new(raw::Gates::new(device)?)))
    }

    /// Opens a gate and all gates before it.
    pub fn open(&self, number: u64) {
        self.0.open(number);
    }
}

impl Device {
    /// Submits the recorded commands. Later submissions wait for the gate.
    pub fn submit_and_wait_at(&mut self, gates: &Gates, number: u64) -> Result<(), ComputeError> {
        self.submit()?;
        self.follow.spoil();
        match gates.0.close(number) {
            true => Ok(()),
            false => Err(self.failed("its queue takes no gates")),
        }
    }
}

#[cfg(not(target_vendor = "apple"))]
mod raw {
    use ash::vk;
    use wgpu::hal::api::Vulkan;

    use super::Device;

    /// A timeline semaphore.
    pub struct Gates {
        device: wgpu::Device,
        queue: wgpu::Queue,
        raw: ash::Device,
        semaphore: vk::Semaphore,
    }

    impl Gates {
        pub fn new(device: &Device) -> Option<Self> {
            // SAFETY: the device is not destroyed; it is asked, and makes a semaphore.
            let hal = unsafe { device.device.as_hal::<Vulkan>() }?;
            let instance = hal.shared_instance().raw_instance();
            // SAFETY: both handles belong to the device, which is alive.
            let properties = unsafe { instance.get_physical_device_properties(hal.raw_physical_device()) };
            // Every device of this version has timeline semaphores, and wgpu enables them.
            if properties.api_version < vk::API_VERSION_1_2 {
                return None;
            }
            let mut kind = vk::SemaphoreTypeCreateInfo::default().semaphore_type(vk::SemaphoreType::TIMELINE);
            let wanted = vk::SemaphoreCreateInfo::default().push_next(&mut kind);
            let raw = hal.raw_device().clone();
            // SAFETY: the device is alive, and has the feature.
            let semaphore = unsafe { raw.create_semaphore(&wanted, None) }.ok()?;
            Some(Self { device: device.device.clone(), queue: device.queue.clone(), raw, semaphore })
        }

        pub fn close(&self, number: u64) -> bool {
            // SAFETY: the queue is not destroyed; a semaphore is added to its next submission.
            let Some(hal) = (unsafe { self.queue.as_hal::<Vulkan>() }) else { return false };
            let all = vk::PipelineStageFlags::ALL_COMMANDS;
            hal.add_wait_semaphore(self.semaphore, Some(number), all);
            true
        }

        pub fn open(&self, number: u64) {
            let opened = vk::SemaphoreSignalInfo::default().semaphore(self.semaphore).value(number);
            // SAFETY: `device` keeps the semaphore alive, and numbers only grow. An error means
            // that the device is lost, which the next submission reports.
            let _ = unsafe { self.raw.signal_semaphore(&opened) };
        }
    }

    impl Drop for Gates {
        fn drop(&mut self) {
            // SAFETY: the queue is not destroyed; its pending wait is removed.
            if let Some(hal) = unsafe { self.queue.as_hal::<Vulkan>() } {
                hal.remove_wait_semaphore(self.semaphore);
            }
            // All gates are open now, so this wait is short.
            let _ = self.device.poll(wgpu::PollType::wait_indefinitely());
            // SAFETY: `device` keeps it alive, and all submissions have ended.
            unsafe { self.raw.destroy_semaphore(self.semaphore, None) };
        }
    }

    impl std::fmt::Debug for Gates {
        fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            f.debug_tuple("Gates").field(&self.semaphore).finish()
        }
    }
}

#[cfg(target_vendor = "apple")]
mod raw {
    use objc2::rc::Retained;
    use objc2::runtime::ProtocolObject;
    use objc2_metal::{MTLDevice as _, MTLSharedEvent};
    use wgpu::hal::api::Metal;

    use super::Device;

    /// An event that host and device share.
    #[derive(Debug)]
    pub struct Gates {
        queue: wgpu::Queue,
        event: Retained<ProtocolObject<dyn MTLSharedEvent>>,
    }

    // SAFETY: Metal allows several threads to use a shared event.
    unsafe impl Send for Gates {}
    // SAFETY: as above.
    unsafe impl Sync for Gates {}

    impl Gates {
        pub fn new(device: &Device) -> Option<Self> {
            // SAFETY: the device is not destroyed; it makes an event.
            let hal = unsafe { device.device.as_hal::<Metal>() }?;
            // SAFETY: the queue is not destroyed.
            let queue = unsafe { device.queue.as_hal::<Metal>() }?;
            // Without this, commands that share no buffer with the wait may overtake it.
            queue.enable_strict_event_sync().ok()?;
            let event = hal.raw_device().newSharedEvent()?;
            Some(Self { queue: device.queue.clone(), event })
        }

        pub fn close(&self, number: u64) -> bool {
            // SAFETY: the queue is not destroyed; its next submission gets an event to wait for.
            let Some(hal) = (unsafe { self.queue.as_hal::<Metal>() }) else { return false };
            hal.add_wait_event(self.event.clone(), number);
            true
        }

        pub fn open(&self, number: u64) {
            self.event.setSignaledValue(number);
        }
    }
}
