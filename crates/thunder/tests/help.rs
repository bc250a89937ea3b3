//! Help texts, completions and progress: what a newcomer sees.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use common::thunder;

fn help(command: &[String], option: &str, columns: usize) -> String {
    let words: Vec<&str> = command.iter().map(String::as_str).chain([option]).collect();
    let output = thunder(&words).env("COLUMNS", columns.to_string()).output().unwrap();
    assert!(output.status.success(), "{command:?}");
    String::from_utf8(output.stdout).unwrap()
}

/// The names under `Commands:`.
fn subcommands(help: &str) -> Vec<String> {
    let lines = help.lines().skip_while(|line| *line != "Commands:").skip(1);
    let names = lines.take_while(|line| !line.is_empty()).filter_map(|line| {
        let name = line.strip_prefix("  ")?.split_whitespace().next()?;
        (!line.starts_with("   ") && name != "help").then(|| name.to_owned())
    });
    names.collect()
}

fn all_commands() -> Vec<Vec<String>> {
    let mut commands = vec![Vec::new()];
    let mut next = 0;
    while let Some(command) = commands.get(next).cloned() {
        let names = subcommands(&help(&command, "--help", 80)).into_iter();
        commands.extend(names.map(|name| [command.clone(), vec![name]].concat()));
        next += 1;
    }
    commands
}

/// Widest lines that clap writes, as main.rs sets it.
const WIDEST: usize = 100;

#[test]
fn no_help_breaks_a_line_in_mid_sentence() {
    let commands = all_commands();
    assert!(commands.len() > 15, "{commands:?}");
    for (command, columns) in commands.iter().flat_map(|command| [(command, 80), (command, 120)]) {
        for option in ["-h", "--help"] {
            let text = help(command, option, columns);
            let lines: Vec<&str> = text.lines().collect();
            for pair in lines.windows(2) {
                let indentation = |line: &str| line.len() - line.trim_start().len();
                let is_prose = |line: &str| {
                    let text = line.trim_start();
                    !text.is_empty() && !text.contains("  ") && !text.starts_with(['-', '<', '[', '→'])
                };
                let is_example = |line: &str| line.trim_start().starts_with("thunder ");
                let goes_on = is_prose(pair[0])
                    && is_prose(pair[1])
                    && indentation(pair[0]) == indentation(pair[1])
                    && !pair[0].ends_with(':')
                    && !pair.iter().any(|line| is_example(line));
                let word = pair[1].split_whitespace().next().unwrap_or("").chars().count();
                let used = pair[0].chars().count() + 1 + word;
                assert!(!goes_on || used > columns.min(WIDEST), "{command:?} {option} {columns}: {pair:?}");
            }
            let longest = lines.iter().map(|line| line.chars().count()).max().unwrap_or(0);
            assert!(
                longest <= columns || columns == 80 && longest <= WIDEST,
                "{command:?} {option}: {longest}"
            );
        }
    }
}

#[test]
fn defaults_and_what_a_command_does_are_said() {
    let of = |command: &str| help(&[command.to_owned()], "--help", 100);
    for command in ["serve", "chat", "plan"] {
        assert!(of(command).contains("[default: builtin]"), "{command}");
    }
    let plan = of("plan");
    assert!(plan.contains("Ranks to plan for") && !plan.contains("Ranks to start"), "{plan}");
}

#[test]
fn shells_complete_commands_options_and_models() {
    for shell in ["bash", "zsh", "fish"] {
        let output = thunder(&["completions", shell]).output().unwrap();
        let script = String::from_utf8(output.stdout).unwrap();
        assert!(output.status.success() && script.contains("THUNDER_COMPLETE"), "{shell}: {script}");
    }
    let cache = tempfile::tempdir().unwrap();
    std::fs::create_dir(cache.path().join("models--acme--tiny")).unwrap();
    let complete = |words: &[&str]| {
        let output = thunder(&["--", "thunder"])
            .args(words)
            .current_dir(cache.path())
            .env("HF_HUB_CACHE", cache.path())
            .env("THUNDER_COMPLETE", "fish")
            .output()
            .unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        text.lines().map(|line| line.split('\t').next().unwrap().to_owned()).collect::<Vec<_>>()
    };
    assert_eq!(complete(&["ser"]), ["serve", "service"]);
    assert!(complete(&["serve", "--par"]).contains(&"--parallel".to_owned()));
    assert_eq!(complete(&["run", "bui"]), ["builtin"]);
    assert_eq!(complete(&["serve", "acme"]), ["acme/tiny"]);
    assert!(complete(&["plan", "models"]).iter().any(|folder| folder.starts_with("models--acme--tiny")));
}

#[cfg(unix)]
#[test]
fn long_measurements_show_their_progress() {
    let options = ["--kernel", "portable", "--op", "4/64,norm", "--rows", "1,4", "--time", "20"];
    let mut command = thunder(&["bench", "kernels"]);
    command.args(options);
    let mut terminal = common::terminal::Terminal::start(command, 100);
    assert!(terminal.wait().success(), "{}", terminal.shown());
    let shown = terminal.shown();
    assert!(shown.contains("measuring") && shown.contains("/4 portable 4/64"), "{shown}");
}
