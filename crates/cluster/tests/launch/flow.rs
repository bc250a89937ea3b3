//! Output and input of ranks.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::OpenOptionsExt;
use std::time::Duration;

use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use thunder_cluster::launch::Input;

use crate::harness::{alive, finish, launcher, local, marker, program, run, shell, start, wait_for};
use crate::programs::{LINES, line};
use thunder_testing::idle::falls_quiet;

pub fn integrity() {
    let run = run(&local(4, program("lines", &[])), b"");
    assert_eq!(run.status, Some(0), "{}", run.stderr);
    let mut next = [0; 4];
    for text in run.text().lines() {
        let (rank, text) = text.strip_prefix('[').and_then(|text| text.split_once("] ")).unwrap();
        let rank: usize = rank.parse().unwrap();
        assert_eq!(text, line(next[rank]), "rank {rank}");
        next[rank] += 1;
    }
    assert_eq!(next, [LINES; 4]);
}

pub fn last_line() {
    let run = run(&shell(2, "printf 'one\\ntwo €'; printf 'three' >&2"), b"");
    assert_eq!(run.sorted(), ["[0] one", "[0] two €", "[1] one", "[1] two €"]);
    assert!(run.stderr.contains("[0] three\n") && run.stderr.contains("[1] three\n"), "{}", run.stderr);
}

/// Runs three ranks that print to a terminal and to a pipe. Returns what each received.
fn on_terminal(no_color: Option<&str>) -> (String, String) {
    let near = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
    grantpt(&near).unwrap();
    unlockpt(&near).unwrap();
    let path = ptsname(&near, Vec::new()).unwrap();
    let no_control = rustix::fs::OFlags::NOCTTY.bits() as i32;
    let far = File::options().write(true).custom_flags(no_control).open(OsStr::from_bytes(path.as_bytes()));
    let mut command = launcher(&shell(3, "echo out; echo err >&2"));
    command.stdout(far.unwrap()).env_remove("NO_COLOR");
    command.envs(no_color.map(|value| ("NO_COLOR", value)));
    let child = command.spawn().unwrap();
    // The child holds the other end too. The terminal hangs up only when all ends are closed; on
    // Linux, reading then fails.
    drop(command);
    let mut shown = Vec::new();
    let _ = File::from(near).read_to_end(&mut shown);
    let run = finish(child);
    assert_eq!(run.status, Some(0), "{}", run.stderr);
    (String::from_utf8(shown).unwrap(), run.stderr)
}

pub fn colour() {
    const PLAIN: [&str; 3] = ["[0] out", "[1] out", "[2] out"];
    let sorted = |text: &str| {
        let mut lines: Vec<String> = text.lines().map(str::to_owned).collect();
        lines.sort();
        lines
    };
    // An empty variable counts as unset.
    for no_color in [None, Some("")] {
        let (shown, piped) = on_terminal(no_color);
        assert!(!piped.contains('\x1b'), "a pipe is no terminal: {piped:?}");
        let coloured = shown.lines().map(|line| {
            let (colour, rest) = line.strip_prefix("\x1b[").and_then(|line| line.split_once('m')).unwrap();
            let (prefix, rest) = rest.split_once("\x1b[0m").unwrap();
            (colour.parse::<u8>().unwrap(), format!("{prefix}{rest}"))
        });
        let (colours, lines): (BTreeSet<u8>, Vec<String>) = coloured.unzip();
        assert_eq!(sorted(&lines.join("\n")), PLAIN);
        assert_eq!(colours.len(), 3, "each rank has its own: {shown:?}");
        assert!(colours.iter().all(|colour| (31..=37).contains(colour)), "{colours:?}");
    }
    assert_eq!(sorted(&on_terminal(Some("1")).0), PLAIN);
    assert_eq!(run(&shell(3, "echo out"), b"").sorted(), PLAIN);
}

pub fn raw() {
    let mut launch = shell(1, "printf 'a\\377\\0b\\342'; sleep 0.3; printf '\\202\\254\\r\\nend'");
    launch.prefix = false;
    assert_eq!(run(&launch, b"").stdout, b"a\xff\0b\xe2\x82\xac\r\nend");
}

pub fn prompt() {
    let mut launch = shell(1, "printf 'name? '; read name; echo hello $name");
    launch.prefix = false;
    let mut child = start(&launch);
    let mut shown = [0; 6];
    child.stdout.as_mut().unwrap().read_exact(&mut shown).unwrap();
    assert_eq!(&shown, b"name? ");
    std::io::Write::write_all(child.stdin.as_mut().unwrap(), b"Ada\n").unwrap();
    assert_eq!(finish(child).text(), "hello Ada\n");
}

pub fn output_closed() {
    let marker = marker();
    let command = format!("while :; do echo {marker}; done");
    let mut child = start(&shell(2, &command));
    let mut first = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut first).unwrap();
    let run = finish(child);
    assert!(first.contains(&marker));
    assert_eq!(run.status, Some(141), "{}", run.stderr);
    assert!(run.stderr.contains("nobody reads the output"), "{}", run.stderr);
    assert_eq!(alive(&marker), [""; 0]);
}

pub fn input() {
    let data: Vec<u8> = (0..2_000_000u32).map(|number| (number.wrapping_mul(number) >> 7) as u8).collect();
    let sum = data.iter().fold(0u64, |sum, byte| sum.wrapping_mul(31).wrapping_add(u64::from(*byte)));
    let all = format!("2000000 {sum}");
    let expected =
        [(Input::First, [all.as_str(), "0 0"]), (Input::All, [&all, &all]), (Input::None, ["0 0"; 2])];
    for (input, [first, second]) in expected {
        let mut launch = local(2, program("echo", &[]));
        launch.input = input;
        let run = run(&launch, &data);
        assert_eq!(run.sorted(), [format!("[0] {first}"), format!("[1] {second}")], "{input:?}");
    }
}

pub fn unread_input() {
    let mut launch = shell(2, "sleep 0.5; echo done");
    launch.input = Input::All;
    let run = run(&launch, &vec![b'x'; 3_000_000]);
    assert_eq!((run.status, run.sorted()), (Some(0), vec!["[0] done".to_owned(), "[1] done".to_owned()]));
}

/// CPU time is read from Linux's /proc.
pub fn idle() {
    if !cfg!(target_os = "linux") {
        return;
    }
    let marker = marker();
    let mut child = start(&local(4, program("hang", &[&marker])));
    wait_for(&marker, 4);
    let is_quiet = falls_quiet(&[child.id()], Duration::from_secs(1), Duration::from_millis(10));
    child.stdin = None;
    rustix::process::kill_process(rustix::process::Pid::from_child(&child), rustix::process::Signal::INT)
        .unwrap();
    finish(child);
    assert!(is_quiet, "an idle launcher is never quiet");
}
