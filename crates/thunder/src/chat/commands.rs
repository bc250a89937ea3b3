//! A line of a chat: a question, or a command that begins with a slash.

/// Shown by `/help`.
pub const HELP: &str = "\
/regenerate       answer the last question again
/undo             remove the last question and its answer
/clear            start over
/system TEXT      set the system prompt and start over; without TEXT, remove it
/set              show the sampling options
/set NAME VALUE   change one, e.g. /set temperature 0.7; VALUE default undoes it
/save FILE        write the conversation to a new file: JSON if it ends in .json, else Markdown
/quit             end (so does Ctrl-D)
A line that ends with \\ goes on in the next. Pasted lines are one question. Ctrl-C stops an answer.";

/// A line of a chat.
#[derive(Debug, PartialEq)]
pub enum Line<'a> {
    Nothing,
    Question(&'a str),
    Regenerate,
    Undo,
    Clear,
    System(&'a str),
    /// Name and value; none: show all.
    Set(Option<(&'a str, &'a str)>),
    Save(&'a str),
    Help,
    Quit,
    /// An unknown or incomplete command, with a message for the user.
    Wrong(String),
}

/// Reads a line. Text like `/etc/hosts` is a question.
pub fn parse(line: &str) -> Line<'_> {
    let line = line.trim();
    if line.is_empty() {
        return Line::Nothing;
    }
    let (word, rest) = line.split_once(char::is_whitespace).unwrap_or((line, ""));
    let rest = rest.trim();
    let is_command = word.strip_prefix('/').is_some_and(|name| name.bytes().all(|b| b.is_ascii_alphabetic()));
    if !is_command {
        return Line::Question(line);
    }
    match word {
        "/regenerate" => Line::Regenerate,
        "/undo" => Line::Undo,
        "/clear" => Line::Clear,
        "/system" => Line::System(rest),
        "/set" if rest.is_empty() => Line::Set(None),
        "/set" => match rest.split_once(|c: char| c.is_whitespace() || c == '=') {
            Some((name, value)) => Line::Set(Some((name, value.trim()))),
            None => Line::Wrong(format!("/set {rest} needs a value, e.g. /set {rest} default")),
        },
        "/save" if rest.is_empty() => Line::Wrong("/save needs the name of a new file".into()),
        "/save" => Line::Save(rest),
        "/help" => Line::Help,
        "/quit" | "/exit" => Line::Quit,
        _ => Line::Wrong(format!("unknown command {word}; /help lists the commands")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_questions_or_commands() {
        for (line, expected) in [
            ("", Line::Nothing),
            (" \t", Line::Nothing),
            (" What is a rank? ", Line::Question("What is a rank?")),
            ("/etc/hosts: what is it?", Line::Question("/etc/hosts: what is it?")),
            ("/2 of it", Line::Question("/2 of it")),
            ("/undo", Line::Undo),
            ("/exit", Line::Quit),
            ("/system  Be brief. ", Line::System("Be brief.")),
            ("/system", Line::System("")),
            ("/set", Line::Set(None)),
            ("/set temperature 0.7", Line::Set(Some(("temperature", "0.7")))),
            ("/set top_k=40", Line::Set(Some(("top_k", "40")))),
            ("/save a b.md", Line::Save("a b.md")),
        ] {
            assert_eq!(parse(line), expected, "{line:?}");
        }
        for (line, part) in [("/sing", "/sing"), ("/save", "file"), ("/set seed", "value")] {
            assert!(matches!(parse(line), Line::Wrong(told) if told.contains(part)), "{line}");
        }
    }
}
