//! Earlier proofs, in a file in the user's cache folder.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};

use crate::adapter::DeviceInfo;
use crate::kernel::{Kernel, Product};

/// Maximum size of the file. A few hundred kernels of a device take 20 KiB.
const MAX_FILE_BYTES: u64 = 4 << 20;

/// Proved kernels, by adapter and driver.
type Known = BTreeMap<String, BTreeSet<String>>;

/// The proofs of one device.
#[derive(Debug, Default)]
pub(crate) struct Proofs {
    proved: HashSet<Kernel>,
    device: String,
    file: Option<PathBuf>,
    known: BTreeSet<String>,
}

impl Proofs {
    /// Starts with what `file` knows about the device.
    pub fn new(info: &DeviceInfo, file: Option<PathBuf>) -> Self {
        let device = format!("{} | {} | {}", info.name, info.driver, env!("CARGO_PKG_VERSION"));
        let known = file.as_deref().map(read).unwrap_or_default().remove(&device).unwrap_or_default();
        Self { device, file, known, ..Self::default() }
    }

    pub fn is_proved(&mut self, kernels: &[Kernel]) -> bool {
        if kernels.iter().all(|kernel| self.proved.contains(kernel)) {
            return true;
        }
        if self.known.is_empty() || !kernels.iter().all(|kernel| self.known.contains(&name(kernel))) {
            return false;
        }
        self.proved.extend(kernels);
        true
    }

    /// Records that kernels are correct. If the file cannot be written, this only costs time later.
    pub fn note(&mut self, kernels: &[Kernel]) {
        self.proved.extend(kernels);
        let Some(file) = &self.file else { return };
        self.known.extend(kernels.iter().map(name));
        // Other processes may have added to the file.
        let mut all = read(file);
        all.entry(self.device.clone()).or_default().extend(self.known.iter().cloned());
        if let Err(error) = write(file, &all) {
            tracing::warn!(file = %file.display(), %error, "proofs of GPU kernels are not remembered");
        }
    }
}

/// The default file: `thunderhead/gpu-proofs.json` in the user's cache folder.
pub(crate) fn default_file() -> Option<PathBuf> {
    use etcetera::BaseStrategy as _;
    let folder = etcetera::choose_base_strategy().ok()?.cache_dir();
    Some(folder.join("thunderhead").join("gpu-proofs.json"))
}

/// A kernel's name and the hash of its text, so that a changed kernel is proved again. The text of
/// the kernel whose bits it must have counts too.
fn name(kernel: &Kernel) -> String {
    let mut hasher = DefaultHasher::new();
    let text = kernel.source();
    text.hash(&mut hasher);
    kernel.spirv(&text).hash(&mut hasher);
    let of_one_row = match kernel {
        Kernel::Batch(batch) => Some(batch.of_one_row()),
        Kernel::Product(product) if product.batch > 1 => Some(product.of_one_row()),
        _ => None,
    };
    of_one_row.map(Product::source).hash(&mut hasher);
    kernel.is_unchecked().hash(&mut hasher);
    format!("{kernel:?} {:016x}", hasher.finish())
}

/// The content of a file; empty if it does not exist or cannot be read.
fn read(file: &Path) -> Known {
    let is_small = std::fs::metadata(file).is_ok_and(|data| data.len() <= MAX_FILE_BYTES);
    let text = if is_small { std::fs::read(file).unwrap_or_default() } else { Vec::new() };
    serde_json::from_slice(&text).unwrap_or_default()
}

/// Writes a file atomically, so that other processes read either the old content or the new.
fn write(file: &Path, known: &Known) -> std::io::Result<()> {
    if let Some(folder) = file.parent() {
        std::fs::create_dir_all(folder)?;
    }
    let next = file.with_extension(format!("{}.new", std::process::id()));
    std::fs::write(&next, serde_json::to_vec_pretty(known)?)?;
    std::fs::rename(&next, file)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn info(driver: &str) -> DeviceInfo {
        DeviceInfo {
            number: 0,
            name: "a gpu".to_owned(),
            kind: "discrete",
            api: "vulkan".to_owned(),
            driver: driver.to_owned(),
            memory_bytes: None,
            max_binding_bytes: 1 << 27,
            subgroup_lanes: [32, 32],
            features: vec![],
        }
    }

    #[test]
    fn proofs_are_remembered_for_the_driver_that_they_were_made_on() {
        let folder = tempfile::tempdir().unwrap();
        let file = Some(folder.path().join("a/proofs.json"));
        let mut first = Proofs::new(&info("1.0"), file.clone());
        assert!(!first.is_proved(&[Kernel::Norm { levels: false }]));
        first.note(&[Kernel::Norm { levels: false }]);
        assert!(first.is_proved(&[Kernel::Norm { levels: false }]));
        let mut again = Proofs::new(&info("1.0"), file.clone());
        assert!(again.is_proved(&[Kernel::Norm { levels: false }]));
        assert!(!again.is_proved(&[Kernel::Norm { levels: false }, Kernel::Add]));
        assert!(!Proofs::new(&info("1.1"), file.clone()).is_proved(&[Kernel::Norm { levels: false }]));
        assert!(!Proofs::new(&info("1.0"), None).is_proved(&[Kernel::Norm { levels: false }]));
        std::fs::write(file.as_ref().unwrap(), "not json").unwrap();
        assert!(!Proofs::new(&info("1.0"), file).is_proved(&[Kernel::Norm { levels: false }]));
    }
}
