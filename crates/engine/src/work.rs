//! How ranks spend their time, reported to rank 0 as part of messages that ranks send anyway.
//!
//! A rank sends its report to the next stage with its rows' hidden states and the reports of the
//! previous stages. The last stage sends all reports with the results that rank 0 waits for.

use std::time::{Duration, Instant};

use thunder_collectives::Stats;

/// Numbers of a report.
pub(crate) const REPORT_WORDS: usize = 2;
/// Maximum microseconds of a report. The bits of such a number are never a NaN's.
const MOST_US: u128 = 1 << 30;

/// A rank's time within steps.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct WorkTime {
    /// Computing, and copying between memories.
    pub computed: Duration,
    /// Waiting in sums over ranks, for the previous stage, and for the next stage.
    pub waited: Duration,
}

/// A rank's work while a request was answered, including work for other requests.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RankWork {
    /// From the request's submission to its first token.
    pub prefill: WorkTime,
    /// From the first token to the end.
    pub decode: WorkTime,
}

/// The work of all ranks while a request was answered.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RequestWork {
    /// By rank.
    pub ranks: Vec<RankWork>,
    /// Ranks of each stage of the pipeline.
    pub tensor_ranks: usize,
    /// Steps of all ranks from the request's submission to its first token.
    pub prefill_steps: u64,
    /// Steps from the first token to the end.
    pub decode_steps: u64,
}

impl WorkTime {
    fn since(self, before: Self) -> Self {
        Self {
            computed: self.computed.saturating_sub(before.computed),
            waited: self.waited.saturating_sub(before.waited),
        }
    }

    fn add(&mut self, other: Self) {
        self.computed += other.computed;
        self.waited += other.waited;
    }

    /// Takes what a report can hold. The remainder below a microsecond stays for the next one.
    fn take_report(&mut self) -> [f32; REPORT_WORDS] {
        [&mut self.computed, &mut self.waited].map(|time| {
            let us = time.as_micros().min(MOST_US) as u32;
            *time -= Duration::from_micros(us.into());
            f32::from_bits(us)
        })
    }

    fn of_report(words: &[f32]) -> Self {
        let time = |word: usize| Duration::from_micros(words[word].to_bits().into());
        Self { computed: time(0), waited: time(1) }
    }
}

/// Measures a rank's steps, and keeps the unreported times.
#[derive(Debug)]
pub(crate) struct WorkClock {
    /// The beginning of the part of the step that is being measured.
    since: Instant,
    /// Unreported times: of the same rank in each earlier stage, then its own.
    pending: Vec<WorkTime>,
    reductions: Stats,
}

impl WorkClock {
    /// For a rank of the stage with this number, counted from 0.
    pub fn new(stage: usize) -> Self {
        let pending = vec![WorkTime::default(); stage + 1];
        Self { since: Instant::now(), pending, reductions: Stats::default() }
    }

    /// A step begins.
    pub fn begin(&mut self) {
        self.since = Instant::now();
    }

    /// Records the time since the beginning of the step, or since the last call. `reductions` are
    /// those of this time.
    pub fn lap(&mut self, reductions: Stats) {
        let now = Instant::now();
        let time = now.duration_since(self.since);
        self.since = now;
        self.reductions.operations += reductions.operations;
        self.reductions.bytes += reductions.bytes;
        self.reductions.time += reductions.time;
        let waited = reductions.time.min(time);
        self.own().add(WorkTime { computed: time - waited, waited });
    }

    /// Records the time since a given moment as waiting, which no lap counts.
    pub fn note_wait(&mut self, began: Instant) {
        let waited = began.elapsed();
        self.since += waited;
        self.own().add(WorkTime { computed: Duration::ZERO, waited });
    }

    fn own(&mut self) -> &mut WorkTime {
        let last = self.pending.len() - 1;
        &mut self.pending[last]
    }

    /// The reductions since the last call.
    pub fn take_reductions(&mut self) -> Stats {
        std::mem::take(&mut self.reductions)
    }

    /// Number of words that are reports in a message, for this many stages.
    pub fn words(stages: usize) -> usize {
        stages * REPORT_WORDS
    }

    /// Appends the reports of the earlier stages and this rank's own to a message.
    pub fn report(&mut self, message: &mut Vec<f32>) {
        self.pending.iter_mut().for_each(|pending| message.extend(pending.take_report()));
    }

    /// Removes the reports of the earlier stages, the last numbers, from a message.
    pub fn take_reports(&mut self, message: &mut Vec<f32>) {
        let stages = self.pending.len() - 1;
        let first = message.len() - Self::words(stages);
        let reports = message[first..].chunks_exact(REPORT_WORDS);
        self.pending.iter_mut().zip(reports).for_each(|(sum, words)| sum.add(WorkTime::of_report(words)));
        message.truncate(first);
    }
}

/// Sums of all ranks' reports, on rank 0.
#[derive(Debug)]
pub(crate) struct WorkSums {
    ranks: Vec<WorkTime>,
    tensor_ranks: usize,
}

impl WorkSums {
    pub fn new(ranks: usize, tensor_ranks: usize) -> Self {
        Self { ranks: vec![WorkTime::default(); ranks], tensor_ranks }
    }

    /// Adds the reports of all stages that arrived through a rank of the last stage.
    pub fn add(&mut self, rank_of_stage: usize, reports: &[f32]) {
        let ranks = self.ranks.iter_mut().skip(rank_of_stage).step_by(self.tensor_ranks);
        ranks.zip(reports.chunks_exact(REPORT_WORDS)).for_each(|(sum, words)| {
            sum.add(WorkTime::of_report(words));
        });
    }
}

/// The sums at certain moments of a request: its submission, its first token, its end.
#[derive(Debug)]
pub(crate) struct WorkMarks {
    marks: Vec<(Vec<WorkTime>, u64)>,
    tensor_ranks: usize,
}

impl WorkMarks {
    /// Records a request's submission, after this many steps.
    pub fn begin(sums: &WorkSums, steps: u64) -> Self {
        let mut marks = Vec::with_capacity(3);
        marks.push((sums.ranks.clone(), steps));
        Self { marks, tensor_ranks: sums.tensor_ranks }
    }

    /// Records the first token.
    pub fn note_token(&mut self, sums: &WorkSums, steps: u64) {
        if self.marks.len() == 1 {
            self.marks.push((sums.ranks.clone(), steps));
        }
    }

    /// Computes the work at the request's end. `None` if it ends without a token.
    pub fn end(self, sums: &WorkSums, steps: u64) -> Option<RequestWork> {
        let [(begin, begin_steps), (first, first_steps)] = &self.marks[..] else { return None };
        let ranks = sums.ranks.iter().zip(begin.iter().zip(first)).map(|(end, (begin, first))| RankWork {
            prefill: first.since(*begin),
            decode: end.since(*first),
        });
        Some(RequestWork {
            ranks: ranks.collect(),
            tensor_ranks: self.tensor_ranks,
            prefill_steps: first_steps - begin_steps,
            decode_steps: steps - first_steps,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn us(computed: u64, waited: u64) -> WorkTime {
        WorkTime { computed: Duration::from_micros(computed), waited: Duration::from_micros(waited) }
    }

    #[test]
    fn reports_of_all_stages_arrive_once_and_whole() {
        // Two stages of two ranks.
        let mut clocks = [0, 0, 1, 1].map(WorkClock::new);
        let mut sums = WorkSums::new(4, 2);
        for step in 1..=3 {
            for rank in 0..2 {
                clocks[rank].own().add(us(10 * (rank as u64 + 1), step));
                let mut message = vec![0.5; 3];
                clocks[rank].report(&mut message);
                let next = &mut clocks[rank + 2];
                next.take_reports(&mut message);
                assert_eq!(message, [0.5; 3]);
                next.own().add(us(100 * (rank as u64 + 1), 0));
                // A step without results reports nothing to rank 0.
                if step != 2 {
                    message.clear();
                    next.report(&mut message);
                    sums.add(rank, &message);
                }
            }
        }
        assert_eq!(sums.ranks, [us(30, 6), us(60, 6), us(300, 0), us(600, 0)]);
    }

    #[test]
    fn what_a_report_cannot_hold_stays_for_the_next() {
        let mut time = WorkTime { computed: Duration::from_nanos(1_700), waited: Duration::from_secs(1100) };
        let all = time;
        let (mut sum, mut reports) = (WorkTime::default(), 0);
        while time.computed + time.waited > Duration::from_micros(1) {
            let words = time.take_report();
            assert!(words.iter().all(|word| !word.is_nan()));
            sum.add(WorkTime::of_report(&words));
            reports += 1;
        }
        sum.add(time);
        assert_eq!((sum, reports), (all, 2));
    }

    #[test]
    fn waits_and_sums_are_not_computing() {
        let mut clock = WorkClock::new(0);
        let all = Instant::now();
        clock.begin();
        let began = Instant::now();
        std::thread::sleep(Duration::from_millis(20));
        clock.note_wait(began);
        let reductions = Stats { time: Duration::from_millis(5), ..Stats::default() };
        std::thread::sleep(Duration::from_millis(10));
        clock.lap(reductions);
        let all = all.elapsed();
        let WorkTime { computed, waited } = *clock.own();
        assert!(waited >= Duration::from_millis(25), "{waited:?}");
        assert!(computed >= Duration::from_millis(5), "{computed:?}");
        assert!(computed + waited <= all, "{computed:?} and {waited:?} of {all:?}");
        assert_eq!(clock.take_reductions().time, reductions.time);
        assert_eq!(clock.take_reductions(), Stats::default());
    }

    #[test]
    fn a_request_has_the_sums_of_its_own_time() {
        let mut sums = WorkSums::new(1, 1);
        let add = |sums: &mut WorkSums, us| sums.add(0, &[f32::from_bits(us), f32::from_bits(1)]);
        add(&mut sums, 7);
        let mut marks = WorkMarks::begin(&sums, 5);
        assert_eq!(WorkMarks::begin(&sums, 5).end(&sums, 5), None);
        add(&mut sums, 100);
        marks.note_token(&sums, 7);
        add(&mut sums, 20);
        marks.note_token(&sums, 8);
        let work = marks.end(&sums, 9);
        let ranks = vec![RankWork { prefill: us(100, 1), decode: us(20, 1) }];
        assert_eq!(work, Some(RequestWork { ranks, tensor_ranks: 1, prefill_steps: 2, decode_steps: 2 }));
    }
}
