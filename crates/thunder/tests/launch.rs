//! Options of `thunder launch`. How it treats ranks is tested in `thunder-cluster`.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::process::{Command, Output, Stdio};

fn launch(arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_thunder"));
    command.arg("launch").args(arguments).env("FROM_HERE", "yes").stdin(Stdio::null());
    command.output().unwrap()
}

fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).unwrap()
}

#[test]
fn the_exit_status_is_the_first_failing_ranks() {
    let output = launch(&["-n", "2", "--", "sh", "-c", "[ $MLX_RANK = 0 ] || exit 42; sleep 60"]);
    assert_eq!(output.status.code(), Some(42));
    assert!(text(&output.stderr).contains("rank 1 on localhost exited with status 42"));
    assert_eq!(launch(&["-n", "3", "--", "true"]).status.code(), Some(0));
}

#[test]
fn options_reach_the_ranks() {
    let show = ["--", "sh", "-c", "pwd; echo $A $FROM_HERE $THUNDER_TRANSPORT $THUNDER_PORTS"];
    let options = ["--cwd", "/", "--env", "A=x y", "--env", "FROM_HERE", "--backend", "tcp", "--no-prefix"];
    let output = launch(&[&options[..], &["--ports", "42000-42063"], &show].concat());
    assert_eq!(text(&output.stdout), "/\nx y yes tcp 42000-42063\n");
}

#[test]
fn json_is_alone_on_standard_output() {
    let output = launch(&["--json", "--", "sh", "-c", "echo hello; exit 3"]);
    assert_eq!(output.status.code(), Some(3));
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((&report["status"], &report["ranks"][0]["end"]), (&3.into(), &"failed".into()));
    assert!(text(&output.stderr).contains("[0] hello\n"));
}

#[test]
fn a_dry_run_shows_commands_without_secrets_and_starts_nothing() {
    let hosts = "localhost,10.0.0.5";
    let output =
        launch(&["--dry-run", "--hosts", hosts, "--env", "API_KEY=zzz", "--", "touch", "/no/such/file"]);
    assert_eq!(output.status.code(), Some(0));
    let plan = text(&output.stdout);
    assert!(
        plan.contains("touch /no/such/file\n") && plan.contains("ssh -T") && plan.contains("10.0.0.5"),
        "{plan}"
    );
    assert!(plan.contains("THUNDER_SECRET='(hidden)'") && !plan.contains("zzz"), "{plan}");
}

#[test]
fn mistakes_are_named() {
    for (arguments, status, part) in [
        (&["--", "no-such-program"][..], 1, "cannot start no-such-program"),
        (&["--hostfile", "/no/such", "--", "true"], 1, "/no/such"),
        (&["--hosts", "a:b", "--", "true"], 1, "\"a:b\""),
        (&["--env", "1=2", "--", "true"], 1, "--env 1=2"),
        (&["--cwd", "/no/such", "--", "true"], 1, "no directory /no/such"),
        (&["--backend", "mpi", "--", "true"], 2, "'mpi'"),
        (&["-n", "0", "--", "true"], 2, "--repeat-hosts"),
        (&["-n", "2"], 2, "<COMMAND>"),
    ] {
        let output = launch(arguments);
        let message = text(&output.stderr);
        assert_eq!(output.status.code(), Some(status), "{message}");
        assert!(message.contains(part), "{message}");
    }
}
