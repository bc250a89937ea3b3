//! Lists the machine's GPUs and chooses one.

use std::pin::pin;
use std::sync::{Arc, LazyLock};
use std::task::{Context, Poll, Wake, Waker};

use serde::Serialize;
use wgpu::{
    Adapter, Backends, CooperativeScalarType, DeviceType, Features, Instance, InstanceDescriptor,
    InstanceFlags,
};

use crate::memory;

/// The features that kernels can use, with the names that `thunder devices list` prints.
pub(crate) const FEATURES: [(Features, &str); 7] = [
    (Features::IMMEDIATES, "immediates"),
    (Features::SUBGROUP, "subgroups"),
    (Features::SHADER_F16, "f16"),
    (Features::SHADER_I16, "i16"),
    (Features::EXPERIMENTAL_COOPERATIVE_MATRIX, "cooperative-matrix"),
    (Features::MAPPABLE_PRIMARY_BUFFERS, "mappable"),
    (Features::TIMESTAMP_QUERY, "timestamps"),
];

/// Features that kernels with cooperative matrices need.
pub(crate) const MATRIX_FEATURES: Features =
    Features::EXPERIMENTAL_COOPERATIVE_MATRIX.union(Features::SHADER_F16);

/// A GPU, or a driver that emulates one.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct DeviceInfo {
    /// The device's number, as in `gpu:N`.
    pub number: usize,
    /// The adapter's name.
    pub name: String,
    /// `discrete`, `integrated`, `virtual`, `software` or `other`.
    pub kind: &'static str,
    /// `vulkan` or `metal`.
    pub api: String,
    /// The driver's name and version.
    pub driver: String,
    /// Bytes of memory that the device may use, if the driver reports it. System memory if the
    /// device has none of its own.
    pub memory_bytes: Option<u64>,
    /// Size of the largest buffer that can be bound to a kernel, in bytes.
    pub max_binding_bytes: u64,
    /// Minimum and maximum lanes of a subgroup.
    pub subgroup_lanes: [u32; 2],
    /// Features that kernels can use.
    pub features: Vec<&'static str>,
}

impl DeviceInfo {
    /// False for a driver that computes on the CPU.
    pub fn is_real(&self) -> bool {
        self.kind != "software"
    }

    /// True if the device has memory of its own.
    pub fn has_own_memory(&self) -> bool {
        self.kind == "discrete"
    }

    /// True if subgroups may consist of whole sets of 32 lanes, which kernels add over. Metal does
    /// not report the number of lanes. All of Apple's GPUs have 32, AMD's have 32 or 64.
    pub(crate) fn may_have_sets_of_32(&self) -> bool {
        self.subgroup_lanes[0].is_multiple_of(32) && self.subgroup_lanes[0] > 0 || self.api == "metal"
    }

    /// True if the device can run the kernels at all.
    pub fn is_usable(&self) -> bool {
        self.features.contains(&"immediates")
    }
}

/// An adapter of this machine, with its description.
#[derive(Debug, Clone)]
pub struct Found {
    pub(crate) adapter: Adapter,
    /// The adapter's description.
    pub info: DeviceInfo,
}

impl Found {
    /// Bytes that this process may use of the device's memory now, next to other processes, if the
    /// driver reports it.
    pub fn available_bytes(&self) -> Option<u64> {
        memory::available_bytes(&self.adapter).or(self.info.memory_bytes)
    }

    /// Whether the device has cooperative matrices of bytes, next to those of f16.
    pub(crate) fn multiplies_bytes(&self) -> bool {
        let passes_through = self.adapter.features().contains(Features::PASSTHROUGH_SHADERS);
        passes_through && self.matrix_side() == Some(16) && memory::multiplies_bytes(&self.adapter)
    }

    /// Side of the cooperative matrices that multiply f16 and sum in f32: 16 or 8. `None` if the
    /// device has none for subgroups of 32 lanes.
    pub(crate) fn matrix_side(&self) -> Option<usize> {
        // See `may_have_sets_of_32`. A matrix belongs to a whole subgroup.
        let has_lanes = self.info.subgroup_lanes == [32, 32] || self.info.api == "metal";
        if !has_lanes || !self.adapter.features().contains(MATRIX_FEATURES) {
            return None;
        }
        let all = self.adapter.cooperative_matrix_properties();
        let has = |side: u32| {
            all.iter().any(|matrix| {
                [matrix.m_size, matrix.n_size, matrix.k_size] == [side; 3]
                    && matrix.ab_type == CooperativeScalarType::F16
                    && matrix.cr_type == CooperativeScalarType::F32
            })
        };
        [16, 8].into_iter().find(|side| has(*side)).map(|side| side as usize)
    }
}

/// All GPUs, real ones first. Empty without a Vulkan loader or a driver.
pub fn devices() -> Vec<Found> {
    // One for the process: NVIDIA's driver (580) cannot be loaded again after thirty instances,
    // because its static thread-local storage is not given back (docs/lab/2026-11-30-gpu.md).
    static SHARED: LazyLock<Instance> = LazyLock::new(instance);
    devices_of(&SHARED)
}

fn instance() -> Instance {
    Instance::new(InstanceDescriptor {
        backends: Backends::VULKAN | Backends::METAL,
        flags: InstanceFlags::empty(),
        ..InstanceDescriptor::new_without_display_handle()
    })
}

fn devices_of(instance: &Instance) -> Vec<Found> {
    let mut adapters = block_on(instance.enumerate_adapters(Backends::VULKAN | Backends::METAL));
    let order = |adapter: &Adapter| match adapter.get_info().device_type {
        DeviceType::DiscreteGpu => 0,
        DeviceType::IntegratedGpu => 1,
        DeviceType::VirtualGpu => 2,
        DeviceType::Other => 3,
        DeviceType::Cpu => 4,
    };
    adapters.sort_by_key(order);
    adapters.into_iter().enumerate().map(|(number, adapter)| describe(number, adapter)).collect()
}

/// The device for tests: number `THUNDER_TEST_GPU`, or a software driver if the variable is not
/// set.
///
/// # Panics
/// If the variable names no device: a test that somebody wants on a GPU is not skipped.
#[doc(hidden)]
pub fn for_tests() -> Option<Found> {
    let mut devices = devices();
    let number = match std::env::var("THUNDER_TEST_GPU") {
        Ok(wanted) => match wanted.parse() {
            Ok(number) if number < devices.len() => number,
            _ => panic!("THUNDER_TEST_GPU={wanted}: there are {} devices", devices.len()),
        },
        Err(_) => devices.iter().position(|found| !found.info.is_real())?,
    };
    if devices[number].info.is_real() {
        return Some(devices.swap_remove(number));
    }
    // Of an instance of its own: software devices of one instance share the threads that compute.
    devices_of(&instance()).into_iter().nth(number)
}

fn describe(number: usize, adapter: Adapter) -> Found {
    let (info, limits, features) = (adapter.get_info(), adapter.limits(), adapter.features());
    let kind = match info.device_type {
        DeviceType::DiscreteGpu => "discrete",
        DeviceType::IntegratedGpu => "integrated",
        DeviceType::VirtualGpu => "virtual",
        DeviceType::Cpu => "software",
        DeviceType::Other => "other",
    };
    let info = DeviceInfo {
        number,
        kind,
        api: format!("{:?}", info.backend).to_lowercase(),
        driver: driver_of(&format!("{} {}", info.driver, info.driver_info)),
        memory_bytes: memory::device_bytes(&adapter),
        max_binding_bytes: limits.max_storage_buffer_binding_size,
        subgroup_lanes: [info.subgroup_min_size, info.subgroup_max_size],
        features: FEATURES.iter().filter(|(f, _)| features.contains(*f)).map(|(_, name)| *name).collect(),
        name: info.name,
    };
    let mut found = Found { adapter, info };
    if found.multiplies_bytes() {
        found.info.features.push("cooperative-matrix-of-bytes");
    }
    found
}

/// The driver's name and version. Metal's is a part of the system and reports none, so this is the
/// system's version: an update must prove kernels again.
fn driver_of(reported: &str) -> String {
    match reported.trim() {
        "" if cfg!(target_os = "macos") => {
            let file = "/System/Library/CoreServices/SystemVersion.plist";
            system_version(&std::fs::read_to_string(file).unwrap_or_default())
        }
        reported => reported.to_owned(),
    }
}

/// Version and build in a SystemVersion.plist.
fn system_version(plist: &str) -> String {
    let value = |key: &str| {
        let (_, rest) = plist.split_once(&format!("<key>{key}</key>"))?;
        let (_, rest) = rest.split_once("<string>")?;
        Some(rest.split_once("</string>")?.0)
    };
    match (value("ProductVersion"), value("ProductBuildVersion")) {
        (Some(version), Some(build)) => format!("macOS {version} ({build})"),
        _ => String::new(),
    }
}

/// Why a device cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ChoiceError {
    /// There is no real GPU.
    #[error(
        "there is no GPU with a Vulkan or Metal driver: install its driver (on Linux also libvulkan1), or use \
         --device cpu; `thunder devices list` shows what there is"
    )]
    NoGpu,
    /// There is no device with this number.
    #[error(
        "there is no device gpu:{number}: {count} were found, numbered from 0; see `thunder devices list`"
    )]
    NoSuchNumber {
        /// The requested number.
        number: usize,
        /// Number of devices.
        count: usize,
    },
    /// The device lacks a feature that every kernel needs.
    #[error(
        "gpu:{number} ({name}) lacks push constants (immediates): update its driver, or use --device cpu"
    )]
    Unusable {
        /// The requested number.
        number: usize,
        /// The device's name.
        name: String,
    },
}

/// A real GPU for the `turn`-th rank of this host. Ranks get GPUs of the best kind in turn, never
/// an emulated one.
///
/// # Errors
/// If there is no real GPU.
pub fn real(turn: usize) -> Result<Found, ChoiceError> {
    real_among(devices(), turn, |found| &found.info)
}

/// Number of GPUs that [`real`] hands out: this many ranks of a host get a GPU each.
pub fn real_count() -> usize {
    best_among(devices(), |found| &found.info).len()
}

fn real_among<D>(devices: Vec<D>, turn: usize, info: impl Fn(&D) -> &DeviceInfo) -> Result<D, ChoiceError> {
    let mut devices = best_among(devices, info);
    match devices.len() {
        0 => Err(ChoiceError::NoGpu),
        count => Ok(devices.swap_remove(turn % count)),
    }
}

fn best_among<D>(mut devices: Vec<D>, info: impl Fn(&D) -> &DeviceInfo) -> Vec<D> {
    devices.retain(|device| info(device).is_real() && info(device).is_usable());
    // Discrete and integrated GPUs differ so much that a rank never gets the slower kind.
    let best = devices.first().map(|device| info(device).kind);
    devices.retain(|device| Some(info(device).kind) == best);
    devices
}

/// The device with this number, which may be emulated in software.
///
/// # Errors
/// If there is no such device, or it cannot run the kernels.
pub fn numbered(number: usize) -> Result<Found, ChoiceError> {
    numbered_among(devices(), number, |found| &found.info)
}

fn numbered_among<D>(
    mut devices: Vec<D>,
    number: usize,
    info: impl Fn(&D) -> &DeviceInfo,
) -> Result<D, ChoiceError> {
    if number >= devices.len() {
        return Err(ChoiceError::NoSuchNumber { number, count: devices.len() });
    }
    let device = devices.swap_remove(number);
    if info(&device).is_usable() {
        return Ok(device);
    }
    let name = info(&device).name.clone();
    Err(ChoiceError::Unusable { number, name })
}

/// Runs one of wgpu's futures. On these platforms it is ready at once.
pub(crate) fn block_on<T>(future: impl Future<Output = T>) -> T {
    struct Spin;
    impl Wake for Spin {
        fn wake(self: Arc<Self>) {}
    }
    let mut future = pin!(future);
    let waker = Waker::from(Arc::new(Spin));
    loop {
        if let Poll::Ready(value) = future.as_mut().poll(&mut Context::from_waker(&waker)) {
            return value;
        }
        std::thread::yield_now();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_system_version_has_version_and_build() {
        let plist = "<plist><dict>
    <key>ProductBuildVersion</key>
    <string>25C56</string>
    <key>ProductVersion</key> <string>26.2</string></dict></plist>";
        assert_eq!(system_version(plist), "macOS 26.2 (25C56)");
        for cut in 0..plist.len() {
            assert!(system_version(&plist[..cut]).len() < 20, "no panic");
        }
    }

    #[test]
    fn kernels_that_add_over_32_lanes_are_tried_where_subgroups_may_have_them() {
        let lanes = |api: &str, subgroup_lanes| DeviceInfo {
            api: api.to_owned(),
            subgroup_lanes,
            ..device(0, "discrete")
        };
        let may = [("vulkan", [32, 32]), ("vulkan", [32, 64]), ("vulkan", [64, 64]), ("metal", [4, 64])];
        assert!(may.iter().all(|(api, numbers)| lanes(api, *numbers).may_have_sets_of_32()));
        let never = [("vulkan", [8, 8]), ("vulkan", [16, 32]), ("vulkan", [0, 0])];
        assert!(!never.iter().any(|(api, numbers)| lanes(api, *numbers).may_have_sets_of_32()));
    }

    fn device(number: usize, kind: &'static str) -> DeviceInfo {
        DeviceInfo {
            number,
            name: format!("{kind} {number}"),
            kind,
            api: "vulkan".to_owned(),
            driver: "test".to_owned(),
            memory_bytes: None,
            max_binding_bytes: 1 << 27,
            subgroup_lanes: [32, 32],
            features: vec!["immediates"],
        }
    }

    fn all(kinds: &[&'static str]) -> Vec<DeviceInfo> {
        kinds.iter().enumerate().map(|(number, kind)| device(number, kind)).collect()
    }

    #[test]
    fn a_software_device_is_taken_only_by_its_number() {
        let real = |kinds: &[&'static str], turn| {
            real_among(all(kinds), turn, |device| device).map(|device| device.number)
        };
        assert_eq!(real(&["discrete", "software"], 1), Ok(0));
        assert_eq!(real(&["software"], 0), Err(ChoiceError::NoGpu));
        assert_eq!(real(&[], 0), Err(ChoiceError::NoGpu));
        let three = ["discrete", "discrete", "integrated"];
        assert_eq!([0, 1, 2].map(|turn| real(&three, turn)), [0, 1, 0].map(Ok));

        let numbered = |kinds: &[&'static str], number| {
            numbered_among(all(kinds), number, |device| device).map(|device| device.number)
        };
        assert_eq!(numbered(&["discrete", "software"], 1), Ok(1));
        assert_eq!(numbered(&["discrete"], 1), Err(ChoiceError::NoSuchNumber { number: 1, count: 1 }));
    }

    #[test]
    fn the_devices_are_there_however_often_a_process_asks() {
        // Mesa's driver was always there; NVIDIA's was not after thirty times.
        let test = "the_devices_are_there_however_often_a_process_asks";
        let Some(found) = crate::tests::device(test) else { return };
        for turn in 0..100 {
            let found = numbered(found.info.number).unwrap();
            if turn % 10 == 0 {
                crate::device::Device::open(&found, false).unwrap();
            }
        }
    }

    #[test]
    fn a_device_without_push_constants_is_refused() {
        let mut old = device(0, "discrete");
        old.features.clear();
        assert_eq!(real_among(vec![old.clone()], 0, |device| device), Err(ChoiceError::NoGpu));
        let refused = numbered_among(vec![old], 0, |device| device);
        assert!(matches!(refused, Err(ChoiceError::Unusable { number: 0, .. })));
    }
}
