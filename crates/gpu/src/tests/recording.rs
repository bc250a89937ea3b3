//! Steps whose beginnings are recorded ahead, and the host's time for each part of a step, for
//! which a device waits between two steps. `cargo nextest run --release -p thunder-gpu
//! --run-ignored all --no-capture step_of_the_host`, with THUNDER_TEST_GPU=0 for a real GPU

use std::time::{Duration, Instant};

use thunder_collectives::Group;
use thunder_compute::{Activations, Device};

use super::{backend, device};
use crate::buffer::Memory;
use crate::kernel::Kernel;

/// Dispatches of a decode step of Llama 8B's shape.
const DISPATCHES: usize = 357;

/// Number of vectors of weights, because each layer of a model has its own.
const VECTORS: usize = 128;

/// Words of the tables at the beginning of a step.
const TABLE_WORDS: usize = 200;

const WIDTH: usize = 64;

/// A step: row `row` of `x`, and row 1 added to it `additions` times; the addition number `half`,
/// if given, is done for the first half only. Returns the first and last column, and the number of
/// submissions.
fn add_up(
    device: &mut crate::device::Device,
    [x, sum]: [&Memory; 2],
    row: u32,
    additions: usize,
    half: Option<usize>,
) -> ([f32; 2], usize) {
    device.clear_tables(Some(1)).unwrap();
    let (table, at) = device.table(&[row]).unwrap();
    let arguments = [at, WIDTH as u32, WIDTH as u32];
    device.dispatch(&Kernel::TakeRows, &[&table, x, sum], &arguments, [1, 1, 1]).unwrap();
    for index in 0..additions {
        let columns = if half == Some(index) { WIDTH / 2 } else { WIDTH };
        device.dispatch(&Kernel::Add, &[x, sum], &[0, columns as u32, 1], [1, 1, 1]).unwrap();
    }
    let mut words = Vec::new();
    device.read(sum, 0..WIDTH, &mut words).unwrap();
    ([words[0], words[WIDTH - 1]].map(f32::from_bits), device.submissions)
}

#[test]
fn beginnings_of_repeated_steps_are_recorded_ahead() {
    let Some(found) = device("beginnings_of_repeated_steps_are_recorded_ahead") else { return };
    let mut backend = backend(&found, Activations::Auto, Group::solo());
    let device = &mut backend.device;
    // Rows of 1, 2 and 3; the first row is added.
    let rows: Vec<u32> = (0..3 * WIDTH).map(|i| ((i / WIDTH + 1) as f32).to_bits()).collect();
    let x = device.filled(&rows, "rows").unwrap();
    let sum = device.memory(WIDTH * 4, "a sum").unwrap();
    let mut step = |row, additions, half| add_up(device, [&x, &sum], row, additions, half);
    // 16, 32 and 12 dispatches, as nothing is recorded ahead.
    assert_eq!(step(0, 59, None), ([60.0; 2], 3));
    assert_eq!(step(1, 59, None), ([61.0; 2], 3), "before a repeated step, nothing is recorded ahead");
    // 32 and 28 dispatches, with different tables each time.
    assert_eq!(step(2, 59, None), ([62.0; 2], 2));
    assert_eq!(step(0, 59, None), ([60.0; 2], 2));
    assert_eq!(step(1, 59, Some(40)), ([61.0, 60.0], 2), "other dispatches behind the beginning");
    // Dispatches that were held back are recorded, before and after the size of the first
    // submission.
    assert_eq!(step(2, 59, Some(5)), ([62.0, 61.0], 3));
    assert_eq!(step(0, 59, Some(5)), ([60.0, 59.0], 3));
    assert_eq!(step(1, 59, Some(30)), ([61.0, 60.0], 3));
    assert_eq!(step(2, 59, Some(30)), ([62.0, 61.0], 3));
    assert_eq!(step(0, 59, Some(30)), ([60.0, 59.0], 2));
    // A step that ends while its dispatches are held back, and other steps that are this short.
    assert_eq!(step(1, 20, None), ([22.0; 2], 2));
    assert_eq!(step(2, 20, None), ([23.0; 2], 2));
    assert_eq!(step(0, 20, None), ([21.0; 2], 2));
}

#[test]
#[ignore = "a measurement"]
fn step_of_the_host() {
    let Some(found) = device("step_of_the_host") else { return };
    let mut backend = backend(&found, Activations::Auto, Group::solo());
    let weights: Vec<_> = (0..VECTORS).map(|_| backend.vector(&[1.0; WIDTH]).unwrap()).collect();
    let (x, out) = (backend.buffer(1, WIDTH).unwrap(), backend.buffer(1, WIDTH).unwrap());
    let arguments = [WIDTH as u32, 0, x.stride() as u32, out.stride() as u32, 1e-5f32.to_bits()];
    let mut words = Vec::new();
    let mut step = || {
        let device = &mut backend.device;
        let mut marks = vec![Instant::now()];
        device.clear_tables(Some(1)).unwrap();
        device.table(&[1; TABLE_WORDS]).unwrap();
        device.table(&[1]).unwrap();
        marks.push(Instant::now());
        for index in 0..DISPATCHES {
            let submissions = device.submissions;
            let buffers = [&weights[index % VECTORS].memory, &x.memory, &out.memory];
            device.dispatch(&Kernel::Norm { levels: false }, &buffers, &arguments, [1, 1, 1]).unwrap();
            if submissions == 0 && device.submissions == 1 {
                marks.push(Instant::now());
            }
        }
        device.table(&[0]).unwrap();
        device.submit().unwrap();
        marks.push(Instant::now());
        device.read(&out.memory, 0..WIDTH, &mut words).unwrap();
        marks.push(Instant::now());
        marks
    };
    let steps: Vec<Vec<Duration>> =
        (0..203).map(|_| step().windows(2).map(|pair| pair[1] - pair[0]).collect()).skip(3).collect();
    for (part, name) in
        ["tables", "to the first submission", "the rest", "waiting and reading"].iter().enumerate()
    {
        let mut times: Vec<_> = steps.iter().map(|step| step[part]).collect();
        times.sort();
        println!("{name}: {:.0} µs", times[times.len() / 2].as_secs_f64() * 1e6);
    }
}
