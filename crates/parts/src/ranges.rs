//! Sets of bytes of a file.

use std::ops::Range;

use crate::Run;

/// Bytes of a file: ranges in order that neither overlap nor touch.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Ranges(Vec<Range<u64>>);

impl Ranges {
    /// The bytes of all these runs.
    pub fn of<'a>(runs: impl IntoIterator<Item = &'a Run>) -> Self {
        let mut all: Vec<Range<u64>> = runs.into_iter().flat_map(|run| run.ranges()).collect();
        all.sort_unstable_by_key(|range| range.start);
        Self(all).filled(0)
    }

    /// All bytes of a file of this size.
    pub fn whole(size: u64) -> Self {
        Self(if size > 0 { vec![0..size] } else { Vec::new() })
    }

    /// These bytes and all gaps between them of at most `most` bytes.
    #[must_use]
    pub fn filled(self, most: u64) -> Self {
        let mut filled: Vec<Range<u64>> = Vec::new();
        for range in self.0 {
            match filled.last_mut() {
                Some(last) if range.start <= last.end.saturating_add(most) => {
                    last.end = last.end.max(range.end);
                }
                _ => filled.push(range),
            }
        }
        Self(filled)
    }

    /// Those of these bytes that are not among `others`.
    #[must_use]
    pub fn minus(&self, others: &Self) -> Self {
        let mut rest = Vec::new();
        let mut others = others.0.iter().peekable();
        for range in &self.0 {
            let mut start = range.start;
            while let Some(other) = others.peek() {
                if other.end <= start {
                    others.next();
                    continue;
                }
                if other.start >= range.end {
                    break;
                }
                if other.start > start {
                    rest.push(start..other.start);
                }
                start = other.end;
                if start >= range.end {
                    break;
                }
                others.next();
            }
            if start < range.end {
                rest.push(start..range.end);
            }
        }
        Self(rest)
    }

    /// Whether all bytes of a range are among these.
    pub fn contains(&self, range: &Range<u64>) -> bool {
        let after = self.0.partition_point(|known| known.start <= range.start);
        range.is_empty() || after > 0 && range.end <= self.0[after - 1].end
    }

    /// How many bytes there are.
    pub fn bytes(&self) -> u64 {
        self.0.iter().map(|range| range.end - range.start).sum()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The ranges, in order.
    pub fn iter(&self) -> impl Iterator<Item = Range<u64>> + '_ {
        self.0.iter().cloned()
    }

    /// The same bytes as runs.
    pub fn runs(&self) -> Vec<Run> {
        self.cut(u64::MAX, usize::MAX).next().unwrap_or_default()
    }

    /// The bytes cut into pieces, in order: each of at most `most_bytes` bytes, with at most
    /// `most_runs` runs.
    pub fn cut(&self, most_bytes: u64, most_runs: usize) -> impl Iterator<Item = Vec<Run>> + '_ {
        let mut rest = self.0.iter().cloned();
        let mut left: Option<Range<u64>> = None;
        std::iter::from_fn(move || {
            let (mut runs, mut bytes): (Vec<Run>, u64) = (Vec::new(), 0);
            while let Some(mut range) = left.take().or_else(|| rest.next()) {
                let room = most_bytes.max(1) - bytes;
                if range.end - range.start > room {
                    let cut = range.start + room;
                    left = Some(cut..range.end);
                    range.end = cut;
                }
                if range.is_empty() {
                    break;
                }
                bytes += range.end - range.start;
                if !runs.last_mut().is_some_and(|run| run.take(&range)) {
                    if runs.len() == most_runs.max(1) {
                        left = Some(range.start..left.take().map_or(range.end, |left| left.end));
                        break;
                    }
                    runs.push(Run::of(range));
                }
            }
            (!runs.is_empty()).then_some(runs)
        })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn of(ranges: &[Range<u64>]) -> Ranges {
        Ranges::of(&ranges.iter().cloned().map(Run::of).collect::<Vec<_>>())
    }

    #[test]
    fn rows_of_a_window_are_one_run() {
        let run = Run { first: 8, len: 4, stride: 16, count: 100 };
        assert_eq!(Ranges::of(&[run]).runs(), [run]);
        assert_eq!(Ranges::of(&[run]).filled(12), of(&[8..run.end()]));
        let pieces: Vec<_> = Ranges::of(&[run]).cut(10, 9).collect();
        assert_eq!(pieces.len(), 40);
        assert_eq!(pieces[0], [Run { count: 2, ..run }, Run::of(40..42)]);
        assert_eq!(pieces[1][0], Run::of(42..44));
    }

    /// Sets of bytes below 64, as bits.
    fn bits(ranges: &Ranges) -> u64 {
        ranges.iter().flatten().map(|byte| 1u64 << byte).sum()
    }

    fn some_ranges() -> impl Strategy<Value = Ranges> {
        prop::collection::vec((0u64..60, 1u64..5), 0..12)
            .prop_map(|ranges| of(&ranges.into_iter().map(|(at, len)| at..at + len).collect::<Vec<_>>()))
    }

    proptest! {
        #[test]
        fn sets_of_bytes_are_those_of_bits(one in some_ranges(), other in some_ranges(), at in 0u64..60, len in 1u64..5) {
            prop_assert_eq!(bits(&one.minus(&other)), bits(&one) & !bits(&other));
            prop_assert_eq!(one.bytes(), u64::from(bits(&one).count_ones()));
            let range = bits(&of(std::slice::from_ref(&(at..at + len))));
            prop_assert_eq!(one.contains(&(at..at + len)), bits(&one) & range == range);
            prop_assert_eq!(Ranges::of(&one.runs()), one);
        }

        #[test]
        fn pieces_are_all_bytes_once_and_small(all in some_ranges(), bytes in 1u64..20, runs in 1usize..4) {
            let pieces: Vec<_> = all.cut(bytes, runs).collect();
            for piece in &pieces {
                prop_assert!(piece.len() <= runs);
                prop_assert!(piece.iter().map(Run::bytes).sum::<u64>() <= bytes);
            }
            let sum: u64 = pieces.iter().flatten().map(Run::bytes).sum();
            prop_assert_eq!(sum, all.bytes());
            prop_assert_eq!(Ranges::of(pieces.iter().flatten()), all);
        }
    }
}
