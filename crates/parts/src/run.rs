//! Ranges at a constant distance, as the rows of a window of a matrix have them.

use std::fmt;
use std::ops::Range;
use std::str::FromStr;

/// `count` ranges of `len` bytes, each beginning `stride` bytes after the one before. Neither `len`
/// nor `count` is 0, and `stride` is at least `len`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Run {
    /// The first byte.
    pub first: u64,
    /// Bytes of each range.
    pub len: u64,
    /// From the start of one range to the start of the next.
    pub stride: u64,
    /// Ranges.
    pub count: u64,
}

impl Run {
    /// A single range, which is not empty.
    pub fn of(range: Range<u64>) -> Self {
        let len = range.end - range.start;
        Self { first: range.start, len, stride: len, count: 1 }
    }

    /// The ranges, in order.
    pub fn ranges(self) -> impl Iterator<Item = Range<u64>> {
        (0..self.count).map(move |index| {
            let start = self.first + index * self.stride;
            start..start + self.len
        })
    }

    /// Bytes of all ranges.
    pub const fn bytes(&self) -> u64 {
        self.len * self.count
    }

    /// The byte after the last.
    pub const fn end(&self) -> u64 {
        self.first + (self.count - 1) * self.stride + self.len
    }

    /// Makes the run longer by a range, if that is the next one.
    pub(crate) fn take(&mut self, next: &Range<u64>) -> bool {
        let len = next.end - next.start;
        let stride = if self.count == 1 { next.start - self.first } else { self.stride };
        let is_next = len == self.len && next.start == self.first + self.count * stride;
        if is_next {
            (self.stride, self.count) = (stride, self.count + 1);
        }
        is_next
    }
}

/// `FIRST+LEN`, or `FIRST+LEN*COUNT/STRIDE`.
impl fmt::Display for Run {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { first, len, stride, count } = self;
        match count {
            1 => write!(f, "{first}+{len}"),
            _ => write!(f, "{first}+{len}*{count}/{stride}"),
        }
    }
}

/// The text is from a file or another machine.
impl FromStr for Run {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let parsed = || {
            let (first, rest) = text.split_once('+')?;
            let number = |text: &str| text.parse::<u64>().ok();
            let (len, rest) = match rest.split_once('*') {
                None => (number(rest)?, None),
                Some((len, rest)) => (number(len)?, Some(rest.split_once('/')?)),
            };
            let (count, stride) = match rest {
                None => (1, len),
                Some((count, stride)) => (number(count)?, number(stride)?),
            };
            let run = Self { first: number(first)?, len, stride, count };
            let end = run.first.checked_add(count.checked_sub(1)?.checked_mul(stride)?)?.checked_add(len)?;
            (len > 0 && stride >= len && end <= i64::MAX as u64).then_some(run)
        };
        parsed().ok_or_else(|| format!("{text:?} is no range of bytes"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_are_written_and_read() {
        for run in [Run::of(5..9), Run { first: 0, len: 3, stride: 7, count: 4 }] {
            assert_eq!(run.to_string().parse(), Ok(run));
        }
        let max = u64::MAX;
        let long = [format!("{max}+1"), format!("0+1*{max}/{max}"), format!("{max}+{max}")];
        let wrong = ["", "5", "5+", "+5", "5+0", "5+2*0/2", "5+2*3", "5+4*2/3", "-1+2", "5+2*3/4/5"];
        for wrong in wrong.into_iter().chain(long.iter().map(String::as_str)) {
            assert!(wrong.parse::<Run>().is_err(), "{wrong}");
        }
    }
}
