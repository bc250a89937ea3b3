//! The gate in front of the engine: a few requests are inside at a time, the others wait in fair
//! order.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::oneshot;

use crate::fair::{Claimant, FairQueue};

/// Default number of requests that may wait. More are refused.
const WAITING: usize = 4096;
/// One team may have this share of the waiting requests.
const PART_OF_TEAM: usize = 8;

/// Limits the number of answers that are computed in parallel.
#[derive(Debug, Clone)]
pub struct Gate(Arc<Mutex<State>>);

#[derive(Debug)]
struct State {
    /// Answers that may begin now.
    free: usize,
    places: usize,
    queue: FairQueue,
    waiting: HashMap<u64, Waiting>,
    /// The next request, if it needs more places than are free.
    next: Option<u64>,
    tickets: u64,
    /// Requests that may wait.
    most: usize,
}

#[derive(Debug)]
struct Waiting {
    places: usize,
    wake: oneshot::Sender<()>,
}

/// Too many requests wait.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{waiting} requests{of} wait already: try again later")]
pub struct Full {
    waiting: usize,
    of: String,
}

/// A request's place in the queue, then in the engine. Dropping it gives the place to the next.
#[derive(Debug)]
pub struct Turn {
    gate: Gate,
    claimant: Claimant,
    ticket: u64,
    places: usize,
    /// Tokens for which it was charged.
    charged: u64,
    /// `None` once it has passed.
    wake: Option<oneshot::Receiver<()>>,
}

impl Gate {
    /// A gate for this many answers at a time.
    pub fn new(places: usize) -> Self {
        let places = places.max(1);
        Self(Arc::new(Mutex::new(State {
            free: places,
            places,
            queue: FairQueue::default(),
            waiting: HashMap::new(),
            next: None,
            tickets: 0,
            most: WAITING,
        })))
    }

    /// Lets this many requests wait; each team may have an eighth of them.
    pub fn limit_waiting(&self, most: usize) {
        self.lock().most = most;
    }

    /// Joins the queue for a number of answers, which are expected to take `tokens` tokens
    /// together.
    ///
    /// # Errors
    /// When the queue is full.
    pub fn enter(&self, claimant: Claimant, answers: usize, tokens: u64) -> Result<Turn, Full> {
        let mut state = self.lock();
        let (of_team, all) = (state.queue.of_team(&claimant.team), state.queue.len());
        if of_team >= (state.most / PART_OF_TEAM).max(1) {
            return Err(Full { waiting: of_team, of: format!(" of team \"{}\"", claimant.team) });
        }
        if all >= state.most {
            return Err(Full { waiting: all, of: String::new() });
        }
        state.tickets += 1;
        let ticket = state.tickets;
        // A request with more answers than places takes all places.
        let places = answers.clamp(1, state.places);
        let (wake, woken) = oneshot::channel();
        state.queue.push(&claimant, ticket, tokens);
        state.waiting.insert(ticket, Waiting { places, wake });
        state.let_pass();
        drop(state);
        Ok(Turn { gate: self.clone(), claimant, ticket, places, charged: tokens, wake: Some(woken) })
    }

    /// Requests that wait.
    pub fn waiting(&self) -> usize {
        self.lock().waiting.len()
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn let_pass(&mut self) {
        loop {
            // The next request is chosen when a place becomes free, from all that wait then.
            if self.free == 0 {
                return;
            }
            let Some(ticket) = self.next.take().or_else(|| self.queue.pop()) else { return };
            // The request was dropped between its choice and its turn.
            let Some(waiting) = self.waiting.get(&ticket) else { continue };
            if waiting.places > self.free {
                self.next = Some(ticket);
                return;
            }
            if let Some(Waiting { places, wake }) = self.waiting.remove(&ticket) {
                self.free -= places;
                // If the receiver is gone, dropping its `Turn` gives the places back.
                let _ = wake.send(());
            }
        }
    }
}

impl Turn {
    /// Waits until it is this request's turn.
    pub async fn pass(&mut self) {
        if let Some(wake) = &mut self.wake {
            // The gate lives as long as this turn, and it never drops the sender unsent.
            let _ = wake.await;
            self.wake = None;
        }
    }

    /// Tells the gate how many tokens the request took.
    pub fn note_tokens(&mut self, tokens: u64) {
        let more = tokens as f64 - self.charged as f64;
        self.charged = tokens;
        self.gate.lock().queue.correct(&self.claimant, more);
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        let mut state = self.gate.lock();
        if state.waiting.remove(&self.ticket).is_some() {
            state.queue.remove(&self.claimant, self.ticket);
        } else {
            state.free += self.places;
        }
        state.let_pass();
    }
}

#[cfg(test)]
mod tests {
    use std::future::Future;
    use std::pin::pin;
    use std::task::{Context, Waker};

    use super::*;

    fn of(team: &str) -> Claimant {
        Claimant { team: team.into(), weight: 1.0, key: "k".into() }
    }

    fn has_passed(turn: &mut Turn) -> bool {
        pin!(turn.pass()).poll(&mut Context::from_waker(Waker::noop())).is_ready()
    }

    #[test]
    fn places_go_to_the_teams_in_turn() {
        let gate = Gate::new(2);
        let mut burst: Vec<Turn> = (0..4).map(|_| gate.enter(of("a"), 1, 10).unwrap()).collect();
        let mut other = gate.enter(of("b"), 1, 10).unwrap();
        let passed: Vec<bool> = burst.iter_mut().map(has_passed).collect();
        assert_eq!((passed, has_passed(&mut other)), (vec![true, true, false, false], false));
        burst.remove(0);
        assert!(has_passed(&mut other) && !has_passed(&mut burst[1]));
        drop(other);
        assert!(has_passed(&mut burst[1]) && !has_passed(&mut burst[2]));
    }

    #[test]
    fn a_request_that_goes_away_frees_its_place() {
        let gate = Gate::new(1);
        let first = gate.enter(of("a"), 1, 10).unwrap();
        let (second, mut third) = (gate.enter(of("a"), 1, 10).unwrap(), gate.enter(of("a"), 1, 10).unwrap());
        assert_eq!(gate.waiting(), 2);
        drop(second);
        drop(first);
        assert!(has_passed(&mut third));
        drop(third);
        assert_eq!((gate.waiting(), gate.lock().free), (0, 1));
    }

    #[test]
    fn several_answers_wait_for_as_many_places() {
        let gate = Gate::new(3);
        let one = gate.enter(of("a"), 1, 10).unwrap();
        let mut many = gate.enter(of("b"), 100, 10).unwrap();
        let mut late = gate.enter(of("c"), 1, 10).unwrap();
        // The next request keeps its turn, so small requests cannot overtake it forever.
        assert!(!has_passed(&mut many) && !has_passed(&mut late));
        drop(one);
        assert!(has_passed(&mut many) && !has_passed(&mut late));
        drop(many);
        assert!(has_passed(&mut late));
    }

    #[test]
    fn a_full_team_is_refused_and_others_are_not() {
        let gate = Gate::new(1);
        let of_team = WAITING / PART_OF_TEAM;
        let turns: Vec<Turn> = (0..=of_team).map(|_| gate.enter(of("a"), 1, 1).unwrap()).collect();
        let refused = gate.enter(of("a"), 1, 1).unwrap_err();
        assert!(refused.to_string().contains("512 requests of team \"a\""), "{refused}");
        assert!(gate.enter(of("b"), 1, 1).is_ok());
        gate.limit_waiting(512);
        let refused = gate.enter(of("b"), 1, 1).unwrap_err();
        assert!(refused.to_string().contains("512 requests wait already"), "{refused}");
        drop(turns);
        assert_eq!((gate.waiting(), gate.lock().free), (0, 1));
    }
}
