//! `cargo xtask lines`: lists files, functions and comments longer than CONTRIBUTING.md allows, and
//! banned phrases.

use crate::repository;
use anyhow::Context;
use std::{fs, path::Path, process::Command};

/// Maximum columns of a comment's line.
const COMMENT_COLUMNS: usize = 100;
/// One phrase a line. `./test format` reads the same file.
const BANNED_PHRASES: &str = include_str!("../../tools/banned-phrases.txt");

#[derive(clap::Args)]
pub struct Args {
    /// Maximum lines of a file
    #[arg(long, default_value_t = 400)]
    max: usize,
    /// Maximum lines of a function
    #[arg(long, default_value_t = 60)]
    function: usize,
    /// Include tests, which may be longer
    #[arg(long)]
    tests: bool,
}

pub fn run(args: &Args) -> anyhow::Result<()> {
    let root = repository();
    let output = Command::new("git")
        .args(["ls-files", "--cached", "--others", "--exclude-standard", "-z"])
        .args(["*.rs", "*.py", "*.sh", "*.md", "test", ":!builtin/data", ":!tests/golden/cases"])
        .current_dir(&root)
        .output()
        .context("could not start git")?;
    anyhow::ensure!(output.status.success(), "git ls-files: {}", String::from_utf8_lossy(&output.stderr));
    let names = String::from_utf8(output.stdout).context("a file's name is not UTF-8")?;
    let (mut files, mut functions, mut comments, mut phrases) = (vec![], vec![], vec![], vec![]);
    for name in names.split('\0').filter(|name| !name.is_empty()) {
        // A file that was deleted but is still in the index has no lines.
        let Ok(text) = fs::read_to_string(root.join(name)) else { continue };
        let is_document = name.ends_with(".md");
        if !is_document && (args.tests || !is_test(name)) {
            let lines = text.lines().count();
            if lines > args.max {
                files.push((lines, name.to_owned()));
            }
            let long = long_functions(&text, args.function, args.tests);
            functions
                .extend(long.into_iter().map(|(lines, at, what)| (lines, format!("{name}:{at} {what}"))));
        }
        if !is_document {
            comments.extend(long_comments(&text).map(|(at, columns)| (columns, format!("{name}:{at}"))));
        }
        phrases.extend(banned_phrases(&text).map(|(at, phrase)| format!("{name}:{at} {phrase}")));
    }
    let print = |mut found: Vec<(usize, String)>, title: String| {
        println!("{} {title}", found.len());
        found.sort_unstable_by(|a, b| b.cmp(a));
        found.iter().for_each(|(size, what)| println!("{size:6}  {what}"));
    };
    print(files, format!("files over {} lines", args.max));
    print(functions, format!("functions over {} lines (kernels may be)", args.function));
    print(comments, format!("lines of comment over {COMMENT_COLUMNS} columns"));
    println!("{} banned phrases (tools/banned-phrases.txt)", phrases.len());
    phrases.iter().for_each(|found| println!("        {found}"));
    Ok(())
}

/// Functions with more than `max` lines from `fn` to the closing brace: lines, line number, name.
/// Relies on rustfmt's indentation. Unit tests at a file's end count only with `tests`.
fn long_functions(text: &str, max: usize, tests: bool) -> Vec<(usize, usize, String)> {
    let lines: Vec<&str> = text.lines().collect();
    let end = match lines.iter().position(|line| *line == "#[cfg(test)]") {
        Some(at) if !tests => at,
        _ => lines.len(),
    };
    let mut found = Vec::new();
    for (at, line) in lines[..end].iter().enumerate() {
        let code = line.trim_start();
        let Some(name) = function_name(code) else { continue };
        // A function on one line, for example in a macro.
        if code.ends_with('}') {
            continue;
        }
        let indentation = &line[..line.len() - code.len()];
        let closing = format!("{indentation}}}");
        // A declaration without a body ends with `;` before any brace is closed.
        let body = lines[at..].iter().position(|line| *line == closing);
        let declaration = lines[at..].iter().position(|line| line.ends_with(';'));
        let opens = lines[at..].iter().position(|line| line.ends_with('{'));
        if let (Some(length), Some(opens)) = (body, opens)
            && declaration.is_none_or(|declaration| opens < declaration)
            && length + 1 > max
        {
            found.push((length + 1, at + 1, name.to_owned()));
        }
    }
    found
}

/// The name in a line that begins a function.
fn function_name(code: &str) -> Option<&str> {
    let at = if code.starts_with("fn ") { 0 } else { code.find(" fn ")? + 1 };
    let is_qualifier = |word: &str| {
        word.starts_with("pub")
            || ["const", "unsafe", "async", "extern", "\"C\"", "in"].contains(&word)
            || word.ends_with(')')
    };
    if !code[..at].split_whitespace().all(is_qualifier) {
        return None;
    }
    code[at + 3..].split(['(', '<']).next()
}

/// Line number and columns of comments that are too long.
fn long_comments(text: &str) -> impl Iterator<Item = (usize, usize)> {
    (1..).zip(text.lines()).filter_map(|(at, line)| {
        let start = line.trim_start();
        let columns = line.chars().count();
        let is_comment = start.starts_with("//") || (start.starts_with('#') && !start.starts_with("#["));
        (is_comment && columns > COMMENT_COLUMNS).then_some((at, columns))
    })
}

/// Line number and phrase, for each banned phrase as whole words.
fn banned_phrases(text: &str) -> impl Iterator<Item = (usize, &'static str)> {
    (1..).zip(text.lines()).flat_map(|(at, line)| {
        let lower = line.to_lowercase();
        BANNED_PHRASES.lines().filter(move |phrase| has_words(&lower, phrase)).map(move |phrase| (at, phrase))
    })
}

fn has_words(line: &str, phrase: &str) -> bool {
    let is_word = |letter: char| letter.is_alphanumeric() || letter == '_';
    line.match_indices(phrase)
        .any(|(at, _)| !line[..at].ends_with(is_word) && !line[at + phrase.len()..].starts_with(is_word))
}

/// True for files that hold tests only: in a `tests` folder, or called `tests`.
fn is_test(name: &str) -> bool {
    let path = Path::new(name);
    path.iter().any(|part| part == "tests") || path.file_stem().is_some_and(|stem| stem == "tests")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tests_are_told_from_code() {
        for name in
            ["crates/model/tests/model/golden.rs", "crates/model/src/plan/tests.rs", "tests/golden/make.py"]
        {
            assert!(is_test(name), "{name}");
        }
        for name in ["crates/model/src/latest.rs", "crates/tests-of-x/src/lib.rs", "xtask/src/main.rs"] {
            assert!(!is_test(name), "{name}");
        }
    }

    #[test]
    fn functions_are_measured_to_their_closing_brace() {
        let text = "trait T {\n    fn declared(\n        &self,\n    );\n}\n\npub(super) fn long() {\n    1;\n    2;\n}\n\
                    \nfn short() {\n}\n\n#[cfg(test)]\nmod tests {\n    fn test() {\n        1;\n        2;\n    }\n}\n";
        let found = |tests| long_functions(text, 3, tests);
        assert_eq!(found(false), [(4, 7, "long".to_owned())]);
        assert_eq!(found(true), [(4, 7, "long".to_owned()), (4, 17, "test".to_owned())]);
    }

    #[test]
    fn long_comments_and_banned_phrases_are_found() {
        let phrase = BANNED_PHRASES.lines().next().unwrap();
        let (long, attribute) = ("é".repeat(100), "a".repeat(100));
        let text =
            format!("let x = 1; // fine\n    // {long}\n#[allow({attribute})]\n{phrase}s\n// {phrase}.");
        assert_eq!(long_comments(&text).collect::<Vec<_>>(), [(2, 107)]);
        assert_eq!(banned_phrases(&text).collect::<Vec<_>>(), [(5, phrase)]);
    }
}
