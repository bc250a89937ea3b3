//! What the documents say exists: commands with their options, and messages.

use std::collections::BTreeSet;
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

/// The words of a shell's line; what stands in double quotes is one.
fn words(line: &str) -> Vec<String> {
    let mut words = Vec::new();
    for (index, part) in line.split('"').enumerate() {
        if index % 2 == 1 {
            words.push(part.to_owned());
        } else {
            words.extend(part.split_whitespace().map(str::to_owned));
        }
    }
    words
}

/// The commands of a line of a code block: without comments, variables before and files after them.
fn commands(line: &str) -> impl Iterator<Item = Vec<String>> {
    let line = line.split(" #").next().unwrap_or_default().trim().trim_start_matches("/usr/local/bin/");
    line.split(';').filter_map(|command| {
        let words = words(command);
        let is_variable = |word: &String| word.contains('=') && !word.starts_with('-');
        let begin = words.iter().position(|word| !is_variable(word) && !word.ends_with(')'))?;
        let end = words.iter().position(|word| [">", "|", "&&", "2>"].contains(&word.as_str()));
        let words = words[begin..end.unwrap_or(words.len())].to_vec();
        // `decode|prefill` stands for two commands.
        let is_whole = words.iter().all(|word| !word.contains('|'));
        (words.first()? == "thunder" && is_whole).then_some(words)
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
            checked += 1;
            let Err(error) = Cli::try_parse_from(&words) else { continue };
            use clap::error::ErrorKind::{DisplayHelp, DisplayVersion, ValueValidation};
            // A word in capitals stands for a value.
            let has_placeholder =
                words.iter().any(|word| word.chars().all(|letter| letter.is_ascii_uppercase()));
            let is_fine = match error.kind() {
                DisplayHelp | DisplayVersion => true,
                ValueValidation => has_placeholder,
                _ => false,
            };
            assert!(is_fine, "{name}: {words:?}: {error}");
        }
    }
    assert!(checked > 40, "{checked} commands: code blocks are not where this test looks");
}

/// Sources as one text, with strings that go on in the next line joined.
fn sources(folder: &Path, text: &mut String) {
    for entry in fs::read_dir(folder).expect("a folder") {
        let path = entry.expect("an entry").path();
        let extension = path.extension().map(|extension| extension.to_string_lossy().into_owned());
        if path.is_dir() {
            sources(&path, text);
        } else if matches!(extension.as_deref(), Some("rs" | "ts" | "tsx")) {
            for line in fs::read_to_string(&path).expect("a source").lines() {
                let line = line.trim_start();
                match line.strip_suffix('\\') {
                    Some(begin) => text.push_str(begin),
                    None => *text += &format!("{line}\n"),
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

#[test]
fn every_time_limit_in_a_variable_is_documented() {
    let mut text = String::new();
    sources(&repository().join("crates"), &mut text);
    let document = fs::read_to_string(repository().join("docs/two-machines.md")).expect("the document");
    let is_name = |letter: char| letter.is_ascii_uppercase() || letter == '_';
    let names = text.split(|letter| !is_name(letter));
    let found: BTreeSet<&str> =
        names.filter(|name| name.starts_with("THUNDER_") && name.ends_with("_LIMIT_MS")).collect();
    assert!(found.len() >= 3, "{found:?}");
    for name in found {
        assert!(document.contains(&format!("| `{name}` |")), "docs/two-machines.md has no row for {name}");
    }
}
