//! A report's data about the machine and the commit.

use super::report::Machine;
use crate::process::{command, output};
use crate::repository;
use anyhow::bail;
use std::fs;

/// A description of this machine, from /proc or sysctl.
pub fn machine(name: Option<&str>, cores: usize, kernel: String) -> anyhow::Result<Machine> {
    let field = |file: &str, field: &str| {
        let text = fs::read_to_string(file).unwrap_or_default();
        let line = text.lines().find(|line| line.starts_with(field))?.to_owned();
        line.split_once(':').map(|(_, value)| value.trim().to_owned())
    };
    let sysctl =
        |name: &str| output(&mut command(["sysctl", "-n", name])).ok().map(|text| text.trim().to_owned());
    let cpu = field("/proc/cpuinfo", "model name").or_else(|| sysctl("machdep.cpu.brand_string"));
    let cpu = cpu.unwrap_or_else(|| std::env::consts::ARCH.to_owned());
    let kib =
        field("/proc/meminfo", "MemTotal").and_then(|text| text.trim_end_matches(" kB").parse::<u64>().ok());
    let memory_bytes = kib.map(|kib| kib << 10).or_else(|| sysctl("hw.memsize")?.parse().ok()).unwrap_or(0);
    let system = output(&mut command(["uname", "-sr"]))?.trim().to_owned();
    let name = name.map_or_else(|| slug(&format!("{cpu} {cores} cores")), slug);
    if name.is_empty() {
        bail!("--machine needs a letter or digit");
    }
    Ok(Machine { name, cpu, cores, memory_bytes, system, kernel })
}

/// Lowercase words joined by dashes, for a file name.
fn slug(text: &str) -> String {
    let lower = text.to_lowercase().replace("(r)", "");
    let words = lower.split(|letter: char| !letter.is_ascii_alphanumeric());
    words.filter(|word| !word.is_empty()).collect::<Vec<_>>().join("-")
}

/// The commit that is measured.
pub fn commit() -> anyhow::Result<String> {
    let describe = ["git", "describe", "--always", "--dirty", "--abbrev=10"];
    Ok(output(command(describe).current_dir(repository()))?.trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::slug;

    #[test]
    fn a_machines_name_fits_a_file_name() {
        assert_eq!(
            slug("Intel(R) Xeon(R) Processor @ 2.50GHz 2 cores"),
            "intel-xeon-processor-2-50ghz-2-cores"
        );
        assert_eq!(slug("../Mac Studio"), "mac-studio");
    }
}
