//! The proof of a mailbox: exchanges with known results, at each start of a backend. Whether host
//! and device see each other's writes in time depends on more than the driver's version, so the
//! result is not kept.

use std::time::{Duration, Instant};

use thunder_compute::ComputeError;

use super::boxes::{MAX_WORDS, Poison};
use super::worker::Summer;
use super::{Mailbox, Rows, patience};
use crate::buffer::{BLOCK_COLUMNS, Memory, stride};
use crate::device::Device;
use crate::device::gate::Gates;
use crate::kernel::{Coherent, EXCHANGE_THREADS, Kernel};
use crate::proof::Numbers;

/// Exchanges in the proof of a form.
const EXCHANGES: u32 = 192;
/// Exchanges in a submission.
const OF_A_SUBMISSION: u32 = 16;
/// How long the device waits for an exchange of the proof.
const PROOF_PATIENCE: Duration = Duration::from_millis(250);
/// Minimum time for counting polls of the flag.
const COUNTED: Duration = Duration::from_millis(10);
/// Maximum rounds of a loop on Mesa's llvmpipe, minus some for the kernel's other loops.
pub(crate) const MAX_SOFTWARE_LOOKS: u32 = 65_000;
/// Polls of the flag after a gate.
const GATED_LOOKS: u32 = 1 << 12;
/// How often the count is tried.
const COUNTS: usize = 4;
/// Rows and widths of the proof's sums: one block, a row of a usual model, rows with padding, the
/// maximum.
const SHAPES: [[usize; 2]; 4] = [[1, BLOCK_COLUMNS], [1, 4096], [3, 40], [16, 4096]];

impl Mailbox {
    /// A mailbox whose exchanges were correct on this device. The inner error says why there is
    /// none.
    pub fn proved(device: &mut Device, is_real: bool) -> Result<Result<Self, String>, ComputeError> {
        if device.max_threads() < EXCHANGE_THREADS {
            return Ok(Err(format!("it has workgroups of {} threads at most", device.max_threads())));
        }
        let Some(mut mailbox) = Self::new(device, is_real, None)? else {
            return Ok(Err("its driver gives no memory that host and device both see".to_owned()));
        };
        let mut outcome = mailbox.prove_timed(device, is_real)?;
        // A running kernel's stores may not reach the host. Two kernels work in this case, or three
        // in a language that can say what the host shall see.
        for is_coherent in [false, true].into_iter().take(1 + usize::from(device.speaks_metal)) {
            let Err(reason) = &outcome else { break };
            let kernels = if is_coherent { 3 } else { 2 };
            tracing::warn!(
                device = device.name,
                reason,
                kernels,
                "a form of sums is refused, this one is tried"
            );
            mailbox = match Self::new(device, is_real, None)? {
                Some(mailbox) => Self { words_at_once: 0, is_coherent, ..mailbox },
                None => return Ok(Err("its driver gives no more shared memory".to_owned())),
            };
            let mut steps = Coherent::ALL.into_iter().filter(|_| is_coherent);
            outcome = match steps.try_for_each(|step| device.prepare(&Kernel::Coherent(step))) {
                Ok(()) => mailbox.prove_timed(device, is_real)?,
                // Metal's compiler has refused the text.
                Err(error) => Err(error.to_string()),
            };
        }
        Ok(outcome.map(|()| mailbox))
    }

    /// Counts the form's polls per second, so that its waits have a bound, and proves it.
    pub(super) fn prove_timed(
        &mut self,
        device: &mut Device,
        is_real: bool,
    ) -> Result<Result<(), String>, ComputeError> {
        let looks_per_s = match self.count_looks(device)? {
            Ok(looks_per_s) => looks_per_s,
            Err(reason) => return Ok(Err(reason)),
        };
        let most = if is_real { u32::MAX } else { MAX_SOFTWARE_LOOKS };
        let looks = |time: Duration| (looks_per_s * time.as_secs_f64()).clamp(1.0, f64::from(most)) as u32;
        self.looks = looks(if is_real { PROOF_PATIENCE } else { patience(is_real) });
        let outcome = self.prove_form(device)?;
        self.looks = looks(patience(is_real));
        Ok(outcome)
    }

    /// A mailbox with gates whose exchanges were correct. It is slower than one that waits in
    /// kernels, and works where those have failed.
    pub fn gated(device: &mut Device, is_real: bool) -> Result<Result<Self, String>, ComputeError> {
        let Some(gates) = Gates::new(device) else {
            return Ok(Err("its driver has no gates that the host opens".to_owned()));
        };
        let Some(mailbox) = Self::new(device, is_real, Some(gates))? else {
            return Ok(Err("its driver gives no memory that host and device both see".to_owned()));
        };
        // The answer has arrived when its gate opens.
        let mut mailbox = Self { looks: GATED_LOOKS, words_at_once: 0, ..mailbox };
        Ok(mailbox.prove_form(device)?.map(|()| mailbox))
    }

    /// Counts how often a thread polls the flag in a second. Nobody answers meanwhile, so this also
    /// proves that the device gives up.
    fn count_looks(&mut self, device: &mut Device) -> Result<Result<f64, String>, ComputeError> {
        let x = device.memory(4 * BLOCK_COLUMNS, "a proof of exchanges")?;
        looks_per_s(|looks| {
            self.looks = looks;
            self.give_up(device, &x)
        })
    }

    /// How long the device waits for an answer that does not come.
    fn give_up(&mut self, device: &mut Device, x: &Memory) -> Result<Result<Duration, String>, ComputeError> {
        let rows = Rows { x, first: 0, rows: 1, width: BLOCK_COLUMNS, stride: BLOCK_COLUMNS };
        let began = Instant::now();
        self.dispatch(device, Some(1), rows, None)?;
        device.submit()?;
        device.wait()?;
        let (took, verdict) = (began.elapsed(), self.verdict());
        self.reset(device)?;
        Ok(match verdict {
            Some((1, Poison::Late)) => Ok(took),
            _ => Err(format!("it should have given up an exchange, but its verdict is {verdict:?}")),
        })
    }

    /// Empties all slots. The device is idle.
    pub(super) fn reset(&mut self, device: &mut Device) -> Result<(), ComputeError> {
        self.boxes.reset();
        device.upload(&self.state, 0, &[0; 4])
    }

    /// Runs exchanges of all shapes. The inner error says what is wrong.
    pub(super) fn prove_form(&mut self, device: &mut Device) -> Result<Result<(), String>, ComputeError> {
        let mut numbers = Numbers(5);
        let start: Vec<u32> = numbers.take(MAX_WORDS).iter().map(|x| x.to_bits()).collect();
        let x = device.filled(&start, "a proof of exchanges")?;
        let sums = device.filled(&vec![0; MAX_WORDS], "a proof of exchanges")?;
        let mut expected = [start, vec![0; MAX_WORDS]];
        self.begin(Summer::Stand(scramble));
        for index in 0..EXCHANGES {
            let [rows, width] = SHAPES[index as usize % SHAPES.len()];
            let exchanged = Rows { x: &x, first: 0, rows, width, stride: stride(width) };
            // Every second exchange of a shape adds to rows.
            let adds = index as usize / SHAPES.len() % 2 == 1;
            self.record(device, exchanged, adds.then_some(&sums))?;
            follow(&mut expected, exchanged, adds, self.worker.numbers().last());
            if index % OF_A_SUBMISSION == OF_A_SUBMISSION - 1 {
                device.submit()?;
            }
        }
        device.submit()?;
        let waited = device.wait();
        let (_, outcome) = self.take_back(device);
        waited?;
        if let Err(failure) = outcome {
            return Ok(Err(format!("{failure:?}")));
        }
        let mut found = Vec::new();
        for (memory, expected) in [(&x, &expected[0]), (&sums, &expected[1])] {
            device.read(memory, 0..MAX_WORDS, &mut found)?;
            if let Some(at) = (0..MAX_WORDS).find(|&at| found[at] != expected[at]) {
                let (found, expected) = (found[at], expected[at]);
                return Ok(Err(format!("word {at} is {found:#010x}, not {expected:#010x}")));
            }
        }
        Ok(Ok(()))
    }
}

/// Counts a thread's polls per second. `give_up` makes the device poll in vain this many times, and
/// returns how long that took.
pub(crate) fn looks_per_s(
    mut give_up: impl FnMut(u32) -> Result<Result<Duration, String>, ComputeError>,
) -> Result<Result<f64, String>, ComputeError> {
    // The first run also compiles the kernel.
    if let Err(reason) = give_up(1)? {
        return Ok(Err(reason));
    }
    let mut looks = 1 << 6;
    loop {
        // A busy host only makes it longer, so the shortest time counts.
        let mut shortest = Duration::MAX;
        for _ in 0..COUNTS {
            match give_up(looks)? {
                Ok(took) => shortest = shortest.min(took),
                Err(reason) => return Ok(Err(reason)),
            }
            if shortest < COUNTED {
                break;
            }
        }
        if shortest >= COUNTED || looks >= MAX_SOFTWARE_LOOKS {
            return Ok(Ok(f64::from(looks) / shortest.as_secs_f64()));
        }
        looks *= 4;
    }
}

/// Stands in for the sum: numbers in 1..2 that depend on the partial sum, the position and the
/// exchange. Different inputs never get equal mantissas, so a wrong number stays wrong in later
/// exchanges.
fn scramble(values: &mut [f32], number: u32) {
    for (index, value) in (0u32..).zip(values) {
        let mixed = value.to_bits().wrapping_mul(0x9e37_79b1).wrapping_add(number.wrapping_mul(77) ^ index);
        *value = f32::from_bits(mixed & 0x007f_ffff | 0x3f80_0000);
    }
}

/// What an exchange does to the partial sums and to the rows that get the sums.
fn follow([x, sums]: &mut [Vec<u32>; 2], rows: Rows<'_>, adds: bool, number: u32) {
    let Rows { rows, width, stride, .. } = rows;
    let mut values = Vec::with_capacity(rows * width);
    for row in x[..rows * stride].chunks_exact(stride) {
        values.extend(row[..width].iter().map(|word| f32::from_bits(*word)));
    }
    scramble(&mut values, number);
    let to = if adds { sums } else { x };
    for (row, values) in to[..rows * stride].chunks_exact_mut(stride).zip(values.chunks_exact(width)) {
        let (numbers, padding) = row.split_at_mut(width);
        for (word, value) in numbers.iter_mut().zip(values) {
            *word = if adds { f32::from_bits(*word) + value } else { *value }.to_bits();
        }
        if !adds {
            padding.fill(0);
        }
    }
}
