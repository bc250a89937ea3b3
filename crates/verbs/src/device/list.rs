//! The devices of this machine.

use super::context::Context;
use crate::error::{Error, Result};
use crate::library::Library;
use crate::profile::Profile;
use crate::sys::*;
use std::ffi::CStr;
use std::ptr::NonNull;
use std::sync::Arc;

/// The devices that the library found when this list was made.
pub struct DeviceList {
    library: &'static Library,
    raw: NonNull<*mut ibv_device>,
    names: Vec<String>,
}

impl DeviceList {
    /// Lists the devices. An empty list is not an error; `doctor` explains it.
    pub fn get() -> Result<Self> {
        let library = Library::get()?;
        let mut count = 0;
        // SAFETY: the call writes `count`; the list it returns is freed in drop.
        let raw = unsafe { (library.ibv_get_device_list)(&mut count) };
        let raw = NonNull::new(raw).ok_or_else(|| Error::last_os("ibv_get_device_list", library.path))?;
        let names = (0..usize::try_from(count).unwrap_or(0))
            // SAFETY: the list has `count` devices, and each name is a C string.
            .map(|i| unsafe { CStr::from_ptr((library.ibv_get_device_name)(*raw.as_ptr().add(i))) })
            .map(|name| name.to_string_lossy().into_owned())
            .collect();
        Ok(Self { library, raw, names })
    }

    /// The devices' names, in the library's order.
    pub fn names(&self) -> &[String] {
        &self.names
    }

    /// Opens a device by its name.
    pub fn open(&self, name: &str, profile: Profile) -> Result<Arc<Context>> {
        let Some(index) = self.names.iter().position(|have| have == name) else {
            let present = if self.names.is_empty() { "none".to_string() } else { self.names.join(", ") };
            return Err(Error::NoDevice { wanted: name.to_string(), present });
        };
        // SAFETY: `index` is in the list, which lives until drop. By the ABI, a context may outlive
        // the list.
        let raw = unsafe { (self.library.ibv_open_device)(*self.raw.as_ptr().add(index)) };
        let raw = NonNull::new(raw).ok_or_else(|| Error::last_os("ibv_open_device", name))?;
        Context::new(self.library, raw, name, profile).map(Arc::new)
    }
}

impl Drop for DeviceList {
    fn drop(&mut self) {
        // SAFETY: the list comes from ibv_get_device_list and is freed once.
        unsafe { (self.library.ibv_free_device_list)(self.raw.as_ptr()) };
    }
}

impl Context {
    /// Opens a device by name, with this system's profile.
    pub fn open(name: &str) -> Result<Arc<Self>> {
        DeviceList::get()?.open(name, Profile::native())
    }
}
