//! What the documents say exists: commands with their options, and messages.

use std::fs;
use std::path::{Path, PathBuf};

use clap::Parser;

use crate::Cli;

fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// The documents for users, with their names.
fn documents() -> Vec<(String, String)> {
    let mut files = vec![repository().join("README.md")];
    let entries = fs::read_dir(repository().join("docs")).expect("the folder of documents");
    files.extend(entries.map(|entry| entry.expect("a file").path()));
    files.retain(|file| file.extension().is_some_and(|extension| extension == "md"));
    files.sort();
    let read = |file: PathBuf| (file.display().to_string(), fs::read_to_string(&file).expect("a document"));
    files.into_iter().map(read).collect()
}

/// The commands of a line of a code block: without comments, variables before and files after them.
fn commands(line: &str) -> impl Iterator<Item = Vec<String>> {
    let line = line.split(" #").next().unwrap_or_default().trim().trim_start_matches("/usr/local/bin/");
    line.split(';').filter_map(|command| {
        let words: Vec<String> =
            command.split_whitespace().map(|word| word.trim_matches('"').to_owned()).collect();
        let is_variable = |word: &String| word.contains('=') && !word.starts_with('-');
        let begin = words.iter().position(|word| !is_variable(word) && !word.ends_with(')'))?;
        let end = words.iter().position(|word| [">", "|", "&&", "2>"].contains(&word.as_str()));
        let words = words[begin..end.unwrap_or(words.len())].to_vec();
        (words.first()? == "thunder").then_some(words)
    })
}

/// Lines of code blocks: indented or fenced ones.
fn code_lines(text: &str) -> impl Iterator<Item = &str> {
    let mut fenced = false;
    text.lines().filter(move |line| {
        if line.starts_with("```") {
            fenced = !fenced;
            return false;
        }
        fenced || line.starts_with("    ")
    })
}

#[test]
fn every_command_in_the_documents_exists_with_its_options() {
    let mut checked = 0;
    for (name, text) in documents() {
        for words in code_lines(&text).flat_map(commands) {
            // A quoted text has become several words.
            let is_prose = words.iter().any(|word| word.ends_with('?') || word == "hello");
            let words: Vec<&str> =
                words.iter().map(String::as_str).filter(|word| !(is_prose && word.ends_with('?'))).collect();
            checked += 1;
            if let Err(error) = Cli::try_parse_from(&words) {
                use clap::error::ErrorKind::{DisplayHelp, DisplayVersion, UnknownArgument};
                let shows = matches!(error.kind(), DisplayHelp | DisplayVersion);
                let is_text = is_prose && error.kind() == UnknownArgument;
                assert!(shows || is_text, "{name}: {words:?}: {error}");
            }
        }
    }
    assert!(checked > 40, "{checked} commands: code blocks are not where this test looks");
}

/// Sources as one text, with strings that go on in the next line joined.
fn sources(folder: &Path, text: &mut String) {
    for entry in fs::read_dir(folder).expect("a folder") {
        let path = entry.expect("an entry").path();
        if path.is_dir() {
            sources(&path, text);
        } else if path
            .extension()
            .is_some_and(|extension| ["rs", "ts", "tsx"].iter().any(|known| extension == *known))
        {
            let source = fs::read_to_string(&path).expect("a source");
            let mut lines = source.lines().peekable();
            while let Some(line) = lines.next() {
                match line.strip_suffix('\\') {
                    Some(begin) => text.push_str(if text.is_empty() { begin } else { begin.trim_start() }),
                    None => {
                        text.push_str(line.trim_start());
                        text.push('\n');
                    }
                }
            }
        }
    }
}

#[test]
fn every_message_in_the_troubleshooting_is_one_of_ours() {
    let mut text = String::new();
    for folder in ["crates", "dashboard/src"] {
        sources(&repository().join(folder), &mut text);
    }
    let page = fs::read_to_string(repository().join("docs/troubleshooting.md")).expect("the page");
    let messages: Vec<&str> =
        page.lines().filter_map(|line| line.strip_prefix("### `")?.strip_suffix('`')).collect();
    assert!(messages.len() > 20, "{messages:?}");
    for message in messages {
        assert!(text.contains(message), "docs/troubleshooting.md: no source has the message `{message}`");
    }
}
