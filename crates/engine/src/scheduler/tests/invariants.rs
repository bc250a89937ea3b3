//! Invariants of a scheduler between two calls, and of every step.

use std::collections::BTreeSet;

use thunder_compute::step::KV_BLOCK_TOKENS;

use crate::scheduler::pace::UNMEASURED_ROWS;
use crate::scheduler::sequence::{Sequence, Work};
use crate::scheduler::step::Entry;
use crate::scheduler::{RequestId, RowResults, Scheduler, Wanted};

/// The scheduler's state just before a step was planned, for comparison.
pub struct Before {
    /// Running requests.
    running: BTreeSet<RequestId>,
    /// Requests with a token awaited.
    awaiting: BTreeSet<RequestId>,
    preemptions: u64,
    /// The request that must be admitted: the oldest waiting one, if a slot and blocks are free.
    admissible: Option<RequestId>,
}

impl Before {
    pub fn of(scheduler: &Scheduler) -> Self {
        let sequences = || scheduler.slots.iter().flatten();
        let free_slot = scheduler.running.len() < scheduler.limits.sequences;
        let fits = |next: &&Sequence| {
            scheduler.running.is_empty() || next.tokens.len() < scheduler.blocks.unused() * KV_BLOCK_TOKENS
        };
        Self {
            running: sequences().map(|sequence| sequence.id).collect(),
            awaiting: sequences().filter(|s| s.awaits_token).map(|s| s.id).collect(),
            preemptions: scheduler.preemptions,
            admissible: scheduler.waiting.front().filter(|_| free_slot).filter(fits).map(|s| s.id),
        }
    }
}

/// Checks the scheduler's state. `live` contains the requests that were submitted and have neither
/// ended nor been cancelled.
pub fn check_state(scheduler: &Scheduler, live: &BTreeSet<RequestId>) {
    let Scheduler { limits, slots, running, waiting, in_flight, .. } = scheduler;
    assert!(in_flight.len() <= scheduler.stages, "{} steps in flight", in_flight.len());

    let sequences = || slots.iter().flatten();
    let tables: Vec<&[u32]> = sequences().map(|sequence| sequence.blocks.as_slice()).collect();
    scheduler.blocks.check(&tables);
    for sequence in sequences() {
        let kept = sequence.blocks.iter().take_while(|block| scheduler.blocks.is_kept(**block));
        assert_eq!(kept.count(), sequence.kept_blocks);
    }
    if let Some(snapshots) = &scheduler.blocks.snapshots {
        let pinned = sequences().flat_map(|s| s.restore.into_iter().chain(s.saved.map(|saved| saved.0)));
        snapshots.check(pinned, |block| scheduler.blocks.is_kept(block));
    }

    assert_eq!(slots.len(), limits.sequences);
    let by_age = |slot: &usize| slots[*slot].as_ref().map(|sequence| sequence.id).unwrap();
    assert!(running.is_sorted_by_key(by_age), "running sequences are in the order of their age");
    let occupied: BTreeSet<usize> = (0..slots.len()).filter(|&slot| slots[slot].is_some()).collect();
    assert_eq!(
        running.iter().copied().collect::<BTreeSet<_>>(),
        occupied,
        "running sequences have the slots"
    );
    assert_eq!(running.len(), occupied.len(), "no slot runs twice");

    assert!(waiting.iter().is_sorted_by_key(|sequence| sequence.id), "the oldest request waits first");
    for sequence in waiting {
        let kept = (sequence.blocks.len(), sequence.computed, sequence.sent_blocks, sequence.in_flight);
        assert_eq!(kept, (0, 0, 0, 0), "a waiting request holds nothing");
        assert!(!sequence.ended && !sequence.awaits_token, "a waiting request expects nothing");
    }
    for (slot, sequence) in slots.iter().enumerate() {
        let Some(sequence) = sequence else { continue };
        let entries = || in_flight.iter().flat_map(|step| &step.entries).filter(|entry| entry.slot == slot);
        assert_eq!(sequence.in_flight, entries().count(), "steps in flight are counted");
        assert!(!sequence.ended || sequence.in_flight > 0, "an ended request leaves its slot");
        assert!(entries().filter(|entry| entry.wants_token).count() <= 1, "one token is awaited at a time");
        assert_eq!(sequence.awaits_token, entries().any(|entry| entry.wants_token));
        assert!(sequence.computed <= sequence.blocks.len() * KV_BLOCK_TOKENS, "each token has a block");
    }
    let unfinished = slots.iter().flatten().filter(|sequence| !sequence.ended).chain(waiting);
    assert!(unfinished.map(|sequence| sequence.id).collect::<BTreeSet<_>>() == *live, "no request is lost");
}

/// Checks the newest step, and that the step treats requests fairly.
pub fn check_step(scheduler: &Scheduler, before: &Before) {
    let step = scheduler.in_flight.back().unwrap();
    let rows = |entries: &[Entry]| entries.iter().map(|entry| entry.count).sum::<usize>();
    assert!(!step.entries.is_empty());
    assert!(rows(&step.entries) <= scheduler.limits.rows, "a step has too many rows");
    let slots: BTreeSet<usize> = step.entries.iter().map(|entry| entry.slot).collect();
    assert_eq!(slots.len(), step.entries.len(), "a slot is twice in a step");
    assert!(step.entries.is_sorted_by_key(|entry| entry.prompt), "prompts come last");
    let mut results = RowResults::default();
    for entry in &step.entries {
        let sequence = scheduler.slots[entry.slot].as_ref().unwrap();
        let end = entry.start + entry.count;
        assert!(entry.count > 0);
        assert!(!before.awaiting.contains(&sequence.id), "a sequence is stepped while its token is awaited");
        assert_eq!(end, sequence.computed);
        assert_eq!(entry.wants_token, end == sequence.tokens.len());
        assert_eq!(entry.prompt, entry.start < sequence.prompt_tokens && sequence.prompt_tokens > 1);
        assert!(!entry.prompt || entry.count > 1, "a piece of a prompt is a single token");
        assert!(
            !entry.prompt || end <= sequence.prompt_tokens,
            "a generated token is computed as a prompt's"
        );
        if entry.wants_token {
            results.chosen |= sequence.generation.wanted == Wanted::Chosen;
            results.logits |= sequence.generation.wanted == Wanted::Logits;
            results.hidden |= sequence.generation.wanted == Wanted::Hidden;
        }
    }
    assert_eq!(step.results, results);
    if before.preemptions == scheduler.preemptions {
        check_decodes(scheduler, &step.entries);
    }
}

/// Checks that no sequence that could decode is left out while the step has free rows, and that the
/// oldest come first.
fn check_decodes(scheduler: &Scheduler, entries: &[Entry]) {
    let id = |slot: usize| scheduler.slots[slot].as_ref().unwrap().id;
    let is_decode = |entry: &&Entry| entry.count == 1 + entry.drafted && entry.wants_token;
    let decodes: Vec<&Entry> = entries.iter().filter(is_decode).collect();
    let of_decodes: usize = decodes.iter().map(|entry| entry.count).sum();
    let others = entries.iter().map(|entry| entry.count).sum::<usize>() - of_decodes;
    // With measured times, the tests of the pace check this.
    let is_few = others <= UNMEASURED_ROWS || scheduler.pace.is_measured();
    assert!(decodes.is_empty() || is_few, "{others} rows delay a decode");
    let share = scheduler.running.len().div_ceil(scheduler.stages);
    let has_room = decodes.len() < share && decodes.len() < scheduler.limits.rows;
    for &slot in &scheduler.running {
        let sequence = scheduler.slots[slot].as_ref().unwrap();
        let needs_block = sequence.tokens.len() > sequence.blocks.len() * KV_BLOCK_TOKENS;
        let is_stepped = entries.iter().any(|entry| entry.slot == slot);
        if is_stepped || sequence.ready_for() != Some(Work::Decode) {
            continue;
        }
        if needs_block && scheduler.blocks.unused() == 0 {
            // It waits for blocks of younger sequences, which get no rows meanwhile.
            return;
        }
        assert!(!has_room, "a sequence that could decode is left out");
        assert!(decodes.iter().all(|entry| id(entry.slot) < sequence.id), "a younger sequence goes first");
    }
}

/// Checks that no request is admitted before an older one, and none waits while it could run.
pub fn check_admissions(scheduler: &Scheduler, before: &Before) {
    let running = scheduler.slots.iter().flatten().map(|sequence| sequence.id);
    if let Some(oldest) = scheduler.waiting.front() {
        let mut admitted = running.filter(|id| !before.running.contains(id));
        assert!(admitted.all(|id| id < oldest.id), "a request is admitted before an older one");
        let passed_over = before.admissible == Some(oldest.id) && before.preemptions == scheduler.preemptions;
        assert!(!passed_over, "a request waits while a slot and blocks are free");
    }
}
