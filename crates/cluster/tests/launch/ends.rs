//! How launches end.

use std::process::Child;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use crate::harness::{alive, finish, local, marker, program, run, shell, start, wait_for};

fn signal_to(child: &Child, signal: Signal) {
    kill_process(Pid::from_child(child), signal).unwrap();
}

/// A rank that hangs in a child of its shell; `marker` finds the child.
fn hanging(marker: &str) -> String {
    let words: Vec<String> = program("hang", &[marker]).iter().map(|word| format!("'{word}'")).collect();
    format!("{}; :", words.join(" "))
}

pub fn first_failure() {
    let run = run(&shell(4, "case $THUNDER_RANK in 2) sleep 0.3; exit 3 ;; *) exec sleep 60 ;; esac"), b"");
    assert_eq!(run.status, Some(3), "{}", run.stderr);
    assert!(run.stderr.contains("rank 2 on localhost exited with status 3 after"), "{}", run.stderr);
    let ended = "ended by TERM: ranks 0 on localhost, 1 on localhost, 3 on localhost";
    assert!(run.stderr.contains(ended), "{}", run.stderr);
}

pub fn success() {
    let run = run(&shell(3, "echo $MLX_RANK of $THUNDER_WORLD_SIZE"), b"");
    assert_eq!((run.status, run.stderr.as_str()), (Some(0), ""));
    assert_eq!(run.sorted(), ["[0] 0 of 3", "[1] 1 of 3", "[2] 2 of 3"]);
}

pub fn signal() {
    let run = run(&shell(2, "[ $THUNDER_RANK = 0 ] && kill -9 $$; exec sleep 60"), b"");
    assert_eq!(run.status, Some(137));
    assert!(
        run.stderr.contains("rank 0 on localhost was ended by signal 9 (SIGKILL) (status 137) after")
            && run.stderr.contains("out of memory?"),
        "{}",
        run.stderr
    );
}

pub fn grandchildren() {
    let marker = marker();
    let hang = hanging(&marker);
    // Rank 1 fails once rank 0's grandchildren run, and leaves one of its own.
    let command = format!(
        "if [ $THUNDER_RANK = 0 ]; then ({hang}) & ({hang}) & wait; else ({hang}) & sleep 0.5; exit 7; fi"
    );
    let run = run(&shell(2, &command), b"");
    assert_eq!(run.status, Some(7), "{}", run.stderr);
    assert_eq!(alive(&marker), [""; 0]);
}

pub fn leftovers() {
    let marker = marker();
    let mut launch = shell(1, &format!("({}) & echo left", hanging(&marker)));
    launch.grace = Duration::from_millis(600);
    let run = run(&launch, b"");
    assert_eq!((run.status, run.text().as_str()), (Some(0), "[0] left\n"));
    assert!(run.time > Duration::from_millis(600), "it had no time to finish: {:?}", run.time);
    assert_eq!(alive(&marker), [""; 0]);
}

pub fn stubborn() {
    let marker = marker();
    let stubborn = format!("trap '' TERM; {}", hanging(&marker));
    let mut launch = shell(2, &format!("[ $THUNDER_RANK = 1 ] && {{ sleep 0.5; exit 4; }}; {stubborn}"));
    launch.grace = Duration::from_millis(700);
    let run = run(&launch, b"");
    assert_eq!(run.status, Some(4));
    assert!(run.stderr.contains("ended by KILL: rank 0 on localhost"), "{}", run.stderr);
    assert!(run.time > Duration::from_millis(1200), "{:?}", run.time);
    assert_eq!(alive(&marker), [""; 0]);
}

/// Needs `setsid`, which only Linux has.
pub fn escaped() {
    let command = "echo before; setsid sleep 9 & sleep 0.3; echo after";
    let has_setsid = std::process::Command::new("setsid").arg("true").status().is_ok();
    let command = if has_setsid { command } else { "echo before; echo after" };
    let run = run(&shell(1, command), b"");
    assert_eq!((run.status, run.text().as_str()), (Some(0), "[0] before\n[0] after\n"));
    assert!(run.time < Duration::from_secs(7), "{:?}", run.time);
}

pub fn interrupt() {
    for (signal, status) in [(Signal::INT, 130), (Signal::TERM, 143), (Signal::HUP, 129)] {
        let marker = marker();
        let child = start(&local(3, program("hang", &[&marker])));
        wait_for(&marker, 3);
        signal_to(&child, signal);
        let run = finish(child);
        assert_eq!(run.status, Some(status), "{}", run.stderr);
        assert!(run.stderr.contains("ended by TERM: ranks 0 on localhost"), "{}", run.stderr);
        assert_eq!(alive(&marker), [""; 0]);
    }
}

pub fn second_interrupt() {
    let marker = marker();
    let mut launch = shell(2, &format!("trap '' TERM; {}", hanging(&marker)));
    launch.grace = Duration::from_secs(90);
    let child = start(&launch);
    // The shells and their children.
    wait_for(&marker, 4);
    signal_to(&child, Signal::INT);
    std::thread::sleep(Duration::from_millis(500));
    assert_eq!(alive(&marker).len(), 4, "the first one leaves them their time");
    signal_to(&child, Signal::INT);
    let run = finish(child);
    assert_eq!(run.status, Some(130));
    assert!(run.time < Duration::from_secs(30), "{:?}", run.time);
    assert_eq!(alive(&marker), [""; 0]);
}

pub fn launcher_killed() {
    let marker = marker();
    let mut child = start(&local(2, program("hang", &[&marker])));
    wait_for(&marker, 2);
    let began = Instant::now();
    child.kill().unwrap();
    child.wait().unwrap();
    wait_for(&marker, 0);
    assert!(began.elapsed() < Duration::from_secs(20), "{:?}", began.elapsed());
}

pub fn missing_program() {
    let run = run(&local(2, vec!["no-such-program".to_owned()]), b"");
    assert_eq!(run.status, Some(100));
    assert!(run.stderr.contains("rank 0 on localhost: cannot start no-such-program"), "{}", run.stderr);
    let mut launch = shell(1, "true");
    launch.directory = Some("/no/such/folder".into());
    let run = crate::harness::run(&launch, b"");
    assert!(run.stderr.contains("no directory /no/such/folder"), "{}", run.stderr);
}
