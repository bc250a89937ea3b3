//! Prompts that are read whole.

use super::cases::{TOKEN, generation, limits, plan};
use crate::scheduler::{Generation, Limits, Scheduler, Wanted};

fn scheduler(rows: usize, most: usize) -> Scheduler {
    let limits = Limits { rows, kv_blocks: 64, whole_prompts: Some(most), ..limits() };
    Scheduler::new(limits, 1, rows + 1, Vec::new())
}

fn submit(scheduler: &mut Scheduler, tokens: usize) {
    let wanted = Generation { max_tokens: Some(1), wanted: Wanted::Hidden, ..generation() };
    scheduler.submit(&vec![TOKEN; tokens], wanted).unwrap();
}

/// Rows of each text in the next step, which is computed.
fn next(scheduler: &mut Scheduler) -> Vec<usize> {
    let rows: Vec<usize> = plan(scheduler).iter().map(|(_, _, rows)| *rows).collect();
    let mut events = Vec::new();
    scheduler.apply(&vec![0; rows.len()], &mut events);
    assert!(events.iter().all(|event| event.finish.is_some()), "a text ends with its result");
    rows
}

#[test]
fn texts_are_never_cut_and_share_steps_up_to_a_size() {
    let mut scheduler = scheduler(200, 100);
    for tokens in [60, 50, 30, 1] {
        submit(&mut scheduler, tokens);
    }
    // The second does not fit in addition to the first, but the third does.
    assert_eq!(next(&mut scheduler), [1, 60, 30]);
    assert_eq!(next(&mut scheduler), [50]);
    assert!(scheduler.is_idle());
}

#[test]
fn a_text_longer_than_a_usual_step_gets_one_of_its_own() {
    let mut scheduler = scheduler(200, 100);
    for tokens in [20, 200, 20] {
        submit(&mut scheduler, tokens);
    }
    assert_eq!(next(&mut scheduler), [20, 20]);
    assert_eq!(next(&mut scheduler), [200]);
    assert!(scheduler.is_idle());
}
