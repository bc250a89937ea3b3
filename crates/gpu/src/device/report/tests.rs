//! Reports on the test device: early, refused, and of steps that have lost a sum.

use std::time::Instant;

use thunder_collectives::Group;

use super::*;
use crate::tests::device;
use crate::{GpuBackend, GpuConfig};

/// Words that the device adds meanwhile.
const WIDTH: usize = 1 << 20;

fn unproved(test: &str) -> Option<Device> {
    let found = device(test)?;
    Some(GpuBackend::unproved(&found, GpuConfig::default(), Group::solo()).unwrap().device)
}

/// Records `count` additions.
fn add(device: &mut Device, [x, sum]: [&Memory; 2], count: usize) {
    for _ in 0..count {
        device.dispatch(&Kernel::Add, &[x, sum], &[0, WIDTH as u32, 64], [64, 1, 1]).unwrap();
    }
}

/// Waits for a report that is the first of many commands in a submission. Returns the share of
/// their time after which it was there.
fn share_of_time(device: &mut Device, rows: [&Memory; 2], lost: u32) -> f64 {
    let results = device.filled(&[4, 5, 6, 7], "results").unwrap();
    let state = device.filled(&[lost; 4], "a state").unwrap();
    device.wait().unwrap();
    let mut count = 16;
    loop {
        let began = Instant::now();
        let (report, dispatch) = device.report(&results, 1..4, &state).unwrap();
        device.record_all(&[dispatch]).unwrap();
        device.most_dispatches = usize::MAX;
        add(device, rows, count);
        device.submit().unwrap();
        let mut found = Vec::new();
        let last = device.earlier[1].clone();
        assert_ne!(device.await_report(report, last, &mut found).unwrap(), Arrival::Never);
        assert_eq!(found, [5, 6, 7]);
        let there = began.elapsed().as_secs_f64();
        device.wait().unwrap();
        let all = began.elapsed().as_secs_f64();
        // Much longer than the host looks, so that it does not see the end by chance.
        if all > 0.4 {
            return there / all;
        }
        count *= 2;
    }
}

#[test]
fn results_arrive_while_the_device_goes_on_unless_a_sum_was_lost() {
    let test = "results_arrive_while_the_device_goes_on_unless_a_sum_was_lost";
    let Some(mut device) = unproved(test) else { return };
    device.prove_reports(false).unwrap().unwrap();
    if device.reports.is_none() {
        return thunder_testing::skip(test, "the device has no memory that the host sees");
    }
    let [x, sum] = [1, 2].map(|_| device.memory(4 * WIDTH, "rows").unwrap());
    device.prepare(&Kernel::Add).unwrap();
    // A busy machine may wake this thread late, so the earliest report counts.
    let mut early = (0..10).map(|_| share_of_time(&mut device, [&x, &sum], 0));
    assert!(early.any(|share| share < 0.5), "results arrive late each time");
    let late = share_of_time(&mut device, [&x, &sum], 1);
    assert!(late > 0.8, "after {late:.2} of the time");
}

#[test]
fn wrong_reports_are_refused_and_results_copied() {
    let test = "wrong_reports_are_refused_and_results_copied";
    let Some(mut device) = unproved(test) else { return };
    type Wrong = fn(&Kernel, String) -> String;
    let wrong: [(Wrong, &str); 3] = [
        (|_, text| text.replace("+ args.number;", "+ args.number - 1u;"), "did not arrive"),
        (|_, text| text.replace("word(at + 1u)", "word(at)"), "are wrong"),
        (|_, text| text.replace("args.to + id.x", "id.x"), "did not arrive"),
    ];
    for (sabotage, expected) in wrong {
        device.sabotage = Some(sabotage);
        device.forget(&Kernel::Report);
        let reason = device.prove_reports(false).unwrap().unwrap_err();
        assert!(reason.contains(expected), "{reason}");
        assert!(!device.can_report(1));
    }
    let results = device.filled(&[4, 5, 6, 7], "results").unwrap();
    let state = device.filled(&[0; 4], "a state").unwrap();
    let mut found = Vec::new();
    device.read_step((&results, 1..4), (Some(&state), None), &mut found, None).unwrap();
    assert_eq!(found, [5, 6, 7], "copied");
    device.sabotage = None;
    device.forget(&Kernel::Report);
    device.prove_reports(false).unwrap().unwrap();
    let Some(before) = device.reports.as_ref().map(|reports| reports.number) else { return };
    device.read_step((&results, 0..3), (Some(&state), None), &mut found, None).unwrap();
    assert_eq!(found, [4, 5, 6]);
    assert_eq!(device.reports.as_ref().map(|reports| reports.number), Some(before + 1), "reported");
}
