//! Applies a step's tokens.

use super::step::Entry;
use super::{Scheduler, TokenEvent};

impl Scheduler {
    /// Processes the tokens of the oldest step in flight, one for each of its wanted rows, and
    /// appends to `events` what requests receive. A row's token counts only if the tokens before it
    /// equal those of the draft. The tokens of a request that has ended are dropped.
    pub fn apply(&mut self, mut tokens: &[u32], events: &mut Vec<TokenEvent>) {
        let Some(step) = self.in_flight.pop_front() else { return };
        for entry in &step.entries {
            let rows = entry.wanted_rows();
            let Some((chosen, rest)) = tokens.split_at_checked(rows) else { break };
            tokens = rest;
            self.apply_entry(entry, chosen, events);
        }
        debug_assert!(tokens.is_empty(), "one token for each row that wants one");
        self.spare.push(step);
    }

    fn apply_entry(&mut self, entry: &Entry, chosen: &[u32], events: &mut Vec<TokenEvent>) {
        let Some(sequence) = self.slots[entry.slot].as_mut() else { return };
        sequence.in_flight -= 1;
        if !entry.wants_token {
            // A newer step may verify a draft of this sequence, so the draft stays.
            if sequence.ended {
                self.end(entry.slot);
            }
            return;
        }
        let right =
            sequence.draft().iter().zip(chosen).take_while(|(drafted, chosen)| drafted == chosen).count();
        sequence.end_draft();
        // The model's own layer reads right guesses again, with the model's hidden states. So does
        // a draft model with states, which has read guesses on a separate copy.
        let kept = if self.limits.ahead || self.limits.draft_states { 0 } else { right };
        sequence.rewind_draft_model(sequence.tokens.len() + kept);
        let mut accepted = 0;
        for &token in chosen.iter().take(right + 1) {
            if sequence.ended {
                break;
            }
            let finish = sequence.accept(token, &self.eos, self.max_tokens);
            let cached_tokens = sequence.cached_tokens;
            events.push(TokenEvent { request: sequence.id, token, finish, cached_tokens });
            sequence.ended = finish.is_some();
            accepted += 1;
        }
        // The draft's tokens before the last accepted one are computed.
        sequence.accepted = usize::saturating_sub(accepted, 1);
        sequence.computed += sequence.accepted;
        if sequence.ended {
            self.end(entry.slot);
        }
    }
}
