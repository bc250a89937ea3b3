//! The kernels of a GPU's steps, each with its time.

use serde_json::{Value, json};
use thunder_gpu::{Profile, start_profile, take_profile};

use super::{Work, run};
use crate::session::Session;
use crate::table;

/// Runs each batch once more and times the kernels of its steps.
pub fn profiles(session: &Session, work: &Work<'_>) -> anyhow::Result<Vec<(u16, Profile)>> {
    let mut all = Vec::with_capacity(work.batches.len());
    for &batch in work.batches {
        let (rows, is_prompt) = work.rows(batch);
        start_profile((!is_prompt).then_some(rows));
        run(session, work, batch, 0)?;
        all.push((batch, take_profile().unwrap_or_default()));
    }
    Ok(all)
}

/// The slowest first: name, dispatches, µs and bytes of a step.
fn of_step(profile: &Profile) -> Vec<(&str, f64, f64, f64)> {
    let steps = profile.steps.max(1) as f64;
    let mut all: Vec<_> = (profile.kernels.iter())
        .map(|(name, all)| {
            let us = all.time.as_secs_f64() * 1e6 / steps;
            (name.as_str(), all.dispatches as f64 / steps, us, all.bytes as f64 / steps)
        })
        .collect();
    all.sort_by(|a, b| b.2.total_cmp(&a.2));
    all
}

/// As one value for machines.
pub fn json(profiles: &[(u16, Profile)]) -> Value {
    let of = |(batch, profile): &(u16, Profile)| {
        let kernels: Vec<Value> = (of_step(profile).into_iter())
            .map(|(name, dispatches, us, bytes)| {
                json!({ "kernel": name, "dispatches": dispatches, "us": us, "weight_bytes": bytes })
            })
            .collect();
        let us = profile.wall.as_secs_f64() * 1e6 / profile.steps.max(1) as f64;
        let longest = profile.longest_submission.as_secs_f64() * 1e6;
        json!({ "batch": batch, "steps": profile.steps, "step_us": us, "longest_submission_us": longest,
            "kernels_of_step": kernels })
    };
    profiles.iter().map(of).collect()
}

/// As a table for people. `memory`: bytes per second that the GPU can read.
pub fn print(batch: u16, profile: &Profile, memory: f64) {
    if profile.kernels.is_empty() || profile.steps == 0 {
        println!("no kernel of {batch} sequence(s) was timed: it takes a GPU with timestamps");
        return;
    }
    let wall = profile.wall.as_secs_f64() * 1e6 / profile.steps as f64;
    let headings = ["kernel", "a step", "µs each", "µs a step", "of step", "GB/s of weights", "of memory"];
    let mut table = table::new(&headings);
    let mut busy = 0.0;
    for (name, dispatches, us, bytes) in of_step(profile) {
        busy += us;
        let rate = bytes / us * 1e6;
        let has_weights = bytes > 0.0;
        table.add_row([
            name.to_owned(),
            format!("{dispatches:.0}"),
            format!("{:.1}", us / dispatches),
            format!("{us:.0}"),
            format!("{:.0} %", 100.0 * us / wall),
            if has_weights { format!("{:.0}", rate / 1e9) } else { String::new() },
            if has_weights { format!("{:.0} %", 100.0 * rate / memory) } else { String::new() },
        ]);
    }
    println!("{table}");
    println!(
        "{batch} sequence(s): a step takes {wall:.0} µs while it is timed, {busy:.0} of them in kernels \
         ({} steps); the longest submission took {:.1} ms",
        profile.steps,
        profile.longest_submission.as_secs_f64() * 1e3
    );
}
