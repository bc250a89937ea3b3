//! Opening a device.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
#[cfg(test)]
use std::time::Duration;

use thunder_compute::ComputeError;
use wgpu::Features;

use super::soon::Soon;
use super::{Device, FIRST_DISPATCHES, import};
use crate::adapter::{Found, MATRIX_FEATURES, block_on};
use crate::ahead::Ahead;
use crate::follow::Follow;
use crate::kernel::Draw;
use crate::profile::{TIMING, Timer};

/// Lets kernels read host memory without caches.
const DECORATIONS: Features =
    Features::MEMORY_DECORATION_COHERENT.union(Features::MEMORY_DECORATION_VOLATILE);

impl Device {
    /// Opens a device with the features that kernels can use. `shares`: include those of sums over
    /// ranks in memory that both host and device access.
    pub fn open(found: &Found, shares: bool) -> Result<Self, ComputeError> {
        let matrix_side = found.matrix_side();
        let mut wanted =
            Features::IMMEDIATES | Features::SUBGROUP | Features::MAPPABLE_PRIMARY_BUFFERS | TIMING;
        if shares {
            wanted |= DECORATIONS;
            if found.info.api == "metal" {
                wanted |= Features::PASSTHROUGH_SHADERS;
            }
        }
        let multiplies_bytes = found.multiplies_bytes();
        if multiplies_bytes {
            wanted |= Features::PASSTHROUGH_SHADERS;
        }
        let mut experimental = wgpu::ExperimentalFeatures::disabled();
        if matrix_side.is_some() {
            wanted |= MATRIX_FEATURES;
            // SAFETY: cooperative matrices are the only experimental feature that is requested.
            // Each kernel that uses them is compared with the CPU before its results are used.
            experimental = unsafe { wgpu::ExperimentalFeatures::enabled() };
        }
        let limits = found.adapter.limits();
        let name = found.info.name.clone();
        let failed = |reason: String| ComputeError::Device { device: found.info.name.clone(), reason };
        let (max_binding_bytes, max_groups) =
            (limits.max_storage_buffer_binding_size, limits.max_compute_workgroups_per_dimension);
        let draw = Draw::of(&limits, &found.info.api);
        let description = wgpu::DeviceDescriptor {
            label: None,
            required_features: wanted & found.adapter.features(),
            required_limits: limits,
            experimental_features: experimental,
            memory_hints: wgpu::MemoryHints::Performance,
            trace: wgpu::Trace::Off,
        };
        let passes_through = description.required_features.contains(Features::PASSTHROUGH_SHADERS);
        let speaks_metal = passes_through && found.info.api == "metal";
        let importing = if shares { import::open(&found.adapter, &description) } else { None };
        let imports = importing.is_some() && description.required_features.contains(DECORATIONS);
        let (device, queue) = match importing {
            Some(both) => both,
            None => block_on(found.adapter.request_device(&description))
                .map_err(|error| failed(error.to_string()))?,
        };
        let failure = Arc::new(Mutex::new(None));
        let note = |failure: &Mutex<Option<String>>, reason: String| {
            failure.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(reason);
        };
        let of_error = Arc::clone(&failure);
        device.on_uncaptured_error(Arc::new(move |error: wgpu::Error| note(&of_error, error.to_string())));
        let of_loss = Arc::clone(&failure);
        device.set_device_lost_callback(move |reason, message| {
            note(&of_loss, format!("the device was lost ({reason:?}): {message}"));
        });
        Ok(Self {
            name,
            device,
            queue,
            max_binding_bytes,
            is_discrete: found.info.kind == "discrete",
            speaks_metal,
            max_groups,
            matrix_side,
            multiplies_bytes,
            draw,
            imports,
            cores: None,
            imported: Vec::new(),
            pipelines: HashMap::new(),
            soon: Soon::default(),
            bindings: HashMap::new(),
            encoder: None,
            pass: None,
            recorded: 0,
            dispatches: 0,
            share: 0.0,
            #[cfg(test)]
            work: 0.0,
            most_dispatches: FIRST_DISPATCHES,
            #[cfg(test)]
            compiled: (0, Duration::ZERO),
            #[cfg(test)]
            submissions: 0,
            followed: 0,
            reads: 0,
            ahead: Ahead::default(),
            follow: Follow::default(),
            numbering: None,
            earlier: [None, None],
            tables: None,
            new_tables: Vec::new(),
            reports: None,
            staging: Vec::new(),
            upload_bytes: 0,
            packers: None,
            next_id: 0,
            timer: Timer::default(),
            failure,
            #[cfg(test)]
            sabotage: None,
        })
    }
}
