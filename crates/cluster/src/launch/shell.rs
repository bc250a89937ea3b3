//! Words and commands for a shell.

/// `text` as one word of a shell command.
pub(super) fn quote(text: &str) -> String {
    let plain = |letter: char| letter.is_ascii_alphanumeric() || "_-./:=@%+,".contains(letter);
    if !text.is_empty() && text.chars().all(plain) {
        return text.to_owned();
    }
    format!("'{}'", text.replace('\'', r"'\''"))
}

/// A command line for a shell.
pub(super) fn join(command: &[String]) -> String {
    command.iter().map(|word| quote(word)).collect::<Vec<_>>().join(" ")
}
