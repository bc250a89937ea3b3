//! How many tokens of which drafts a step should verify.

use super::StepCosts;

/// Minimum expected gain of drafts, because their rows' logits cost time too.
const LEAST_GAIN: f32 = 1.05;

/// A request of the next step whose tokens can be guessed.
#[derive(Debug, Clone, Copy)]
pub struct Candidate<K> {
    /// The request.
    pub key: K,
    /// The draft model guesses, with one pass for each token; otherwise the guesses already exist.
    pub by_model: bool,
    /// Probability that a guess is right, if those before it are.
    pub chance: f32,
    /// Maximum tokens that can be guessed.
    pub most: usize,
    /// Number of tokens that [`choose`] has chosen.
    pub count: usize,
    tried: usize,
    /// Probability that the next token counts, including all tokens before it.
    next: f32,
}

impl<K> Candidate<K> {
    /// A candidate with no tokens chosen.
    pub fn new(key: K, by_model: bool, chance: f32, most: usize) -> Self {
        Self { key, by_model, chance, most, count: 0, tried: 0, next: chance }
    }
}

/// Expected effect of the chosen drafts.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Choice {
    /// Tokens per second, compared with a step without drafts; 1 if none is chosen.
    pub gain: f32,
    /// Expected number of tokens from the step.
    pub tokens: f32,
}

/// The rows of a step that only decodes, without drafts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rows {
    /// Requests.
    pub all: usize,
    /// Steps that decode them at the same time if nothing is guessed, one in each stage.
    pub steps: usize,
}

impl Rows {
    /// Seconds in which each request gets a token without drafts.
    pub fn plain_s(self, costs: &StepCosts) -> Option<f32> {
        costs.expected(self.all.div_ceil(self.steps))
    }
}

/// Chooses the drafts with the most tokens per second for a step with `rows` rows without drafts,
/// and at most `most` additional rows. Sets their `count`. `steps` are the times of steps by rows,
/// `passes` those of the draft model by the number of requests that it guesses for.
pub fn choose<K>(
    candidates: &mut [Candidate<K>],
    (steps, passes): (&StepCosts, &StepCosts),
    rows: Rows,
    most: usize,
) -> Choice {
    candidates.iter_mut().for_each(|candidate| candidate.count = 0);
    let Rows { all, .. } = rows;
    let none = Choice { gain: 1.0, tokens: all as f32 };
    let Some(plain) = rows.plain_s(steps) else { return none };
    let plain_rate = all as f32 / plain;
    let (mut best, mut best_rate) = (none, LEAST_GAIN * plain_rate);
    // Existing guesses are first tried alone, so that an expensive model does not hide them.
    for with_model in [false, true] {
        if with_model && !candidates.iter().any(|candidate| candidate.by_model) {
            break;
        }
        candidates.iter_mut().for_each(|it| (it.tried, it.next) = (0, it.chance));
        let (mut tokens, mut guessing) = (all as f32, 0.0);
        for added in 1..=most {
            let open = |it: &&mut Candidate<K>| it.tried < it.most && (with_model || !it.by_model);
            let likeliest = candidates.iter_mut().filter(open).max_by(|a, b| a.next.total_cmp(&b.next));
            let Some(candidate) = likeliest else { break };
            candidate.tried += 1;
            tokens += candidate.next;
            candidate.next *= candidate.chance;
            if candidate.by_model {
                let depth = candidate.tried;
                let width = candidates.iter().filter(|it| it.by_model && it.tried >= depth).count();
                guessing += pass(passes, width) - pass(passes, width - 1);
            }
            let Some(step) = steps.expected(all + added) else { break };
            let rate = tokens / (step + guessing);
            if rate > best_rate {
                (best, best_rate) = (Choice { gain: rate / plain_rate, tokens }, rate);
                candidates.iter_mut().for_each(|candidate| candidate.count = candidate.tried);
            }
        }
    }
    best
}

/// Seconds of the draft model's pass for `width` requests.
fn pass(passes: &StepCosts, width: usize) -> f32 {
    if width == 0 { 0.0 } else { passes.expected(width).unwrap_or(f32::MAX) }
}

#[cfg(test)]
mod tests {
    use super::super::{MAX_DRAFT, MAX_ROWS};
    use super::*;

    fn costs(slope: f32) -> StepCosts {
        let mut costs = StepCosts::default();
        (1..=MAX_ROWS + MAX_DRAFT).for_each(|rows| costs.note(rows, 1.0 + slope * (rows - 1) as f32));
        costs
    }

    const fn rows(all: usize) -> Rows {
        Rows { all, steps: 1 }
    }

    /// Passes of a draft model that take this fraction of a step.
    fn passes(share: f32) -> StepCosts {
        let mut costs = StepCosts::default();
        costs.note(1, share);
        costs
    }

    /// Tokens chosen for one request.
    fn chosen(chance: f32, by_model: bool, steps: &StepCosts, passes: &StepCosts) -> usize {
        let mut one = [Candidate::new((), by_model, chance, MAX_DRAFT)];
        choose(&mut one, (steps, passes), rows(1), MAX_DRAFT);
        one[0].count
    }

    #[test]
    fn drafts_are_as_long_as_they_pay() {
        let (none, free) = (StepCosts::default(), passes(0.0));
        let lookup = |chance, steps: &StepCosts| chosen(chance, false, steps, &none);
        assert_eq!(lookup(0.99, &none), 0, "nothing was measured");
        assert_eq!(lookup(0.99, &costs(0.0)), MAX_DRAFT, "rows are free");
        assert_eq!(lookup(0.99, &costs(1.0)), 0, "a row costs as much as a step");
        let some = lookup(0.99, &costs(0.2));
        assert!((5..=MAX_DRAFT).contains(&some), "{some}");
        assert_eq!(lookup(0.05, &costs(0.2)), 0);
        assert_eq!(chosen(0.99, true, &costs(0.0), &free), 0, "passes were not measured");
    }

    #[test]
    fn rows_that_were_not_measured_are_tried() {
        let mut costs = StepCosts::default();
        costs.note(1, 1.0);
        let lookup = |costs: &StepCosts| chosen(0.9, false, costs, &StepCosts::default());
        let tried = lookup(&costs);
        assert!(tried > 0);
        costs.note(1 + tried, 9.0);
        assert!(lookup(&costs) < tried, "it was not worth it");
    }

    #[test]
    fn a_models_passes_are_part_of_the_price() {
        let by_model = |chance, share| chosen(chance, true, &costs(0.02), &passes(share));
        let cheap = by_model(0.8, 0.05);
        assert!(cheap > by_model(0.8, 0.3) && by_model(0.8, 0.3) > 0, "{cheap}");
        assert_eq!(by_model(0.8, 0.9), 0, "it is nearly as slow as the model");
        assert_eq!(by_model(0.05, 0.1), 0, "it is hardly ever right");
    }

    #[test]
    fn a_step_takes_the_likeliest_tokens_of_all_requests() {
        let mut candidates = [
            Candidate::new('a', false, 0.9, 3),
            Candidate::new('b', false, 0.2, 3),
            Candidate::new('c', true, 0.8, 15),
        ];
        let choice = choose(&mut candidates, (&costs(0.01), &passes(0.01)), rows(3), 8);
        let counts = candidates.map(|candidate| candidate.count);
        assert_eq!((counts[0], counts[1]), (3, 0), "{counts:?}");
        assert!((3..=5).contains(&counts[2]), "{counts:?}");
        assert!(choice.gain > 1.5 && choice.tokens > 6.0, "{choice:?}");
        // With a model that is too slow, only guesses without cost are chosen.
        choose(&mut candidates, (&costs(0.01), &passes(5.0)), rows(3), 8);
        assert_eq!([candidates[0].count, candidates[2].count], [3, 0]);
    }

    #[test]
    fn requests_share_a_models_passes() {
        // A pass of 0.3 steps does not pay for one request that is right half of the time, but it
        // pays for four.
        let mut candidates = [(); 4].map(|()| Candidate::new((), true, 0.5, 15));
        let (steps, passes) = (costs(0.0), passes(0.3));
        choose(&mut candidates[..1], (&steps, &passes), rows(4), 15);
        assert_eq!(candidates[0].count, 0);
        choose(&mut candidates, (&steps, &passes), rows(4), 15);
        assert!(candidates.iter().all(|candidate| candidate.count == 1), "{candidates:?}");
    }

    #[test]
    fn drafts_of_one_step_must_beat_steps_in_all_stages() {
        let of = |slope, chance| {
            let mut candidates = [(); 4].map(|()| Candidate::new((), true, chance, 15));
            choose(&mut candidates, (&costs(slope), &passes(0.1)), Rows { all: 4, steps: 2 }, 15).gain
        };
        // If rows are free, four rows take as long as two; otherwise guesses must pay for them.
        let (free, cheap) = (of(0.0, 0.9), of(0.05, 0.9));
        assert!(free > cheap && cheap > 1.5, "{free} {cheap}");
        assert_eq!(of(1.0, 0.9), 1.0);
    }
}
