//! Finds the end of a JSON value that arrives in pieces.

/// Follows one JSON value, byte by byte, to its end. It checks only what determines the end:
/// strings and brackets.
#[derive(Debug, Clone, Default)]
pub(super) struct JsonScanner {
    /// Open brackets.
    depth: usize,
    in_string: bool,
    escaped: bool,
    /// A value has begun.
    began: bool,
}

/// How a piece of text continues a value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Scanned {
    /// The whole piece belongs to the value, which continues.
    GoesOn,
    /// The value ends before this byte of the piece.
    EndsAt(usize),
}

impl JsonScanner {
    /// A scanner inside of a value with one open bracket.
    pub fn inside() -> Self {
        Self { depth: 1, began: true, ..Self::default() }
    }

    /// Reads the next piece. After the end, the scanner is of no more use.
    pub fn scan(&mut self, piece: &str) -> Scanned {
        for (at, byte) in piece.bytes().enumerate() {
            if self.in_string {
                match byte {
                    _ if self.escaped => self.escaped = false,
                    b'\\' => self.escaped = true,
                    b'"' => {
                        self.in_string = false;
                        if self.depth == 0 {
                            return Scanned::EndsAt(at + 1);
                        }
                    }
                    _ => {}
                }
                continue;
            }
            match byte {
                b'"' if self.depth == 0 && self.began => return Scanned::EndsAt(at),
                b'"' => self.in_string = true,
                b'{' | b'[' => self.depth += 1,
                // No JSON: a mark, although brackets are open.
                b'<' => return Scanned::EndsAt(at),
                // A bracket of something around the value: a number or word has ended.
                b'}' | b']' if self.depth == 0 => return Scanned::EndsAt(at),
                b'}' | b']' => {
                    self.depth -= 1;
                    if self.depth == 0 {
                        return Scanned::EndsAt(at + 1);
                    }
                }
                b',' | b' ' | b'\n' | b'\r' | b'\t' if self.depth == 0 && self.began => {
                    return Scanned::EndsAt(at);
                }
                _ => {}
            }
            self.began |= !byte.is_ascii_whitespace();
        }
        Scanned::GoesOn
    }
}

/// The beginning of `{"name": "…", "arguments": {`.
#[derive(Debug, PartialEq)]
pub(super) enum CallHead {
    /// More text decides.
    NeedsMore,
    /// Something else.
    Other,
    /// A call of `name` with arguments from byte `arguments` on.
    Call { name: String, arguments: usize },
}

/// Reads the beginning of a call's object, with its fields in the usual order.
pub(super) fn call_head(text: &str) -> CallHead {
    let mut reader = Reader { text, at: 0 };
    match reader.head() {
        Ok(name) => CallHead::Call { name, arguments: reader.at },
        Err(Stop::NeedsMore) => CallHead::NeedsMore,
        Err(Stop::Other) => CallHead::Other,
    }
}

/// Why reading ended.
enum Stop {
    NeedsMore,
    Other,
}

struct Reader<'a> {
    text: &'a str,
    at: usize,
}

impl Reader<'_> {
    fn head(&mut self) -> Result<String, Stop> {
        self.token("{")?;
        self.token("\"name\"")?;
        self.token(":")?;
        let name = self.string()?;
        self.token(",")?;
        match self.token("\"arguments\"") {
            Err(Stop::Other) => self.token("\"parameters\"")?,
            other => other?,
        }
        self.token(":")?;
        self.white_space();
        match self.text[self.at..].chars().next() {
            None => Err(Stop::NeedsMore),
            Some('{') => Ok(name),
            Some(_) => Err(Stop::Other),
        }
    }

    fn white_space(&mut self) {
        let rest = &self.text[self.at..];
        self.at += rest.len() - rest.trim_start().len();
    }

    fn token(&mut self, token: &str) -> Result<(), Stop> {
        self.white_space();
        let rest = &self.text[self.at..];
        if rest.starts_with(token) {
            self.at += token.len();
            Ok(())
        } else if token.starts_with(rest) {
            Err(Stop::NeedsMore)
        } else {
            Err(Stop::Other)
        }
    }

    fn string(&mut self) -> Result<String, Stop> {
        self.white_space();
        let rest = &self.text[self.at..];
        match rest.chars().next() {
            None => return Err(Stop::NeedsMore),
            Some('"') => {}
            Some(_) => return Err(Stop::Other),
        }
        let Scanned::EndsAt(end) = JsonScanner::default().scan(rest) else { return Err(Stop::NeedsMore) };
        self.at += end;
        serde_json::from_str(&rest[..end]).map_err(|_| Stop::Other)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_end_where_their_bracket_closes() {
        let end = |text: &str| JsonScanner::default().scan(text);
        assert_eq!(end(r#"{"a": "}\"{", "b": [1, {}]} }"#), Scanned::EndsAt(27));
        assert_eq!(end(r#""a\\" "#), Scanned::EndsAt(5));
        assert_eq!(end("12 "), Scanned::EndsAt(2));
        assert_eq!(end("true}"), Scanned::EndsAt(4));
        assert_eq!(end(r#"{"a": "}"#), Scanned::GoesOn);
    }

    #[test]
    fn heads_of_calls_are_read() {
        let call = |name: &str, arguments| CallHead::Call { name: name.into(), arguments };
        assert_eq!(call_head(r#"{"name": "f", "arguments": {"a""#), call("f", 27));
        assert_eq!(call_head(r#"{ "name":"f\n","parameters":{"#), call("f\n", 28));
        assert_eq!(call_head(r#"{"name": "f", "arg"#), CallHead::NeedsMore);
        assert_eq!(call_head(r#"{"name": "f", "par"#), CallHead::NeedsMore);
        assert_eq!(call_head(r#"{"name": "f", "args"#), CallHead::Other);
        assert_eq!(call_head(r#"{"arguments": {"#), CallHead::Other);
        assert_eq!(call_head(r#"{"name": "f", "arguments": "text"#), CallHead::Other);
    }
}
