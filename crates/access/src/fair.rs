//! Fair shares: the order of requests when more wait than the engine computes in parallel.
//!
//! Start-time fair queueing (Goyal, Vin and Cheng, 1997), by tokens. Each team has a tag that grows
//! by the tokens of its requests divided by its weight; the team with the smallest tag is next. A
//! team that was idle begins at the tag of the others, so it saves up nothing. The same rule orders
//! the keys of a team.

use std::collections::HashMap;

use serde::{Deserialize, Serialize};

/// Waiting requests of one flow (a team, or a key in a team).
#[derive(Debug)]
struct Flow<Q> {
    tag: f64,
    weight: f64,
    waiting: Q,
}

/// A queue of items.
trait Queue: Default {
    fn len(&self) -> usize;
}

#[derive(Debug)]
struct Fair<Q> {
    flows: HashMap<String, Flow<Q>>,
    /// Tag of the last served flow.
    clock: f64,
}

impl<Q> Default for Fair<Q> {
    fn default() -> Self {
        Self { flows: HashMap::new(), clock: 0.0 }
    }
}

impl<Q: Queue> Fair<Q> {
    fn flow(&mut self, name: &str, weight: f64) -> &mut Flow<Q> {
        let clock = self.clock;
        let new = || Flow { tag: clock, weight, waiting: Q::default() };
        let flow = self.flows.entry(name.to_owned()).or_insert_with(new);
        if flow.waiting.len() == 0 {
            flow.tag = flow.tag.max(clock);
        }
        flow.weight = weight;
        flow
    }

    /// The flow with the smallest tag; of equal tags, the one whose name comes first.
    fn next(&self) -> Option<&str> {
        let waiting = self.flows.iter().filter(|(_, flow)| flow.waiting.len() > 0);
        let next = waiting.min_by(|(a, x), (b, y)| x.tag.total_cmp(&y.tag).then_with(|| a.cmp(b)));
        next.map(|(name, _)| name.as_str())
    }

    fn charge(&mut self, name: &str, cost: f64) {
        if let Some(flow) = self.flows.get_mut(name) {
            self.clock = self.clock.max(flow.tag);
            flow.tag += cost / flow.weight;
        }
    }

    /// Corrects what a flow was charged.
    fn correct(&mut self, name: &str, cost: f64) {
        if let Some(flow) = self.flows.get_mut(name) {
            flow.tag += cost / flow.weight;
        }
    }

    /// Removes flows whose tag would be the clock in any case.
    fn forget_idle(&mut self) {
        let clock = self.clock;
        self.flows.retain(|_, flow| flow.waiting.len() > 0 || flow.tag > clock);
    }
}

/// Requests of one key, oldest first.
type Line = std::collections::VecDeque<Item>;

#[derive(Debug, Clone, Copy)]
struct Item {
    ticket: u64,
    cost: f64,
}

impl Queue for Line {
    fn len(&self) -> usize {
        self.len()
    }
}

impl Queue for Fair<Line> {
    fn len(&self) -> usize {
        self.flows.values().map(|flow| flow.waiting.len()).sum()
    }
}

/// Who a request is from.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Claimant {
    /// Its team; requests without one share the empty name.
    pub team: String,
    /// The team's share.
    pub weight: f64,
    /// Its key.
    pub key: String,
}

/// Requests that wait for the engine.
#[derive(Debug, Default)]
pub struct FairQueue {
    teams: Fair<Fair<Line>>,
}

impl FairQueue {
    /// Adds a request with its expected tokens.
    pub fn push(&mut self, claimant: &Claimant, ticket: u64, tokens: u64) {
        let team = self.teams.flow(&claimant.team, claimant.weight);
        let key = team.waiting.flow(&claimant.key, 1.0);
        key.waiting.push_back(Item { ticket, cost: tokens as f64 });
    }

    /// Removes and returns the next request.
    pub fn pop(&mut self) -> Option<u64> {
        let team = self.teams.next()?.to_owned();
        let keys = &mut self.teams.flows.get_mut(&team)?.waiting;
        let key = keys.next()?.to_owned();
        let item = keys.flows.get_mut(&key)?.waiting.pop_front()?;
        keys.charge(&key, item.cost);
        keys.forget_idle();
        self.teams.charge(&team, item.cost);
        self.teams.forget_idle();
        Some(item.ticket)
    }

    /// Removes a request that no longer waits.
    pub fn remove(&mut self, claimant: &Claimant, ticket: u64) {
        let team = self.teams.flows.get_mut(&claimant.team);
        let key = team.and_then(|team| team.waiting.flows.get_mut(&claimant.key));
        if let Some(key) = key {
            key.waiting.retain(|item| item.ticket != ticket);
        }
    }

    /// Corrects the charge of a request that took `more` tokens than expected; fewer if negative.
    pub fn correct(&mut self, claimant: &Claimant, more: f64) {
        self.teams.correct(&claimant.team, more);
        if let Some(team) = self.teams.flows.get_mut(&claimant.team) {
            team.waiting.correct(&claimant.key, more);
        }
    }

    /// Requests that wait.
    pub fn len(&self) -> usize {
        self.teams.flows.values().map(|team| team.waiting.len()).sum()
    }

    /// True if none waits.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Requests of a team that wait.
    pub fn of_team(&self, team: &str) -> usize {
        self.teams.flows.get(team).map_or(0, |team| team.waiting.len())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn of(team: &str, key: &str, weight: f64) -> Claimant {
        Claimant { team: team.into(), weight, key: key.into() }
    }

    /// Serves `count` requests; returns the tokens that each claimant got.
    fn serve(queue: &mut FairQueue, owners: &[(Claimant, u64)], count: usize) -> HashMap<String, u64> {
        let mut got = HashMap::new();
        for _ in 0..count {
            let Some(ticket) = queue.pop() else { break };
            let (claimant, tokens) = &owners[ticket as usize];
            *got.entry(format!("{}/{}", claimant.team, claimant.key)).or_default() += tokens;
        }
        got
    }

    #[test]
    fn a_burst_does_not_delay_another_team() {
        let (mut queue, burst, other) = (FairQueue::default(), of("a", "1", 1.0), of("b", "2", 1.0));
        (0..500).for_each(|ticket| queue.push(&burst, ticket, 100));
        assert_eq!(queue.pop(), Some(0));
        queue.push(&other, 1000, 100);
        let place = (0..10).position(|_| queue.pop() == Some(1000));
        assert!(place.is_some_and(|place| place <= 1), "{place:?}");
    }

    #[test]
    fn teams_get_tokens_by_weight_and_keys_get_equal_parts() {
        let mut queue = FairQueue::default();
        let claimants = [(of("a", "1", 3.0), 50), (of("a", "2", 3.0), 400), (of("b", "3", 1.0), 100)];
        let owners: Vec<_> = (0..3000).map(|ticket| claimants[ticket % 3].clone()).collect();
        for (ticket, (claimant, tokens)) in owners.iter().enumerate() {
            queue.push(claimant, ticket as u64, *tokens);
        }
        let got = serve(&mut queue, &owners, 1000);
        let (first, second, other) = (got["a/1"] as f64, got["a/2"] as f64, got["b/3"] as f64);
        assert!((first / second - 1.0).abs() < 0.05, "{got:?}");
        assert!(((first + second) / other / 3.0 - 1.0).abs() < 0.05, "{got:?}");
    }

    #[test]
    fn a_correction_delays_the_next_request() {
        let (mut queue, long, short) = (FairQueue::default(), of("a", "1", 1.0), of("b", "2", 1.0));
        (0..10).for_each(|ticket| queue.push(&long, ticket, 10));
        (10..20).for_each(|ticket| queue.push(&short, ticket, 10));
        assert_eq!(queue.pop(), Some(0));
        // It took 50 tokens instead of 10, so the other team is served until it has had as many.
        queue.correct(&long, 40.0);
        let next: Vec<u64> = (0..5).filter_map(|_| queue.pop()).collect();
        assert_eq!(next, [10, 11, 12, 13, 14]);
    }

    proptest! {
        /// Every request that is not removed comes out exactly once. No team waits for more than
        /// one request of each other team beyond its share.
        #[test]
        fn every_request_comes_out_once(
            pushes in prop::collection::vec((0usize..4, 0usize..3, 1u64..500, any::<bool>()), 1..200),
        ) {
            let mut queue = FairQueue::default();
            let mut expected = Vec::new();
            for (ticket, (team, key, tokens, stays)) in pushes.iter().enumerate() {
                let claimant = of(&team.to_string(), &key.to_string(), 1.0 + *team as f64);
                queue.push(&claimant, ticket as u64, *tokens);
                if *stays { expected.push(ticket as u64) } else { queue.remove(&claimant, ticket as u64) }
            }
            prop_assert_eq!(queue.len(), expected.len());
            let mut got: Vec<u64> = std::iter::from_fn(|| queue.pop()).collect();
            got.sort_unstable();
            prop_assert_eq!(got, expected);
            prop_assert!(queue.is_empty() && queue.pop().is_none());
        }
    }
}
