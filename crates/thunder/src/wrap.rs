//! Text in pieces for a terminal: lines break at spaces.

use std::fmt::Write;

use unicode_width::UnicodeWidthChar;

/// Narrower terminals get the text unchanged.
const NARROWEST_COLUMNS: usize = 20;
const TAB_COLUMNS: usize = 8;
/// Begins and ends a block of code in Markdown, whose lines are not broken so that they can be
/// copied.
const FENCE: &str = "```";

/// Breaks lines at spaces. A piece is shown at once; a word that becomes too long for its line is
/// erased and written on the next line.
#[derive(Debug, Default)]
pub struct Wrapper {
    column: usize,
    /// The word before the cursor, and its columns.
    word: String,
    word_columns: usize,
    /// The first characters of this line of the text.
    line_start: String,
    in_code: bool,
}

impl Wrapper {
    /// The characters to send to a terminal of this width for the next piece of text. `None`: no
    /// terminal.
    pub fn push(&mut self, text: &str, width: Option<usize>) -> String {
        let Some(width) = width.filter(|width| *width >= NARROWEST_COLUMNS) else { return text.to_owned() };
        let mut out = String::with_capacity(text.len() + 8);
        // The last column stays empty: terminals differ in where the cursor is after it.
        text.chars().for_each(|character| self.character(character, width - 1, &mut out));
        out
    }

    fn character(&mut self, character: char, limit: usize, out: &mut String) {
        if character == '\n' {
            self.in_code ^= self.line_start.starts_with(FENCE);
            self.line_start.clear();
            return self.break_line(out);
        }
        if self.line_start.len() < FENCE.len() && !(self.line_start.is_empty() && character == ' ') {
            self.line_start.push(character);
        }
        let columns = match character {
            '\t' => TAB_COLUMNS - self.column % TAB_COLUMNS,
            other => other.width().unwrap_or(0),
        };
        let is_space = matches!(character, ' ' | '\t');
        if !self.in_code && self.column + columns > limit {
            if is_space {
                return self.break_line(out);
            }
            self.move_word(out);
        }
        out.push(character);
        self.column += columns;
        // A line may break after a space, and after a wide character, as in Chinese.
        if is_space || columns > 1 {
            self.word.clear();
            self.word_columns = 0;
        } else {
            self.word.push(character);
            self.word_columns += columns;
        }
    }

    /// Moves the word before the cursor to a new line, unless it has the whole line.
    fn move_word(&mut self, out: &mut String) {
        if self.word_columns == self.column || self.word_columns == 0 {
            return self.break_line(out);
        }
        let _ = write!(out, "\x1b[{}D\x1b[K\n{}", self.word_columns, self.word);
        self.column = self.word_columns;
    }

    fn break_line(&mut self, out: &mut String) {
        out.push('\n');
        self.column = 0;
        self.word.clear();
        self.word_columns = 0;
    }
}

/// Columns of the terminal on standard output, if it is one.
pub fn terminal_width() -> Option<usize> {
    rustix::termios::tcgetwinsize(std::io::stdout()).ok().map(|size| usize::from(size.ws_col))
}

#[cfg(test)]
mod tests {
    use super::*;

    const WIDTH: usize = 24;

    /// The screen of a terminal after these pieces.
    fn shown(pieces: &[&str]) -> Vec<String> {
        let mut wrapper = Wrapper::default();
        let sent: String = pieces.iter().map(|piece| wrapper.push(piece, Some(WIDTH))).collect();
        let (mut lines, mut rest) = (vec![String::new()], sent.as_str());
        while let Some(character) = rest.chars().next() {
            rest = &rest[character.len_utf8()..];
            let line = lines.last_mut().expect("a line");
            match character {
                '\n' => lines.push(String::new()),
                '\x1b' => {
                    let (back, after) = rest[1..].split_once("D\x1b[K").expect("back, and clear to the end");
                    let kept = line.chars().count() - back.parse::<usize>().expect("columns");
                    *line = line.chars().take(kept).collect();
                    rest = after;
                }
                other => line.push(other),
            }
        }
        lines
    }

    #[test]
    fn lines_break_at_spaces_wherever_the_text_is_cut() {
        let text = "Every wait is bounded, and a stream that cannot go on ends with an error.\n\nTwo.";
        let expected = [
            "Every wait is bounded,",
            "and a stream that",
            "cannot go on ends with",
            "an error.",
            "",
            "Two.",
        ];
        for size in [1, 2, 3, 7, 100] {
            let characters: Vec<char> = text.chars().collect();
            let pieces: Vec<String> = characters.chunks(size).map(|piece| piece.iter().collect()).collect();
            let pieces: Vec<&str> = pieces.iter().map(String::as_str).collect();
            let lines: Vec<String> = shown(&pieces).iter().map(|line| line.trim_end().to_owned()).collect();
            assert_eq!(lines, expected, "in pieces of {size}");
        }
    }

    #[test]
    fn words_longer_than_a_line_and_wide_characters_break_anywhere() {
        let lines = shown(&["see ", &"x".repeat(50), " 雷雲は机の上の機械を一つのエンジンにまとめる"]);
        assert_eq!(lines[0], "see ");
        for line in &lines {
            let columns: usize = line.chars().map(|c| c.width().unwrap_or(0)).sum();
            assert!(columns < WIDTH, "{line:?} has {columns} columns");
        }
        assert_eq!(lines.len(), 1 + 3 + 2, "{lines:?}");
    }

    #[test]
    fn code_is_not_broken() {
        let code = "let ranks = vec![0, 1, 2, 3, 4, 5, 6];";
        let lines = shown(&["So:\n``", "`rust\n", code, "\n```\nand the words after the code"]);
        assert_eq!(lines[2], code);
        assert_eq!(&lines[4..], ["and the words after the", "code"]);
    }

    #[test]
    fn without_a_terminal_nothing_changes() {
        let text = "word ".repeat(40);
        assert_eq!(Wrapper::default().push(&text, None), text);
        assert_eq!(Wrapper::default().push(&text, Some(5)), text);
    }
}
