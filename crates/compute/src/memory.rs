//! How much memory there is, and how fast it is read.

pub use crate::cpu::measure::bandwidth::Reader;

/// Bytes available to programs, or `None` if the system does not report them.
pub fn available_bytes() -> Option<u64> {
    #[cfg(target_os = "linux")]
    {
        let text = std::fs::read_to_string("/proc/meminfo").ok()?;
        let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
        let kib: u64 = line.trim().trim_end_matches("kB").trim().parse().ok()?;
        Some((kib * 1024).min(control_group_bytes().unwrap_or(u64::MAX)))
    }
    #[cfg(target_os = "macos")]
    {
        let mut bytes = 0u64;
        let mut len = size_of::<u64>();
        // SAFETY: the name is a C string, and `bytes` has the length that `len` says.
        let failed = unsafe {
            libc::sysctlbyname(
                c"hw.memsize".as_ptr(),
                (&raw mut bytes).cast(),
                &mut len,
                std::ptr::null_mut(),
                0,
            )
        };
        (failed == 0).then_some(bytes)
    }
    #[cfg(not(any(target_os = "linux", target_os = "macos")))]
    None
}

/// The remaining memory of this process's control group (for example a container's), if it has a
/// limit.
#[cfg(target_os = "linux")]
fn control_group_bytes() -> Option<u64> {
    let groups = std::fs::read_to_string("/proc/self/cgroup").ok()?;
    // Version 2: one line, `0::/path`.
    let path = groups.lines().find_map(|line| line.strip_prefix("0::/"))?;
    let folder = std::path::Path::new("/sys/fs/cgroup").join(path);
    // A limit holds for all groups below it.
    let left = |folder: &std::path::Path| -> Option<u64> {
        let number = |name: &str| -> Option<u64> {
            std::fs::read_to_string(folder.join(name)).ok()?.trim().parse().ok()
        };
        Some(number("memory.max")?.saturating_sub(number("memory.current")?))
    };
    folder.ancestors().take_while(|folder| folder.starts_with("/sys/fs/cgroup")).filter_map(left).min()
}

/// Returns freed memory to the system, if the allocator would keep it. Call this after a large
/// temporary allocation.
pub fn give_back() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    // SAFETY: takes a number and touches free memory only.
    unsafe {
        libc::malloc_trim(0);
    }
}
