//! Whether processes sleep, by the processor time that Linux counts for each of their threads.

use std::collections::BTreeMap;
use std::fmt::Display;
use std::path::PathBuf;
use std::time::Duration;

/// Processor time of each thread so far, in nanoseconds.
type ThreadTimes = BTreeMap<PathBuf, u64>;

/// True if in one of four intervals the processes (given by id) together use less than `limit` of
/// processor time, and none of their threads starts or ends.
///
/// Four intervals, because start-up may continue in the first, and because time that a virtual
/// machine's host takes from a thread counts as the thread's own.
pub fn falls_quiet(processes: &[impl Display], stretch: Duration, limit: Duration) -> bool {
    assert!(times(processes).values().sum::<u64>() > 0, "the kernel counts no processor time for threads");
    (0..4).any(|_| {
        let before = times(processes);
        std::thread::sleep(stretch);
        let after = times(processes);
        let spent = Duration::from_nanos(after.values().sum::<u64>().saturating_sub(before.values().sum()));
        println!("{spent:?} of processor time in {stretch:?}");
        after.keys().eq(before.keys()) && spent < limit
    })
}

fn times(processes: &[impl Display]) -> ThreadTimes {
    let threads = |process| std::fs::read_dir(format!("/proc/{process}/task")).unwrap();
    let of_thread = |thread: std::io::Result<std::fs::DirEntry>| {
        let path = thread.unwrap().path();
        // A thread that has just ended no longer has this file.
        let text = std::fs::read_to_string(path.join("schedstat")).ok()?;
        Some((path, text.split_whitespace().next()?.parse().unwrap()))
    };
    processes.iter().flat_map(threads).filter_map(of_thread).collect()
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::falls_quiet;
    use std::process::Command;
    use std::time::Duration;

    #[test]
    fn a_sleeping_process_is_quiet_and_a_spinning_one_is_not() {
        let (stretch, limit) = (Duration::from_millis(200), Duration::from_millis(20));
        for (script, is_quiet) in [("exec sleep 60", true), ("while :; do :; done", false)] {
            let mut child = Command::new("sh").args(["-c", script]).spawn().unwrap();
            // `falls_quiet` needs a process that has used some processor time.
            std::thread::sleep(Duration::from_millis(50));
            let answer = falls_quiet(&[child.id()], stretch, limit);
            child.kill().unwrap();
            child.wait().unwrap();
            assert_eq!(answer, is_quiet, "{script}");
        }
    }
}
