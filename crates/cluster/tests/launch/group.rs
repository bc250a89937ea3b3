//! Thunderhead's own programs form their group under the launcher.

use thunder_cluster::launch::Backend;

use crate::harness::{local, program, run};
use crate::remote::Hosts;

pub fn all_reduce() {
    for (backend, count) in [
        (Backend::Auto, 1),
        (Backend::Auto, 3),
        (Backend::Ring, 2),
        (Backend::Shm, 2),
        (Backend::Tcp, 4),
        (Backend::Nccl, 2),
    ] {
        let mut launch = local(count, program("reduce", &[]));
        launch.backend = backend;
        let run = run(&launch, b"");
        assert_eq!(run.status, Some(0), "{backend:?}: {}", run.stderr);
        let sum = count * (count + 1) / 2;
        let expected: Vec<String> =
            (0..count).map(|rank| format!("[{rank}] rank {rank} of {count}: {sum}")).collect();
        assert_eq!(run.sorted(), expected);
    }
    let hosts = Hosts::fake(&["alpha", "beta"]);
    let command = program("reduce", &[]);
    let command: Vec<&str> = command.iter().map(String::as_str).collect();
    let mut launch = hosts.launch(&["alpha", "beta", "localhost"], &command);
    launch.directory = None;
    let run = run(&launch, b"");
    assert_eq!(run.status, Some(0), "{}", run.stderr);
    assert!(run.text().contains("rank 2 of 3: 6"), "{}", run.text());
}
