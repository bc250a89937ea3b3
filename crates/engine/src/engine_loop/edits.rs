//! Steps whose tokens rank 0 chooses after penalties, biases and grammars have changed the logits,
//! or of which it reports how likely they are, so that no logits are read.

use thunder_compute::Backend;

use super::EngineLoop;
use crate::scheduler::Awaiting;

impl<B: Backend> EngineLoop<B> {
    /// Lets rank 0 choose the tokens of the step that was planned last, if it can and every request
    /// in it allows that. If it returns true, call [`Self::edit_step`] once the step computes. If
    /// the step has too many rows for ranks to choose, all logits are read.
    pub(super) fn choose_after_edits(&mut self) -> bool {
        let Some(step) = self.scheduler.newest_step() else { return false };
        let rows = step.wanted_rows();
        if step.results().chosen && rows > self.worker.chooses() {
            self.scheduler.read_logits();
            return false;
        }
        let chooses = rows <= self.worker.head_chooses()
            && step.results().logits
            && step.awaiting().all(|Awaiting { request, draft }| {
                self.requests.get(&request).is_none_or(|request| request.is_chosen_by_ranks(draft.len()))
            });
        if chooses {
            let reported = |Awaiting { request, .. }: Awaiting<'_>| self.requests.get(&request)?.reported();
            let likely = step.awaiting().filter_map(reported).max();
            self.scheduler.choose_by_head(likely);
        }
        chooses
    }

    /// Fills in the changes of the step that was planned last. Waits for late masks.
    pub(super) fn edit_step(&mut self) {
        let Some(step) = self.scheduler.newest_step() else { return };
        let mut rows = self.worker.edits(step.wanted_rows());
        for Awaiting { request, draft } in step.awaiting() {
            let (own, others) = rows.split_at_mut(draft.len() + 1);
            if let Some(request) = self.requests.get_mut(&request) {
                request.edit(draft, own);
            }
            rows = others;
        }
    }
}
