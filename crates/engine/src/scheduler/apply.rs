//! What becomes of a step's tokens.

use super::{Scheduler, TokenEvent};

impl Scheduler {
    /// Takes the tokens of the oldest step in flight, one for each request of
    /// [`Scheduler::oldest_step`], and appends to `events` what requests receive. The token of a
    /// request that has ended is dropped.
    pub fn apply(&mut self, tokens: &[u32], events: &mut Vec<TokenEvent>) {
        let Some(step) = self.in_flight.pop_front() else { return };
        debug_assert_eq!(tokens.len(), step.awaiting().len(), "one token for each request that awaits one");
        let mut tokens = tokens.iter();
        for entry in &step.entries {
            let token = if entry.wants_token { tokens.next() } else { None };
            let Some(sequence) = self.slots[entry.slot].as_mut() else { continue };
            sequence.in_flight -= 1;
            if let Some(&token) = token.filter(|_| !sequence.ended) {
                let finish = sequence.accept(token, &self.eos, self.max_tokens);
                let cached_tokens = sequence.cached_tokens;
                events.push(TokenEvent { request: sequence.id, token, finish, cached_tokens });
                sequence.ended = finish.is_some();
            }
            if sequence.ended {
                self.end(entry.slot);
            }
        }
        self.spare.push(step);
    }
}
