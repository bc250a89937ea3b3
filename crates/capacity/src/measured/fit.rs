//! Fits the terms of [`Measured`] to single steps that an engine has timed.

use std::collections::BTreeMap;

use thunder_engine::{StepLoad, StepTime};

use super::{Measured, Point};
use crate::simulate::{StepCost, rows_of};

/// A generated token that attends to at most this many tokens has a short context.
const SHORT_CONTEXT: f64 = 64.0;

/// A step with the time until the next one can begin.
#[derive(Debug, Clone, Copy)]
struct Sample {
    load: StepLoad,
    seconds: f64,
}

impl Measured {
    /// The same with the times of `steps`. They must contain steps of each kind: generated tokens
    /// alone with short and with long contexts; whole prompts alone; a prompt of several pieces,
    /// alone; and pieces of prompts next to generated tokens. The terms of a kind without steps
    /// stay 0.
    #[must_use]
    pub fn with_times(mut self, steps: &[StepTime]) -> Self {
        let samples = samples(steps);
        let of = |is: &dyn Fn(&StepLoad) -> bool| -> Vec<Sample> {
            samples.iter().filter(|sample| is(&sample.load)).copied().collect()
        };
        let is_short = |load: &StepLoad| load.decode_pairs <= SHORT_CONTEXT * load.decode as f64;
        let whole = |load: &StepLoad| {
            let rows = load.prompt as f64;
            load.decode == 0 && load.prompt_ends == 1 && load.prompt_pairs <= rows * (rows + 1.0) / 2.0
        };

        let alone = of(&|load| load.decode == 1 && load.prompt == 0 && is_short(load));
        let long = of(&|load| load.decode == 1 && load.prompt == 0 && !is_short(load));
        self.decode_pair_s = slope(&alone, &long, |load| load.decode_pairs);
        let decode = of(&|load| load.decode > 0 && load.prompt == 0 && is_short(load));
        let pair_s = self.decode_pair_s;
        self.decode = points(&decode, |load| load.decode, |load| load.decode_pairs * pair_s);

        let rows = self.rows;
        let piece = |load: &StepLoad| load.decode == 0 && load.prompt == rows && load.prompt_ends == 0;
        let is_first = |load: &StepLoad| load.prompt_context <= rows as f64;
        let first = of(&|load| piece(load) && is_first(load));
        let later = of(&|load| piece(load) && !is_first(load));
        self.prompt_pair_s = slope(&first, &later, |load| load.prompt_pairs);
        let pair_s = self.prompt_pair_s;
        self.prompt = points(&of(&whole), |load| load.prompt, |load| load.prompt_pairs * pair_s);
        let ended = of(&|load| whole(load) && load.prompt == rows);
        let saved_s = middle(&ended).zip(middle(&first)).map(|(ended, goes_on)| ended - goes_on);
        self.piece_saves_s = saved_s.unwrap_or(0.0).max(0.0);

        // The additional time of both kinds of rows together, beyond the sum of each alone.
        (self.mixed_saves_s, self.mixed_end_s) = (0.0, 0.0);
        let beyond = |ends: usize| {
            let mixed = of(&|load| load.decode > 0 && load.prompt > 0 && load.prompt_ends == ends);
            let more = mixed.iter().map(|Sample { load, seconds }| seconds - self.seconds(0, &rows_of(load)));
            median(more.collect())
        };
        let (goes_on, ends) = (beyond(0), beyond(1));
        // Short prompts rarely continue in another step, so the time of those that end is used.
        let goes_on = goes_on.or(ends).unwrap_or(0.0);
        self.mixed_saves_s = -goes_on;
        self.mixed_end_s = (ends.unwrap_or(goes_on) - goes_on).max(0.0);
        self
    }
}

/// All steps, with the usual time between two: sending tokens to the clients, and planning the next
/// step.
fn samples(steps: &[StepTime]) -> Vec<Sample> {
    let decodes = |step: &StepTime| step.load.prompt == 0;
    let goes_on = steps
        .windows(2)
        .filter(|pair| decodes(&pair[0]) && decodes(&pair[1]) && pair[0].load.decode == pair[1].load.decode);
    let between_s = median(goes_on.map(|pair| pair[1].began_s - pair[0].ended_s).collect()).unwrap_or(0.0);
    let seconds = |step: &StepTime| (step.ended_s - step.began_s + between_s.max(0.0)).max(0.0);
    steps.iter().map(|step| Sample { load: step.load, seconds: seconds(step) }).collect()
}

/// The median time for each number of rows, minus `pairs_s` for the pairs of a step.
fn points(
    samples: &[Sample],
    rows: impl Fn(&StepLoad) -> usize,
    pairs_s: impl Fn(&StepLoad) -> f64,
) -> Vec<Point> {
    let mut times: BTreeMap<usize, Vec<f64>> = BTreeMap::new();
    for Sample { load, seconds } in samples {
        times.entry(rows(load)).or_default().push(seconds - pairs_s(load));
    }
    let point = |(rows, times)| Some(Point { rows, seconds: median(times)?.max(0.0) });
    times.into_iter().filter_map(point).collect()
}

/// Seconds for each unit that `of` counts, from steps with few and with many units.
fn slope(few: &[Sample], many: &[Sample], of: impl Fn(&StepLoad) -> f64) -> f64 {
    let base = middle(few).zip(median(few.iter().map(|sample| of(&sample.load)).collect()));
    let Some((base_s, base)) = base else { return 0.0 };
    let each = many.iter().map(|sample| (sample.seconds - base_s) / (of(&sample.load) - base).max(1.0));
    median(each.collect()).unwrap_or(0.0).max(0.0)
}

fn middle(samples: &[Sample]) -> Option<f64> {
    median(samples.iter().map(|sample| sample.seconds).collect())
}

fn median(mut times: Vec<f64>) -> Option<f64> {
    times.sort_by(f64::total_cmp);
    times.get(times.len() / 2).copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn truth() -> Measured {
        let point = |rows, seconds| Point { rows, seconds };
        Measured {
            model: "m".into(),
            ranks: 1,
            decode: vec![point(1, 0.010), point(4, 0.016)],
            prompt: vec![point(16, 0.020), point(64, 0.050), point(256, 0.200)],
            piece_saves_s: 0.006,
            mixed_saves_s: 0.007,
            mixed_end_s: 0.001,
            wake_s: 0.0,
            decode_pair_s: 1e-6,
            prompt_pair_s: 1e-7,
            joules_token: None,
            sequences: 4,
            rows: 256,
            kv_tokens: 4096,
            context: 1024,
            step_time_s: 0.05,
            routed: None,
        }
    }

    #[test]
    fn steps_of_all_kinds_give_the_terms_that_they_were_made_of() {
        let truth = truth();
        let load =
            |decode: usize, context: usize, start: usize, prompt: usize, prompt_ends: usize| StepLoad {
                decode,
                decode_pairs: (decode * context) as f64,
                prompt,
                prompt_pairs: (prompt * start) as f64 + (prompt * (prompt + 1) / 2) as f64,
                prompt_context: if prompt > 0 { (start + prompt) as f64 } else { 0.0 },
                prompt_ends,
            };
        let mut loads = Vec::new();
        for seen in [20, 25, 30] {
            loads.extend([load(1, seen, 0, 0, 0), load(4, seen, 0, 0, 0), load(1, 500 + seen, 0, 0, 0)]);
            loads.extend([16, 64, 256].map(|rows| load(0, 0, 0, rows, 1)));
            loads.extend([0, 256, 512].map(|start| load(0, 0, start, 256, 0)));
            loads.extend([load(1, seen, 0, 16, 0), load(4, seen, 16, 64, 0), load(4, seen, 64, 16, 1)]);
        }
        let mut now = 0.0;
        let steps: Vec<StepTime> = loads
            .into_iter()
            .map(|load| {
                let began_s = now;
                now += truth.seconds(0, &rows_of(&load));
                StepTime { load, began_s, ended_s: now }
            })
            .collect();
        let empty = Measured { decode: Vec::new(), prompt: Vec::new(), ..truth.clone() };
        let fitted = empty.clone().with_times(&steps);
        let near = |a: f64, b: f64| assert!((a - b).abs() < 1e-3 * b.abs(), "{a} for {b}: {fitted:?}");
        let terms = |of: &Measured| {
            let own =
                [of.decode_pair_s, of.prompt_pair_s, of.piece_saves_s, of.mixed_saves_s, of.mixed_end_s];
            let points =
                of.decode.iter().chain(&of.prompt).flat_map(|point| [point.rows as f64, point.seconds]);
            points.chain(own).collect::<Vec<_>>()
        };
        assert_eq!(terms(&fitted).len(), terms(&truth).len());
        terms(&fitted).into_iter().zip(terms(&truth)).for_each(|(a, b)| near(a, b));
        // Without a measurement, the term is 0.
        let none = empty.with_times(&[]);
        assert!(none.decode.is_empty() && none.mixed_saves_s == 0.0 && none.piece_saves_s == 0.0);
    }
}
