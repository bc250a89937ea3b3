//! Whether processes are asleep, by the time on a processor that Linux counts for each of their threads.

use std::collections::BTreeMap;
use std::fmt::Display;
use std::path::PathBuf;
use std::time::Duration;

/// What each thread has had of a processor, in nanoseconds.
type Taken = BTreeMap<PathBuf, u64>;

/// Whether these processes together take less than `most` of a processor's time in one stretch of four, in which no thread begins or
/// ends. Starting may not be over, and what a virtual machine's host takes from a thread is counted as the thread's.
pub fn falls_quiet(processes: &[impl Display], stretch: Duration, most: Duration) -> bool {
    assert!(taken(processes).values().sum::<u64>() > 0, "the kernel does not count");
    (0..4).any(|_| {
        let before = taken(processes);
        std::thread::sleep(stretch);
        let after = taken(processes);
        let spent = Duration::from_nanos(after.values().sum::<u64>().saturating_sub(before.values().sum()));
        println!("{spent:?} on a processor in {stretch:?}");
        after.keys().eq(before.keys()) && spent < most
    })
}

fn taken(processes: &[impl Display]) -> Taken {
    let threads = |process| std::fs::read_dir(format!("/proc/{process}/task")).unwrap();
    let of_thread = |thread: std::io::Result<std::fs::DirEntry>| {
        let path = thread.unwrap().path();
        // One that has just ended has no such file any more.
        let text = std::fs::read_to_string(path.join("schedstat")).ok()?;
        Some((path, text.split_whitespace().next()?.parse().unwrap()))
    };
    processes.iter().flat_map(threads).filter_map(of_thread).collect()
}
