//! `thunder chat`, through pipes and on a terminal.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
#![cfg(unix)]

mod common;

use std::io::Write;
use std::process::Stdio;

use common::terminal::Terminal;
use common::thunder;
use serde_json::Value;

/// What the line editor sends before it reads a line, and after: it switches bracketed paste.
const PROMPT: &str = "\x1b[?2004h";
const ENTERED: &str = "\x1b[?2004l";

/// Sends lines through a pipe and returns what is printed.
fn piped(options: &[&str], lines: &str) -> String {
    piped_with_errors(options, lines).0
}

/// Like [`piped`], and also returns what is printed to standard error.
fn piped_with_errors(options: &[&str], lines: &str) -> (String, String) {
    let mut command = thunder(&[&["chat"], options].concat());
    let mut child =
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(lines.as_bytes()).unwrap();
    let output = child.wait_with_output().unwrap();
    let error = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.success(), "{error}");
    (String::from_utf8(output.stdout).unwrap(), error)
}

/// A chat on a terminal of this width, at its first prompt.
fn on_terminal(options: &[&str], columns: u16) -> Terminal {
    let terminal = Terminal::start(thunder(&[&["chat"], options].concat()), columns);
    terminal.wait_for(PROMPT, 1);
    terminal
}

/// The messages of a conversation, by `/save`.
fn saved(folder: &tempfile::TempDir) -> Vec<(String, String)> {
    let text = std::fs::read(folder.path().join("talk.json")).unwrap();
    let talk: Value = serde_json::from_slice(&text).unwrap();
    let field = |message: &Value, name: &str| message[name].as_str().unwrap().to_owned();
    let messages = talk["messages"].as_array().unwrap().iter();
    messages.map(|message| (field(message, "role"), field(message, "content"))).collect()
}

#[test]
fn a_full_context_leaves_out_the_oldest_turns() {
    let text = piped(&["--context", "160"], &"What is tensor parallelism?\n".repeat(6));
    let left_out = text.lines().filter(|line| line.starts_with("(the context is full: the")).count();
    assert!(left_out >= 2, "{text}");
    assert!(!text.contains("shorten") && !text.contains("starts over"), "{text}");
    let answers = text.lines().filter(|line| !line.starts_with('(') && line.len() > 20).count();
    assert!(answers >= 6, "every question has its answer: {text}");
    let text = piped(&["--context", "64"], &format!("{}\nWhat is a rank?\n", "word ".repeat(80)));
    assert!(text.contains("tokens, but the context holds 64: shorten it"), "{text}");
    assert!(text.lines().last().unwrap().len() > 20, "the next question is answered: {text}");
}

#[test]
fn an_answer_that_was_cut_off_is_marked() {
    let question = "What is tensor parallelism?\n";
    assert!(piped(&["--max-tokens", "5"], question).contains("(cut off after max_tokens 5"));
    let full = piped(&["--context", "48", "--logit-bias", "2=-100"], question);
    assert!(full.contains("(cut off: the context is full)"), "{full}");
    assert!(!piped(&[], question).contains("cut off"));
}

#[test]
fn a_model_without_a_template_gets_the_last_message_alone_and_says_so_once() {
    let folder = tempfile::tempdir().unwrap();
    for entry in std::fs::read_dir(thunder_testing::builtin_model()).unwrap() {
        let entry = entry.unwrap();
        if entry.file_name() != "chat_template.jinja" {
            std::fs::copy(entry.path(), folder.path().join(entry.file_name())).unwrap();
        }
    }
    let model = folder.path().to_str().unwrap();
    let warning = "warning: the model has no chat template: it gets the last message alone, as plain text";
    let question = "What is a rank?";
    let options = ["--max-tokens", "8", "--json"];
    let run = |model: &str, more: &[&str]| {
        let output = thunder(&[&["run", model, question], &options[..], more].concat()).output().unwrap();
        let error = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.success(), "{error}");
        (serde_json::from_slice::<Value>(&output.stdout).unwrap(), error.matches(warning).count())
    };
    let (plain, warnings) = run(model, &[]);
    assert_eq!(warnings, 1);
    let (with_system, warnings) = run(model, &["--system", "Answer briefly."]);
    assert_eq!((warnings, &with_system["text"]), (1, &plain["text"]));
    assert_eq!(with_system["prompt_tokens"], plain["prompt_tokens"]);
    let (templated, warnings) = run("builtin", &[]);
    assert_eq!(warnings, 0);
    assert!(templated["prompt_tokens"].as_u64() > plain["prompt_tokens"].as_u64(), "{templated}, {plain}");

    let lines = format!("{question}\n").repeat(2);
    let (text, error) = piped_with_errors(&[model, "--max-tokens", "8"], &lines);
    assert_eq!(error.matches(warning).count(), 1, "{error}");
    assert!(text.matches(plain["text"].as_str().unwrap()).count() >= 2, "{text}");
}

#[test]
fn commands_change_and_save_the_conversation() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).display().to_string();
    let (json, markdown) = (path("talk.json"), path("talk.md"));
    let lines = format!(
        "/regenerate\n/set top_q 1\n/set temperature 9\n/set max_tokens 4\nWhat is a rank?\n/regenerate\n/set max_tokens \
         default\n/regenerate\n/save {json}\n/save {json}\n/save {markdown}\n/undo\n/sing\n/help\n"
    );
    let text = piped(&[], &lines);
    for expected in [
        "there is no question yet",
        "no option \"top_q\"",
        "temperature is 9, but must be between 0 and 2",
        "max_tokens          4",
        "cannot write",
        "removed: What is a rank?",
        "unknown command /sing",
        "/regenerate",
    ] {
        assert!(text.contains(expected), "{expected:?} is not in {text}");
    }
    assert_eq!(text.matches("cut off after max_tokens 4").count(), 2, "{text}");
    let messages = saved(&folder);
    assert_eq!(messages.len(), 2, "an answer was replaced: {messages:?}");
    assert_eq!(messages[0], ("user".to_owned(), "What is a rank?".to_owned()));
    assert!(messages[1].1.len() > 40, "the last answer is whole: {messages:?}");
    assert!(std::fs::read_to_string(markdown).unwrap().contains("## Question\n\nWhat is a rank?"));
}

#[test]
fn lines_break_at_spaces_on_a_terminal_only() {
    let whole = piped(&[], "What is tensor parallelism?\n");
    let answer = whole.trim();
    assert!(answer.len() > 80 && !answer.contains('\n'), "a pipe gets the text as it is: {whole:?}");
    let columns = 30;
    let mut terminal = on_terminal(&[], columns);
    terminal.write(b"What is tensor parallelism?\r");
    terminal.wait_for(PROMPT, 2);
    let shown = terminal.shown();
    let (shown, _) = shown.split_once(ENTERED).unwrap().1.split_once(PROMPT).unwrap();
    // Without the words that were erased at the end of a line, and what they leave.
    let mut text = String::new();
    for part in shown.split_inclusive("\x1b[K") {
        match part.strip_suffix("\x1b[K").and_then(|part| part.rsplit_once("\x1b[")) {
            Some((kept, back)) if back.ends_with('D') => {
                let back: usize = back.trim_end_matches('D').parse().unwrap();
                let count = kept.chars().count() - back;
                text.extend(kept.chars().take(count));
            }
            _ => text.push_str(part),
        }
    }
    let lines: Vec<&str> = text.split("\r\n").map(str::trim).filter(|line| !line.is_empty()).collect();
    let words: Vec<&str> = answer.split_whitespace().collect();
    let broken = lines.iter().flat_map(|line| line.split_whitespace());
    assert_eq!(broken.collect::<Vec<_>>(), words, "no word is cut or lost: {shown:?}");
    let longest = lines.iter().map(|line| line.chars().count()).max().unwrap();
    assert!(longest < usize::from(columns) && longest > 15, "{lines:?}");
}

#[test]
fn lines_typed_ahead_or_pasted_are_kept() {
    let folder = tempfile::tempdir().unwrap();
    let mut terminal = on_terminal(&["--max-tokens", "8"], 100);
    // Without bracketed paste, as older terminals paste: several questions.
    terminal.write(b"What is a rank?\rWhat is a shard?\r");
    terminal.wait_for("(cut off", 2);
    // Bracketed: one question.
    terminal.write(b"\x1b[200~one\rtwo\x1b[201~\r");
    terminal.wait_for("(cut off", 3);
    // Typed: a line that goes on.
    terminal.write(b"three \\\rfour\r");
    terminal.wait_for("(cut off", 4);
    let save = format!("/save {}\r", folder.path().join("talk.json").display());
    terminal.write(save.as_bytes());
    terminal.wait_for("saved to", 1);
    terminal.write(b"\x04");
    assert!(terminal.wait().success());
    let questions: Vec<String> =
        saved(&folder).into_iter().filter(|(role, _)| role == "user").map(|(_, text)| text).collect();
    assert_eq!(questions, ["What is a rank?", "What is a shard?", "one\ntwo", "three \nfour"]);
}

#[test]
fn what_is_typed_during_an_answer_is_the_next_question() {
    // Long enough to type into: token 2 would end it.
    let mut terminal = on_terminal(&["--logit-bias", "2=-100", "--max-tokens", "600"], 100);
    terminal.write(b"What is tensor parallelism?\r");
    let has_begun = |shown: &str| shown.split_once(ENTERED).is_some_and(|(_, answer)| answer.len() > 20);
    while !has_begun(&terminal.shown()) {
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    terminal.write(b"/set seed 42\r");
    terminal.wait_for("(cut off", 1);
    terminal.wait_for("seed                42", 1);
    let shown = terminal.shown();
    let (answer, _) = shown.split_once("(cut off").unwrap();
    assert!(!answer.contains("seed"), "nothing is shown in the middle of the answer: {answer}");
}

#[cfg(target_os = "linux")]
#[test]
fn a_signal_gives_the_terminal_back_as_it_was() {
    use rustix::termios::{LocalModes, tcgetattr};
    let mut terminal = on_terminal(&["--ranks", "2"], 80);
    let ranks = common::children(terminal.id());
    assert_eq!(ranks.len(), 1);
    let is_edited = || !tcgetattr(terminal.near()).unwrap().local_modes.contains(LocalModes::ICANON);
    assert!(is_edited(), "the line editor reads single keys");
    // SAFETY: a process of this test.
    unsafe { libc::kill(terminal.id() as i32, libc::SIGTERM) };
    let status = terminal.wait();
    assert_eq!(std::os::unix::process::ExitStatusExt::signal(&status), Some(libc::SIGTERM));
    let is_edited = !tcgetattr(terminal.near()).unwrap().local_modes.contains(LocalModes::ICANON);
    assert!(!is_edited, "{}", terminal.shown());
    assert!(!terminal.shown().contains("error"), "{}", terminal.shown());
}

/// A process that is stopped until this is dropped.
#[cfg(target_os = "linux")]
struct Stopped(i32);

#[cfg(target_os = "linux")]
impl Stopped {
    fn new(process: i32) -> Self {
        // SAFETY: a process of this test.
        unsafe { libc::kill(process, libc::SIGSTOP) };
        Self(process)
    }
}

#[cfg(target_os = "linux")]
impl Drop for Stopped {
    fn drop(&mut self) {
        // SAFETY: as above.
        unsafe { libc::kill(self.0, libc::SIGCONT) };
    }
}

/// A bar shows that something happens before the answer begins.
#[cfg(target_os = "linux")]
#[test]
fn a_prompt_that_takes_over_a_second_shows_how_much_is_read() {
    let mut terminal = on_terminal(&["--ranks", "2", "--max-tokens", "4", "--temperature", "0"], 100);
    let stopped = Stopped::new(common::children(terminal.id())[0]);
    terminal.write(b"Hello\r");
    terminal.wait_for("reading the prompt", 1);
    terminal.wait_for(" tokens, 2s", 1);
    drop(stopped);
    terminal.wait_for(PROMPT, 2);
    let shown = terminal.shown();
    let (_, answer) = shown.rsplit_once(" tokens, ").unwrap();
    let is_cleared = answer.contains("\x1b[2K");
    assert!(is_cleared && answer.contains("(cut off"), "{shown:?}");
    terminal.write(b"/exit\r");
    assert!(terminal.wait().success());
}
