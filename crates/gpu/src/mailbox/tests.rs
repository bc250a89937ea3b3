//! Exchanges on the test device, with a host that answers, is late, lies or is lost.

use std::sync::Mutex;
use std::time::Duration;

use super::boxes::Poison;
use super::{Failure, Mailbox, Rows, Summer};
use crate::buffer::Memory;
use crate::device::Device;
use crate::tests::device;

fn opened(test: &str) -> Option<(Device, bool)> {
    let found = device(test)?;
    Some((Device::open(&found, true).unwrap(), found.info.is_real()))
}

fn proved(device: &mut Device, is_real: bool) -> Mailbox {
    Mailbox::proved(device, is_real).unwrap().unwrap()
}

const WIDTH: usize = 64;

fn row(x: &Memory) -> Rows<'_> {
    Rows { x, first: 0, rows: 1, width: WIDTH, stride: WIDTH }
}

#[test]
fn all_forms_of_exchanges_are_right() {
    let Some((mut device, is_real)) = opened("all_forms_of_exchanges_are_right") else { return };
    let mut mailbox = proved(&mut device, is_real);
    assert!(mailbox.words_at_once > 0, "exchanges by one kernel were refused");
    mailbox.words_at_once = 0;
    mailbox.prove_form(&mut device).unwrap().unwrap();
    mailbox.is_coherent = true;
    mailbox.prove_timed(&mut device, is_real).unwrap().unwrap();
    mailbox.is_coherent = false;
    // The numbers of the proof's exchanges wrap around.
    mailbox.worker.numbers().set_last(u32::MAX - 20);
    mailbox.prove_form(&mut device).unwrap().unwrap();
    assert!(mailbox.number() < u32::MAX / 2);
}

#[test]
fn a_kernel_that_takes_wrong_words_is_refused() {
    let Some((mut device, is_real)) = opened("a_kernel_that_takes_wrong_words_is_refused") else { return };
    // Wrong in the single-kernel form only, so two kernels are used.
    device.sabotage = Some(|_, text| match text.contains("x[args.first + i] =") {
        true => text.replace("inbox[args.slot + i]", "inbox[args.slot + (i ^ 1u)]"),
        false => text,
    });
    assert_eq!(proved(&mut device, is_real).words_at_once, 0);
    let (mut device, _) = opened("").unwrap();
    device.sabotage =
        Some(|_, text| text.replace("bitcast<vec4<u32>>(x[", "vec4<u32>(1u) + bitcast<vec4<u32>>(x["));
    let refused = Mailbox::proved(&mut device, is_real).unwrap().err().unwrap();
    assert!(refused.contains("word"), "{refused}");
    // Nor does a text that the device's compiler does not take stop anything.
    device.speaks_metal = true;
    let refused = Mailbox::proved(&mut device, is_real).unwrap().err().unwrap();
    assert!(refused.contains("does not compile"), "{refused}");
    // A device that never gives up would hang; one that gives up at once would never get an answer.
    let (mut device, _) = opened("").unwrap();
    device.sabotage = Some(|_, text| {
        text.replace("const TURNS = 128u", "const TURNS = 1u").replace("looks >= args.looks", "looks >= 1u")
    });
    let refused = Mailbox::proved(&mut device, is_real).unwrap().err().unwrap();
    assert!(refused.contains("Late"), "{refused}");
}

#[test]
fn a_late_answer_poisons_and_the_device_works_afterwards() {
    let test = "a_late_answer_poisons_and_the_device_works_afterwards";
    let Some((mut device, is_real)) = opened(test) else { return };
    let mut mailbox = proved(&mut device, is_real);
    let numbers: Vec<u32> = (0..WIDTH as u32).collect();
    let x = device.filled(&numbers, "test").unwrap();
    mailbox.looks /= if is_real { 20 } else { 300 };
    mailbox.begin(Summer::Stand(|_, _| std::thread::sleep(Duration::from_millis(400))));
    for _ in 0..3 {
        mailbox.record(&mut device, row(&x), None).unwrap();
    }
    let first = mailbox.number() - 2;
    let mut found = Vec::new();
    device.read(&x, 0..WIDTH, &mut found).unwrap();
    assert_eq!(found, numbers, "an exchange without an answer changes nothing");
    assert_eq!(mailbox.verdict(), Some((first, Poison::Late)));
    let (_, outcome) = mailbox.take_back(&device);
    assert_eq!(outcome, Err(Failure::Poison(first, Poison::Late)));
    drop(mailbox);
    proved(&mut device, is_real);
}

#[test]
fn an_answer_that_is_announced_before_it_is_there_poisons() {
    let test = "an_answer_that_is_announced_before_it_is_there_poisons";
    let Some((mut device, is_real)) = opened(test) else { return };
    let mut mailbox = proved(&mut device, is_real);
    mailbox.reset(&mut device).unwrap();
    let x = device.memory(4 * WIDTH, "test").unwrap();
    let mut words = [1; WIDTH];
    mailbox.boxes.answer(1, &words, 7);
    // One vector of the answer is missing.
    words[20..24].fill(0x7fc0_dead);
    mailbox.boxes.answer(1, &words, 7);
    mailbox.dispatch(&mut device, Some(7), row(&x), None).unwrap();
    device.submit().unwrap();
    device.wait().unwrap();
    assert_eq!(mailbox.verdict(), Some((7, Poison::Torn)));
}

#[test]
fn a_mailbox_that_is_dropped_lets_the_device_go() {
    let Some((mut device, is_real)) = opened("a_mailbox_that_is_dropped_lets_the_device_go") else { return };
    static HELD: Mutex<()> = Mutex::new(());
    let mut mailbox = proved(&mut device, is_real);
    let x = device.memory(4 * WIDTH, "test").unwrap();
    let held = HELD.lock().unwrap();
    mailbox.begin(Summer::Stand(|_, _| drop(HELD.lock())));
    for _ in 0..2 {
        mailbox.record(&mut device, row(&x), None).unwrap();
    }
    device.submit().unwrap();
    let dropping = std::thread::spawn(move || drop(mailbox));
    std::thread::sleep(Duration::from_millis(20));
    drop(held);
    dropping.join().unwrap();
    // The second exchange is answered or ended, depending on the thread's timing.
    let began = std::time::Instant::now();
    device.wait().unwrap();
    assert!(began.elapsed() < Duration::from_secs(10), "the device waited until its own limit");
    proved(&mut device, is_real);
}

#[test]
fn exchanges_at_gates_are_right_and_an_end_opens_all() {
    let test = "exchanges_at_gates_are_right_and_an_end_opens_all";
    let Some((mut device, is_real)) = opened(test) else { return };
    let mut mailbox = Mailbox::gated(&mut device, is_real).unwrap().unwrap();
    assert!(mailbox.is_gated());
    let numbers: Vec<u32> = (0..WIDTH as u32).collect();
    let x = device.filled(&numbers, "test").unwrap();
    // The device does not give up, however late the answer is.
    mailbox.begin(Summer::Stand(|values, _| {
        std::thread::sleep(Duration::from_millis(300));
        values.fill(1.5);
    }));
    mailbox.record(&mut device, row(&x), None).unwrap();
    let mut found = Vec::new();
    device.read(&x, 0..WIDTH, &mut found).unwrap();
    assert_eq!(found, [1.5f32.to_bits(); WIDTH]);
    let (_, outcome) = mailbox.take_back(&device);
    assert_eq!(outcome, Ok(()));
    // Nobody answers these. Dropping the mailbox ends them.
    mailbox.gate = 1 << 20;
    mailbox.dispatch(&mut device, Some(9), row(&x), None).unwrap();
    device.submit().unwrap();
    drop(mailbox);
    device.wait().unwrap();
    device.read(&x, 0..WIDTH, &mut found).unwrap();
    assert_eq!(found, [1.5f32.to_bits(); WIDTH]);
    let (mut device, _) = opened("").unwrap();
    device.sabotage = Some(|_, text| text.replace("inbox[args.slot + i]", "inbox[args.slot + (i ^ 1u)]"));
    let refused = Mailbox::gated(&mut device, is_real).unwrap().err().unwrap();
    assert!(refused.contains("word"), "{refused}");
}
