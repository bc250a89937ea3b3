//! Cuts a rank's output into whole lines.

/// Longer lines are passed on in pieces, cut between characters. This bounds the launcher's memory.
const LONGEST_LINE_BYTES: usize = 8 << 20;

/// The unfinished line of one stream of one rank.
#[derive(Debug, Default)]
pub(crate) struct Lines {
    /// Bytes since the last newline.
    rest: Vec<u8>,
}

impl Lines {
    /// Appends to `output` the lines that `data` completes, each after `prefix`.
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

    /// Appends the complete characters of an unfinished line.
    pub fn flush_characters(&mut self, output: &mut Vec<u8>) {
        let kept = self.rest.split_off(whole_characters(&self.rest));
        output.append(&mut self.rest);
        self.rest = kept;
    }

    /// Appends an unfinished last line. After a prefix it gets a newline, so that the next rank's
    /// line starts on its own line.
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

/// Length of the part of `bytes` that does not cut a UTF-8 character. Bytes that are not UTF-8 are
/// never held back.
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

    /// `bytes` cut at `cuts`.
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
        fn bytes_that_are_not_text_come_through(bytes: Vec<u8>, cuts: Vec<prop::sample::Index>) {
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
    fn an_endless_line_does_not_fill_memory() {
        let (mut lines, mut output) = (Lines::default(), Vec::new());
        let piece = "€".repeat(1 << 16);
        while output.is_empty() {
            lines.push(piece.as_bytes(), b"[0] ", &mut output);
            assert!(lines.rest.len() <= LONGEST_LINE_BYTES + piece.len());
        }
        assert!(std::str::from_utf8(&output).is_ok_and(|text| text.ends_with("€\n")));
    }
}
