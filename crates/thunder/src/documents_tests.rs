//! Checks that commands, options and messages in the documents exist.

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

/// The words of a shell's line; text in double quotes is one word.
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

/// The text between backquotes in prose and tables, with line ends as spaces.
fn inline_code(text: &str) -> Vec<String> {
    let mut found = Vec::new();
    let mut fenced = false;
    let mut paragraph = String::new();
    for line in text.lines().chain([""]) {
        if line.starts_with("```") {
            fenced = !fenced;
        } else if fenced || line.starts_with("    ") {
            continue;
        } else if line.trim().is_empty() {
            let spans = paragraph.split('`').skip(1).step_by(2);
            found.extend(spans.map(|span| span.split_whitespace().collect::<Vec<_>>().join(" ")));
            paragraph.clear();
        } else {
            paragraph += &format!("{line}\n");
        }
    }
    found
}

/// A command without placeholders for more words: `…`, `[NODE]` and `…]`.
fn without_omissions(words: Vec<String>) -> Vec<String> {
    let trimmed = words.into_iter().map(|word| word.trim_matches(['[', ']', ',']).replace("...", "…"));
    trimmed.filter(|word| !word.is_empty() && word != "…").collect()
}

/// The command inside another one: `thunder launch … -- thunder serve`, `thunder service install --
/// serve`.
fn inner(words: &[String]) -> Option<Vec<String>> {
    let end = words.iter().position(|word| word == "--")?;
    let rest = &words[end + 1..];
    match (words[1].as_str(), rest.first()?.as_str()) {
        (_, "thunder") => Some(rest.to_vec()),
        ("service", _) => Some([&["thunder".to_owned()], rest].concat()),
        _ => None,
    }
}

/// Checks that clap knows the command with its options. `mentioned`: words may be missing at its
/// end.
fn check_command(name: &str, words: &[String], mentioned: bool) {
    use clap::error::{ContextKind, ContextValue, ErrorKind};
    if let Some(inner) = inner(words) {
        check_command(name, &inner, mentioned);
    }
    let Err(error) = Cli::try_parse_from(words) else { return };
    // A word in capitals stands for a value.
    let is_placeholder = |word: &String| word.chars().all(|letter| letter.is_ascii_uppercase());
    let has_no_value =
        matches!(error.get(ContextKind::InvalidValue), Some(ContextValue::String(value)) if value.is_empty());
    let is_fine = match error.kind() {
        ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => true,
        ErrorKind::ValueValidation => words.iter().any(is_placeholder),
        // `--for GOAL`, or an option without its value.
        ErrorKind::InvalidValue => mentioned && (has_no_value || words.iter().any(is_placeholder)),
        ErrorKind::MissingRequiredArgument
        | ErrorKind::MissingSubcommand
        | ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => mentioned,
        // `thunder COMMAND --help` means any command.
        ErrorKind::InvalidSubcommand => mentioned && words[1] == "COMMAND",
        _ => false,
    };
    assert!(is_fine, "{name}: {words:?}: {error}");
}

#[test]
fn every_command_in_the_documents_exists_with_its_options() {
    let mut checked = 0;
    for (name, text) in documents() {
        for words in code_lines(&text).flat_map(commands) {
            checked += 1;
            check_command(&name, &words, false);
        }
    }
    assert!(checked > 40, "{checked} commands: code blocks are not where this test looks");
}

#[test]
fn every_command_that_the_documents_mention_exists_with_its_options() {
    let mut checked = 0;
    for (name, text) in documents() {
        for words in inline_code(&text).iter().flat_map(|code| commands(code)) {
            checked += 1;
            check_command(&name, &without_omissions(words), true);
        }
    }
    assert!(checked > 200, "{checked} commands: prose is not where this test looks");
}

/// Options in the documents that belong to other programs: cargo, `cargo xtask` and `bench/*.py`.
const OF_OTHERS: [&str; 6] = ["test", "only-pull", "cores", "burst", "base-url", "seconds"];

#[test]
fn every_option_that_the_documents_mention_is_one_of_ours() {
    fn options(command: &clap::Command, known: &mut BTreeSet<String>) {
        let names = command.get_arguments().flat_map(|argument| {
            argument.get_long().into_iter().chain(argument.get_all_aliases().into_iter().flatten())
        });
        known.extend(names.map(str::to_owned));
        command.get_subcommands().for_each(|command| options(command, known));
    }
    let mut known = BTreeSet::new();
    let mut program = <Cli as clap::CommandFactory>::command();
    program.build();
    options(&program, &mut known);
    let mut unknown = Vec::new();
    for (name, text) in documents() {
        for code in inline_code(&text).iter().filter(|code| code.starts_with("--")) {
            for option in code.split(' ').filter_map(|word| word.strip_prefix("--")) {
                let option = option.split(['=', ',']).next().unwrap_or_default();
                if !option.is_empty() && !known.contains(option) && !OF_OTHERS.contains(&option) {
                    unknown.push(format!("{name}: --{option} of `{code}`"));
                }
            }
        }
    }
    assert!(unknown.is_empty(), "{}", unknown.join("\n"));
}

#[test]
fn a_command_that_does_not_exist_is_found_in_prose() {
    let text = "Run `thunder keys\ncreate NAME --frob`, or `thunder limits`.\n\n    `thunder code`\n";
    let found: Vec<_> = inline_code(text).iter().flat_map(|code| commands(code)).collect();
    assert_eq!(found, [vec!["thunder", "keys", "create", "NAME", "--frob"], vec!["thunder", "limits"]]);
    let fails = |words: &str| {
        let words: Vec<String> = words.split(' ').map(str::to_owned).collect();
        std::panic::catch_unwind(|| check_command("x", &without_omissions(words), true)).is_err()
    };
    for wrong in [
        "thunder keys create NAME --frob",
        "thunder keys creat",
        "thunder service install -- serve --frob",
        "thunder launch --hosts a,b -- thunder frob",
        "thunder cluster logs [NODE] OTHER",
    ] {
        assert!(fails(wrong), "{wrong}");
    }
    for right in ["thunder keys create", "thunder service install -- up …", "thunder serve --step-time"] {
        assert!(!fails(right), "{right}");
    }
}

/// Sources as one text, with continued strings joined.
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
