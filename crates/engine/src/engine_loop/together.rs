//! Whether the requests of a pipeline decode separately, in a step for each stage, or together in
//! one step. Only together can the model's own layer guess for them, because its passes would wait
//! for the other steps in flight. If steps wait for weights, one step of all requests takes no
//! longer than each of several.

use thunder_compute::Backend;

use super::EngineLoop;
use super::propose::{TRIED_TOKENS, from_text};
use crate::active_request::Speculates;
use crate::speculation::{Candidate, MAX_DRAFT, MAX_ROWS, Rows, choose};

impl<B: Backend> EngineLoop<B> {
    /// Makes all requests decode together as long as guesses are expected to pay for it. Prompts
    /// are read separately, because they fill all stages.
    pub(super) fn choose_together(&mut self) {
        let stages = self.worker.stages();
        if stages == 1 || self.speculates != Speculates::WithModel || !self.worker.has_ahead() {
            return;
        }
        let rows = Rows { all: self.scheduler.running(), steps: stages };
        let can = (2..=MAX_ROWS).contains(&rows.all)
            && self.scheduler.only_decodes()
            && self.ledger.allows_drafts()
            && !self.costs.is_stale(rows.all.div_ceil(stages));
        self.tries_together &= can;
        let together = can && (self.tries_together || self.together_pays(rows) || self.try_together(rows));
        self.scheduler.decode_together(together);
    }

    /// Whether guesses by the model's layer promise more together than guesses from texts do
    /// separately.
    fn together_pays(&mut self, rows: Rows) -> bool {
        let Self { scheduler, requests, costs, calibration, record, candidates, .. } = self;
        let (prices, most) = ((&*costs, &record.passes), scheduler.draft_rows());
        candidates.clear();
        for (key, request) in requests.iter_mut() {
            let from_text = from_text(*key, request, calibration, MAX_DRAFT);
            let by_model = request
                .by_model()
                .map(|(guesses, _)| Candidate::new(*key, true, guesses.rate(record.rate).share(), MAX_DRAFT));
            let gain = |candidate| choose(&mut [candidate], prices, rows, most).gain;
            candidates.extend(match (from_text, by_model) {
                (Some(text), Some(model)) if gain(text) > gain(model) => Some(text),
                (text, model) => model.or(text),
            });
        }
        let together = choose(candidates, prices, rows, most).gain;
        let share = Rows { all: rows.all.div_ceil(rows.steps), steps: 1 };
        candidates.retain(|candidate| !candidate.by_model);
        candidates.truncate(share.all);
        together > choose(candidates, prices, share, most).gain
    }

    /// Makes requests that seemed not to gain from it guess together, if enough time has passed
    /// since the last trial.
    fn try_together(&mut self, rows: Rows) -> bool {
        let (plain, tried) = (rows.plain_s(&self.costs), self.costs.expected(rows.all + TRIED_TOKENS));
        let (Some((plain, tried)), Some(pass)) = (plain.zip(tried), self.record.passes.expected(1)) else {
            return false;
        };
        self.tries_together =
            self.record.may_try((tried - plain).max(0.0) + plain + pass * TRIED_TOKENS as f32);
        self.tries_together
    }
}
