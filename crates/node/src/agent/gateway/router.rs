//! Chooses the replica of a model that gets a request: the one that has the longest part of the
//! prompt in its cache, unless it is much busier than another.

use std::collections::{BTreeMap, HashMap};
use std::hash::{DefaultHasher, Hash, Hasher};

use serde_json::Value;

use super::question::PROMPT_FIELDS;

/// Bytes of a prompt that are hashed together.
const PIECE_BYTES: usize = 512;
/// Maximum pieces of a prompt that are compared. A longer common part would change nothing.
const MOST_PIECES: usize = 64;
/// Maximum pieces that are remembered for all models. Beyond this, the least recently used are
/// dropped.
const MOST_REMEMBERED: usize = 32_768;
/// A replica's load outweighs its cache if it has more requests than the least busy one by this
/// number, and more than twice as many.
const SLACK: u32 = 4;

/// A hash of each beginning of a prompt.
pub(super) type Prefix = Vec<u64>;

/// The beginnings of a request's prompt.
pub(super) fn prefix_of(body: &Value) -> Prefix {
    let mut text = String::new();
    for field in PROMPT_FIELDS {
        let value = &body[field];
        if !value.is_null() {
            text += &value.to_string();
        }
        if text.len() >= MOST_PIECES * PIECE_BYTES {
            break;
        }
    }
    // A last piece that is not complete is skipped, because anything may follow it.
    let mut hasher = DefaultHasher::new();
    let pieces = text.as_bytes().chunks_exact(PIECE_BYTES).take(MOST_PIECES);
    pieces
        .map(|piece| {
            piece.hash(&mut hasher);
            hasher.finish()
        })
        .collect()
}

/// Where this node has sent requests.
#[derive(Debug, Default)]
pub(in crate::agent) struct Router {
    /// The group that last read a beginning, and when.
    read_by: HashMap<u64, (String, u64)>,
    /// Requests that this node has in flight, by group.
    in_flight: BTreeMap<String, u32>,
    /// Number of requests so far.
    now: u64,
}

impl Router {
    /// Chooses one of the groups, given with the number of requests that their heads report, and
    /// counts the request until [`Router::end`].
    pub fn begin(&mut self, prefix: &Prefix, groups: &[(String, u32)]) -> Option<usize> {
        self.now += 1;
        let load =
            |(name, reported): &(String, u32)| self.in_flight.get(name).copied().unwrap_or(0).max(*reported);
        let loads: Vec<u32> = groups.iter().map(load).collect();
        let least = loads.iter().copied().min()?;
        let known = prefix.iter().rev().find_map(|piece| {
            let (group, _) = self.read_by.get(piece)?;
            groups.iter().position(|(name, _)| name == group)
        });
        let known = known.filter(|place| loads[*place] <= (least + SLACK).max(2 * least));
        let chosen = known.or_else(|| {
            // Takes turns among the least busy.
            let idle: Vec<usize> = (0..groups.len()).filter(|place| loads[*place] == least).collect();
            idle.get(self.now as usize % idle.len().max(1)).copied()
        })?;
        let name = &groups[chosen].0;
        for piece in prefix {
            self.read_by.insert(*piece, (name.clone(), self.now));
        }
        self.forget();
        *self.in_flight.entry(name.clone()).or_default() += 1;
        Some(chosen)
    }

    /// Counts the end of a request to a group.
    pub fn end(&mut self, group: &str) {
        if let Some(count) = self.in_flight.get_mut(group) {
            *count = count.saturating_sub(1);
            if *count == 0 {
                self.in_flight.remove(group);
            }
        }
    }

    /// Drops the older half when there is too much.
    fn forget(&mut self) {
        if self.read_by.len() <= MOST_REMEMBERED {
            return;
        }
        let mut times: Vec<u64> = self.read_by.values().map(|(_, at)| *at).collect();
        let middle = times.len() / 2;
        let (_, median, _) = times.select_nth_unstable(middle);
        let median = *median;
        self.read_by.retain(|_, (_, at)| *at > median);
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
    use super::*;
    use serde_json::json;

    fn groups(loads: &[u32]) -> Vec<(String, u32)> {
        loads.iter().enumerate().map(|(place, load)| (format!("m#{place}"), *load)).collect()
    }

    fn chat(system: char, turns: usize) -> Prefix {
        let text = |letter: char| letter.to_string().repeat(700);
        let mut messages = vec![json!({"role": "system", "content": text(system)})];
        messages.extend(
            (0..turns).map(|turn| json!({"role": "user", "content": format!("{turn}{}", text('u'))})),
        );
        prefix_of(&json!({ "messages": messages }))
    }

    #[test]
    fn a_conversation_stays_where_its_beginning_was_read() {
        let mut router = Router::default();
        let two = groups(&[0, 0]);
        let first = router.begin(&chat('a', 1), &two).unwrap();
        let second = router.begin(&chat('b', 1), &two).unwrap();
        assert_ne!(first, second, "another beginning goes to the one that is free");
        for turns in 2..6 {
            assert_eq!(router.begin(&chat('a', turns), &two), Some(first));
            assert_eq!(router.begin(&chat('b', turns), &two), Some(second));
            [first, second].iter().for_each(|place| router.end(&two[*place].0));
        }
        // Its replica is gone: another gets it, and keeps it.
        let rest = vec![two[second].clone()];
        assert_eq!(router.begin(&chat('a', 6), &rest), Some(0));
        router.end(&two[first].0);
        router.end(&two[second].0);
        assert_eq!(router.begin(&chat('a', 7), &two), Some(second));
    }

    #[test]
    fn load_counts_more_than_a_cache_when_it_differs_much() {
        let mut router = Router::default();
        let beginning = chat('a', 1);
        let at = router.begin(&beginning, &groups(&[0, 9])).unwrap();
        assert_eq!(at, 0);
        assert_eq!(router.begin(&beginning, &groups(&[4, 0])), Some(0), "a little busier");
        assert_eq!(router.begin(&beginning, &groups(&[9, 2])), Some(1), "much busier");
        assert_eq!(router.begin(&beginning, &[]), None);
        // Without a long enough beginning, requests take turns.
        let mut router = Router::default();
        let short = prefix_of(&json!({"prompt": "hi"}));
        let places: Vec<_> = (0..4).map(|_| router.begin(&short, &groups(&[0, 0])).unwrap()).collect();
        assert_eq!(places.iter().sum::<usize>(), 2, "{places:?}");
    }

    #[test]
    fn what_is_remembered_is_bounded() {
        let mut router = Router::default();
        for number in 0..2 * MOST_REMEMBERED as u64 {
            router.begin(&vec![number], &groups(&[0]));
            router.end("m#0");
        }
        assert!(router.read_by.len() <= MOST_REMEMBERED + 1 && router.in_flight.is_empty());
        assert_eq!(prefix_of(&json!({"prompt": "x".repeat(1 << 20)})).len(), MOST_PIECES);
    }
}
