//! Cuts a rank's output into whole lines.

/// A line longer than this is passed on in pieces, at borders of characters: a bound on the launcher's memory.
const LONGEST_LINE_BYTES: usize = 8 << 20;

/// Collects what comes from one stream of one rank.
#[derive(Debug, Default)]
pub(super) struct Lines {
    /// What has come since the last newline.
    rest: Vec<u8>,
}

impl Lines {
    /// Appends to `output` the lines that `data` completes, each with `prefix` before it.
    pub fn push(&mut self, data: &[u8], prefix: &[u8], output: &mut Vec<u8>) {
        let mut data = data;
        while let Some(end) = data.iter().position(|byte| *byte == b'\n') {
            output.extend_from_slice(prefix);
            output.append(&mut self.rest);
            output.extend_from_slice(&data[..=end]);
            data = &data[end + 1..];
        }
        self.rest.extend_from_slice(data);
        if self.rest.len() > LONGEST_LINE_BYTES {
            let kept = self.rest.split_off(whole_characters(&self.rest));
            output.extend_from_slice(prefix);
            output.append(&mut self.rest);
            if !prefix.is_empty() {
                output.push(b'\n');
            }
            self.rest = kept;
        }
    }

    /// Whether an unfinished line is held.
    pub fn is_pending(&self) -> bool {
        !self.rest.is_empty()
    }

    /// Appends the characters that are complete, without waiting for the end of their line.
    pub fn flush_characters(&mut self, output: &mut Vec<u8>) {
        let kept = self.rest.split_off(whole_characters(&self.rest));
        output.append(&mut self.rest);
        self.rest = kept;
    }

    /// Appends an unfinished last line; with a newline if it has a prefix, so that the next one begins a line of its own.
    pub fn finish(&mut self, prefix: &[u8], output: &mut Vec<u8>) {
        if self.rest.is_empty() {
            return;
        }
        output.extend_from_slice(prefix);
        output.append(&mut self.rest);
        if !prefix.is_empty() {
            output.push(b'\n');
        }
    }
}

/// How much of `bytes` can be shown without cutting a character of UTF-8. What is not UTF-8 is never held back.
fn whole_characters(bytes: &[u8]) -> usize {
    const LONGEST_CHARACTER: usize = 4;
    for back in 1..=LONGEST_CHARACTER.min(bytes.len()) {
        let start = bytes.len() - back;
        let length = match bytes[start] {
            0xC2..=0xDF => 2,
            0xE0..=0xEF => 3,
            0xF0..=0xF4 => 4,
            0x80..=0xBF => continue,
            _ => 1,
        };
        return if length > back { start } else { bytes.len() };
    }
    bytes.len()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// `bytes` in pieces that end at `cuts`.
    fn pieces<'a>(bytes: &'a [u8], cuts: &[prop::sample::Index]) -> Vec<&'a [u8]> {
        let mut at: Vec<usize> = cuts.iter().map(|cut| cut.index(bytes.len() + 1)).collect();
        at.extend([0, bytes.len()]);
        at.sort_unstable();
        at.windows(2).map(|pair| &bytes[pair[0]..pair[1]]).collect()
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn lines_do_not_depend_on_where_reads_are_cut(text in "[aé€😀\n]{0,60}", cuts: Vec<prop::sample::Index>) {
            let (mut lines, mut output) = (Lines::default(), Vec::new());
            for piece in pieces(text.as_bytes(), &cuts) {
                lines.push(piece, b"[1] ", &mut output);
                prop_assert!(output.is_empty() || output.ends_with(b"\n"));
            }
            lines.finish(b"[1] ", &mut output);
            let expected: String = text.split_inclusive('\n').map(|line| format!("[1] {}\n", line.trim_end())).collect();
            prop_assert_eq!(String::from_utf8(output).unwrap(), expected);
        }

        #[test]
        fn flushed_pieces_are_whole_characters(text in "[aé€😀\n]{0,60}", cuts: Vec<prop::sample::Index>) {
            let (mut lines, mut output) = (Lines::default(), Vec::new());
            for piece in pieces(text.as_bytes(), &cuts) {
                lines.push(piece, b"", &mut output);
                lines.flush_characters(&mut output);
                prop_assert!(std::str::from_utf8(&output).is_ok());
            }
            lines.finish(b"", &mut output);
            prop_assert_eq!(String::from_utf8(output).unwrap(), text);
        }

        #[test]
        fn bytes_that_are_no_text_come_through(bytes: Vec<u8>, cuts: Vec<prop::sample::Index>) {
            let (mut lines, mut output) = (Lines::default(), Vec::new());
            for piece in pieces(&bytes, &cuts) {
                lines.push(piece, b"", &mut output);
                lines.flush_characters(&mut output);
            }
            lines.finish(b"", &mut output);
            prop_assert_eq!(output, bytes);
        }
    }

    #[test]
    fn an_endless_line_does_not_fill_the_memory() {
        let (mut lines, mut output) = (Lines::default(), Vec::new());
        let piece = "€".repeat(1 << 16);
        while output.is_empty() {
            lines.push(piece.as_bytes(), b"[0] ", &mut output);
            assert!(lines.rest.len() <= LONGEST_LINE_BYTES + piece.len());
        }
        assert!(std::str::from_utf8(&output).is_ok_and(|text| text.ends_with("€\n")));
    }
}
