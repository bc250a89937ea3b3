//! Energy that this machine has used, where it can be measured.
//!
//! Linux: the counters of RAPL (`/sys/class/powercap`), which count the processor and on some
//! machines its memory; since 2020 only root may read them. They leave out power supplies, disks
//! and graphics cards, so a wall meter shows more.

mod watch;

use std::fs;
use std::path::{Path, PathBuf};

pub use watch::{Energy, PowerWatch, Watts};

/// Folder of RAPL's counters on Linux.
const POWERCAP: &str = "/sys/class/powercap";

/// A counter that wraps.
#[derive(Debug, Clone, PartialEq)]
struct Counter {
    file: PathBuf,
    /// The largest value before the counter wraps.
    range_uj: u64,
    last_uj: u64,
}

/// Reads the energy that a machine uses.
#[derive(Debug, Clone, PartialEq)]
pub struct Meter {
    counters: Vec<Counter>,
    used_uj: u64,
}

impl Meter {
    /// The meter of this machine; `None` if it has none that this user may read.
    pub fn open() -> Option<Self> {
        Self::at(Path::new(POWERCAP))
    }

    /// A meter of the counters in a folder like [`POWERCAP`].
    fn at(folder: &Path) -> Option<Self> {
        let entries = fs::read_dir(folder).ok()?.flatten();
        let counters: Vec<Counter> = entries
            .filter_map(|entry| {
                let name = entry.file_name().into_string().ok()?;
                // A package is `intel-rapl:0`; its parts, `intel-rapl:0:0`, are counted in it.
                let package = name.strip_prefix("intel-rapl:")?;
                if package.contains(':') {
                    return None;
                }
                let zone = fs::read_to_string(entry.path().join("name")).unwrap_or_default();
                // The platform's counter includes the packages again.
                if !zone.trim().starts_with("package") {
                    return None;
                }
                let file = entry.path().join("energy_uj");
                let last_uj = read(&file)?;
                let range_uj = read(&entry.path().join("max_energy_range_uj")).unwrap_or(u64::MAX);
                Some(Counter { file, range_uj, last_uj })
            })
            .collect();
        (!counters.is_empty()).then_some(Self { counters, used_uj: 0 })
    }

    /// Joules since the meter was opened. Call it at least once a minute, because counters wrap
    /// after some minutes.
    pub fn joules(&mut self) -> f64 {
        for counter in &mut self.counters {
            let Some(now) = read(&counter.file) else { continue };
            let used = match now.checked_sub(counter.last_uj) {
                Some(used) => used,
                None => (counter.range_uj - counter.last_uj.min(counter.range_uj)).saturating_add(now),
            };
            self.used_uj = self.used_uj.saturating_add(used);
            counter.last_uj = now;
        }
        self.used_uj as f64 * 1e-6
    }
}

fn read(file: &Path) -> Option<u64> {
    fs::read_to_string(file).ok()?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
    use super::*;

    fn zone(root: &Path, name: &str, kind: &str, uj: u64) -> PathBuf {
        let folder = root.join(name);
        fs::create_dir_all(&folder).unwrap();
        fs::write(folder.join("name"), format!("{kind}\n")).unwrap();
        fs::write(folder.join("max_energy_range_uj"), "1000000\n").unwrap();
        fs::write(folder.join("energy_uj"), format!("{uj}\n")).unwrap();
        folder.join("energy_uj")
    }

    #[test]
    fn packages_add_up_parts_do_not_and_counters_wrap() {
        let root = tempfile::tempdir().unwrap();
        let first = zone(root.path(), "intel-rapl:0", "package-0", 900_000);
        let second = zone(root.path(), "intel-rapl:1", "package-1", 5);
        let part = zone(root.path(), "intel-rapl:0:0", "core", 0);
        let platform = zone(root.path(), "intel-rapl:2", "psys", 0);
        let mut meter = Meter::at(root.path()).unwrap();
        assert_eq!(meter.joules(), 0.0);
        for (file, uj) in [(&first, 100_000), (&second, 500_005), (&part, 700_000), (&platform, 900_000)] {
            fs::write(file, uj.to_string()).unwrap();
        }
        assert!((meter.joules() - 0.7).abs() < 1e-9, "0.2 J past the end, and 0.5 J");
        fs::write(&first, "no number").unwrap();
        assert!((meter.joules() - 0.7).abs() < 1e-9, "a counter that cannot be read adds nothing");
    }

    #[test]
    fn a_machine_without_counters_has_no_meter() {
        let root = tempfile::tempdir().unwrap();
        assert_eq!(Meter::at(root.path()), None);
        assert_eq!(Meter::at(&root.path().join("nothing")), None);
        fs::create_dir_all(root.path().join("intel-rapl:0")).unwrap();
        assert_eq!(Meter::at(root.path()), None, "a counter that this user may not read");
    }
}
