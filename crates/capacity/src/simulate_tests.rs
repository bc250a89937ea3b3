//! The scheduler in simulated time.

use std::time::Duration;

use super::*;
use proptest::prelude::*;

/// A step takes 10 ms, and 1 ms for each prompt row.
struct Flat(usize);

impl StepCost for Flat {
    fn stages(&self) -> usize {
        self.0
    }

    fn seconds(&self, _stage: usize, rows: &StepRows) -> f64 {
        0.010 + 0.001 * rows.prompt as f64
    }
}

const LIMITS: Limits = Limits {
    sequences: 4,
    rows: 256,
    kv_blocks: 64,
    whole_prompts: None,
    prefix_cache: true,
    snapshots: None,
    draft_rows: 0,
    ahead: false,
    draft_states: false,
    step_time: Duration::from_millis(30),
    routed: None,
};

fn request(at_s: f64, user: u32) -> Arrival {
    Arrival { at_s, user, prompt: 100, shared: 64, answer: 11 }
}

#[test]
fn one_request_takes_its_prompt_and_its_tokens() {
    let outcome = run(&Flat(1), LIMITS, 1000, Workload::Open(vec![request(5.0, 0)]));
    let [served] = outcome.served[..] else { panic!("{outcome:?}") };
    assert!((served.first_s - 5.110).abs() < 1e-9, "{served:?}");
    assert!((served.end_s - 5.210).abs() < 1e-9 && served.tokens == 11, "{served:?}");
    let summary = outcome.summary(0.0);
    assert!((summary.tokens_s_p50 - 100.0).abs() < 1e-6 && summary.busy < 0.05, "{summary:?}");
}

#[test]
fn a_prompt_that_begins_like_an_earlier_one_is_read_in_part() {
    let outcome =
        run(&Flat(1), LIMITS, 1000, Workload::Open(vec![request(0.0, 7), request(1.0, 7), request(2.0, 8)]));
    let first: Vec<f64> = outcome.served.iter().map(|served| served.first_s - served.at_s).collect();
    // 64 of 100 tokens are two whole blocks.
    assert!((first[1] - (0.010 + 0.036)).abs() < 1e-9, "{first:?}");
    assert!((first[2] - first[0]).abs() < 1e-9, "another user's prompt: {first:?}");
}

#[test]
fn an_engine_goes_on_with_what_it_keeps() {
    let mut simulator = Simulator::new(&Flat(1), LIMITS, 1000);
    let mut first = |at_s| {
        let [served] = simulator.run(Workload::Open(vec![request(at_s, 7)])).served[..] else { panic!() };
        assert!((served.at_s - at_s).abs() < 1e-9, "times count from the workload's start");
        served.first_s - served.at_s
    };
    assert!((first(0.0) - 0.110).abs() < 1e-9);
    // Two blocks of the prompt are kept.
    assert!((first(0.5) - 0.046).abs() < 1e-9);
}

#[test]
fn an_idle_engine_has_to_wake_up() {
    struct Sleepy;
    impl StepCost for Sleepy {
        fn stages(&self) -> usize {
            1
        }
        fn seconds(&self, stage: usize, rows: &StepRows) -> f64 {
            Flat(1).seconds(stage, rows)
        }
        fn wake_s(&self) -> f64 {
            0.002
        }
    }
    let requests = vec![request(1.0, 0), request(3.0, 1)];
    for workload in [Workload::Open(requests.clone()), Workload::Closed { clients: 1, requests }] {
        let outcome = run(&Sleepy, LIMITS, 1000, workload);
        let first: Vec<f64> = outcome.served.iter().map(|served| served.first_s - served.at_s).collect();
        assert!(first.iter().all(|first| (first - 0.112).abs() < 1e-9), "{first:?}");
    }
}

#[test]
fn clients_that_wait_keep_the_number_of_requests() {
    let requests: Vec<Arrival> = (0..40).map(|user| request(0.0, user)).collect();
    let outcome = run(&Flat(1), LIMITS, 1000, Workload::Closed { clients: 2, requests });
    assert_eq!((outcome.served.len(), outcome.waiting_most), (40, 0));
    assert!(outcome.running_mean > 1.5 && outcome.running_mean <= 2.0, "{}", outcome.running_mean);
}

#[test]
fn a_client_that_asks_again_misses_the_step_that_begins_at_once() {
    let requests: Vec<Arrival> = (0..3).map(|user| request(0.0, user)).collect();
    let outcome = run(&Flat(1), LIMITS, 1000, Workload::Closed { clients: 2, requests });
    let mut firsts: Vec<(f64, f64)> =
        outcome.served.iter().map(|served| (served.at_s, served.first_s)).collect();
    firsts.sort_by(|a, b| a.1.total_cmp(&b.1));
    // The first prompt is read alone. The second waits for a step that shows the time of decoding,
    // and is read in six pieces, next to the first answer's tokens. The first answer ends at 0.31
    // s, and its client's next prompt waits for the step until 0.32 s.
    let expected = [(0.0, 0.110), (0.0, 0.280), (0.310, 0.480)];
    for ((at_s, first_s), (expected_at_s, expected_first_s)) in firsts.iter().zip(expected) {
        assert!(
            (at_s - expected_at_s).abs() < 1e-9 && (first_s - expected_first_s).abs() < 1e-9,
            "{firsts:?}"
        );
    }
    assert_eq!(firsts.len(), 3);
}

#[test]
fn clients_go_on_after_a_request_that_is_refused() {
    let mut requests: Vec<Arrival> = (0..6).map(|user| request(0.0, user)).collect();
    for refused in [0, 1, 4] {
        requests[refused].prompt = 2000;
    }
    let outcome = run(&Flat(1), LIMITS, 1000, Workload::Closed { clients: 2, requests });
    assert_eq!((outcome.served.len(), outcome.refused), (3, 3));
}

#[test]
fn more_load_than_the_machine_takes_queues_up() {
    let habit = Habit { users: 5, prompt: 100, answer: 50, shared: 0.0 };
    let at = |rate| run(&Flat(1), LIMITS, 1000, Workload::Open(habit.open(rate, 300, 3))).summary(WARM_UP);
    let (little, much) = (at(0.5), at(50.0));
    assert!(little.first_token_p95_s < 0.6 && little.waiting_most <= 2, "{little:?}");
    assert!(much.first_token_p95_s > 5.0 && much.waiting_most > 100 && much.busy > 0.99, "{much:?}");
}

#[test]
fn stages_work_at_the_same_time() {
    let requests: Vec<Arrival> = (0..40).map(|user| request(0.0, user)).collect();
    let closed = |stages, clients| {
        let workload = Workload::Closed { clients, requests: requests.clone() };
        run(&Flat(stages), LIMITS, 1000, workload).span_s
    };
    assert!(closed(2, 1) > 1.9 * closed(1, 1), "one request passes the stages in turn");
    // With the stages in turn, four clients would be 1.3 times as fast as one. A client whose
    // answer ends misses the step that begins then, and prompts in pieces cost some of the gain.
    assert!(closed(2, 1) > 1.6 * closed(2, 4), "{} {}: several fill them", closed(2, 1), closed(2, 4));
}

proptest! {
    #[test]
    fn every_request_is_answered_whole_or_refused(
        lengths in prop::collection::vec((1usize..900, 0usize..900, 1usize..60, 0u32..3), 1..30),
        blocks in 8usize..40, stages in 1usize..4,
    ) {
        let arrivals: Vec<Arrival> = lengths
            .iter()
            .enumerate()
            .map(|(index, &(prompt, shared, answer, user))| Arrival {
                at_s: index as f64 * 0.05, user, prompt, shared: shared.min(prompt), answer,
            })
            .collect();
        let limits = Limits { kv_blocks: blocks, ..LIMITS };
        let outcome = run(&Flat(stages), limits, 1000, Workload::Open(arrivals.clone()));
        prop_assert_eq!(outcome.served.len() + outcome.refused, arrivals.len());
        for served in &outcome.served {
            prop_assert!(served.at_s <= served.first_s && served.first_s <= served.end_s && served.tokens > 0);
        }
    }
}
