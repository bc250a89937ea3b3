//! The temperature of a machine, if the system reports it.

use std::fs;
use std::path::Path;

/// Temperatures are reported in these steps, because small changes are not worth a message.
const STEP_C: i64 = 5;
/// Sensors with values outside this range are broken, or measure something else.
const SENSIBLE_C: std::ops::RangeInclusive<i64> = 1..=150;
/// Drivers of processors' sensors in Linux's hwmon; other drivers measure disks or the room.
const PROCESSORS: [&str; 6] = ["coretemp", "k10temp", "zenpower", "cpu_thermal", "soc_thermal", "acpitz"];

/// Temperature in °C of the hottest sensor of this machine's processors; `None` if the system does
/// not report it, as in virtual machines and on macOS without root.
pub fn read() -> Option<u16> {
    read_below(Path::new("/sys/class"))
}

fn read_below(folder: &Path) -> Option<u16> {
    let zones = entries(&folder.join("thermal")).filter(|zone| starts_with(zone, "thermal_zone"));
    let zones = zones.filter_map(|zone| millidegrees(&zone.join("temp")));
    let sensors = entries(&folder.join("hwmon")).filter(|sensor| {
        let name = fs::read_to_string(sensor.join("name")).unwrap_or_default();
        PROCESSORS.contains(&name.trim())
    });
    let inputs = sensors.flat_map(|sensor| entries(&sensor).collect::<Vec<_>>());
    let inputs =
        inputs.filter(|input| starts_with(input, "temp") && input.to_string_lossy().ends_with("_input"));
    let all = zones.chain(inputs.filter_map(|input| millidegrees(&input)));
    let hottest = all.map(|thousandths| thousandths / 1000).filter(|c| SENSIBLE_C.contains(c)).max()?;
    u16::try_from((hottest + STEP_C / 2) / STEP_C * STEP_C).ok()
}

fn entries(folder: &Path) -> impl Iterator<Item = std::path::PathBuf> + use<> {
    fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path())
}

fn starts_with(path: &Path, begin: &str) -> bool {
    path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(begin))
}

fn millidegrees(file: &Path) -> Option<i64> {
    fs::read_to_string(file).ok()?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
    use super::*;

    #[test]
    fn the_hottest_sensible_sensor_of_a_processor_counts() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(read_below(folder.path()), None);
        let put = |path: &str, text: &str| {
            let file = folder.path().join(path);
            fs::create_dir_all(file.parent().unwrap()).unwrap();
            fs::write(file, text).unwrap();
        };
        put("thermal/thermal_zone0/temp", "41000\n");
        put("thermal/cooling_device0/temp", "99000\n");
        assert_eq!(read_below(folder.path()), Some(40));
        put("hwmon/hwmon0/name", "nvme\n");
        put("hwmon/hwmon0/temp1_input", "93000\n");
        assert_eq!(read_below(folder.path()), Some(40), "a disk's");
        put("hwmon/hwmon1/name", "k10temp\n");
        put("hwmon/hwmon1/temp1_input", "72600\n");
        put("hwmon/hwmon1/temp2_input", "-273000\n");
        put("hwmon/hwmon1/temp1_crit", "105000\n");
        put("thermal/thermal_zone1/temp", "254000\n");
        assert_eq!(read_below(folder.path()), Some(70));
    }
}
