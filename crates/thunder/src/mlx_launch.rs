//! MLX's launcher waits in a busy loop while it can write to the ranks' standard input, and takes a
//! core away from the ranks on its machine. It sleeps after their input is full.

/// Fills this process's standard input if it is a pipe from MLX's launcher. For processes that do
/// not read it. Only Linux lets a process write to its own input.
pub fn fill_input() {
    let is_set = |name: &str| std::env::var_os(name).is_some_and(|value| !value.is_empty());
    if is_set("MLX_RANK") && !is_set("THUNDER_RANK") {
        platform::fill_input();
    }
}

#[cfg(target_os = "linux")]
mod platform {
    use std::fs::OpenOptions;
    use std::io::Write;
    use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};

    const INPUT: &str = "/proc/self/fd/0";

    pub fn fill_input() {
        if !std::fs::metadata(INPUT).is_ok_and(|input| input.file_type().is_fifo()) {
            return;
        }
        // If this fails, the launcher only keeps using a core.
        let Ok(mut input) = OpenOptions::new().write(true).custom_flags(libc::O_NONBLOCK).open(INPUT) else {
            return;
        };
        while input.write(&[b'\n'; 4096]).is_ok_and(|written| written > 0) {}
    }
}

#[cfg(not(target_os = "linux"))]
mod platform {
    pub fn fill_input() {}
}
