//! Whether processes are asleep, by the time on a processor that Linux counts for each of their threads.

use std::fmt::Display;
use std::time::Duration;

/// Whether these processes together take no more than `most` of a processor's time in one second of four. Starting may not be over, and
/// what a virtual machine's host takes from a thread is counted as the thread's.
pub fn falls_quiet(processes: &[impl Display], most: Duration) -> bool {
    assert!(on_processor(processes) > Duration::ZERO, "the kernel does not count");
    (0..4).any(|_| {
        let before = on_processor(processes);
        std::thread::sleep(Duration::from_secs(1));
        // Threads that ended meanwhile have taken their time with them.
        let spent = on_processor(processes).saturating_sub(before);
        println!("{spent:?} on a processor in a second");
        spent <= most
    })
}

fn on_processor(processes: &[impl Display]) -> Duration {
    let of_thread = |thread: std::fs::DirEntry| -> u64 {
        // One that has just ended has no such file any more.
        let text = std::fs::read_to_string(thread.path().join("schedstat")).unwrap_or_else(|_| "0".into());
        text.split_whitespace().next().unwrap().parse().unwrap()
    };
    let of_process = |process| -> u64 {
        let threads = std::fs::read_dir(format!("/proc/{process}/task")).unwrap();
        threads.map(|thread| of_thread(thread.unwrap())).sum()
    };
    Duration::from_nanos(processes.iter().map(of_process).sum())
}
