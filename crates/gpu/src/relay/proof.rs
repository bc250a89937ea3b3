//! The proof of relayed exchanges. All ranks run it together at each start; either all or none of
//! them use relayed exchanges.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use thunder_collectives::{Group, Op};
use thunder_compute::ComputeError;

use super::{Relay, To};
use crate::buffer::{BLOCK_COLUMNS, Memory, stride};
use crate::device::Device;
use crate::kernel::{Kernel, Look};
use crate::mailbox::{MAX_SOFTWARE_LOOKS, MAX_WORDS, Poison, Rows, looks_per_s, patience};
use crate::operations::leaving::Levels;
use crate::proof::Numbers;
use crate::without::{Way, without};

/// Exchanges of a proof, and of one on a software driver, which takes 40 ms for each.
const EXCHANGES: usize = 192;
const SOFTWARE_EXCHANGES: usize = 64;
/// Exchanges in a submission.
const OF_A_SUBMISSION: usize = 16;
/// Rows and widths of the proof's sums: one block, a row of a usual model, rows with padding, the
/// maximum.
const SHAPES: [[usize; 2]; 4] = [[1, BLOCK_COLUMNS], [1, 4096], [3, 40], [16, 4096]];
/// The partial sums of each exchange start this many words after those of the previous exchange, so
/// that consecutive exchanges differ. After `STEPS` exchanges they start again.
const STEP_WORDS: usize = 32;
const STEPS: usize = 61;
/// Minus the rank, this replaces an exchange's number, so that no other rank has the same.
const LONELY: u32 = u32::MAX - 1;

impl Relay {
    /// Exchanges that were correct on the devices of all ranks, which call this together. The inner
    /// error says why there are none, or that another rank has none. Returns the group.
    pub fn agreed(
        device: &mut Device,
        mut group: Box<Group>,
        is_real: bool,
    ) -> Result<(Box<Group>, Result<Self, String>), ComputeError> {
        let mut made = Self::new(device, &mut group, is_real)?;
        if let Ok(relay) = &mut made
            && let Err(reason) = relay.bound_looks(device, is_real)?
        {
            made = Err(reason);
        }
        let mut agreed = agree(&mut group, made)?;
        // If a part of a rank's proof fails, the rank skips the next part.
        for prove in [Self::prove, Self::prove_leaving] {
            let mut relay = match agreed {
                Ok(relay) => relay,
                Err(reason) => return Ok((group, Err(reason))),
            };
            // If a rank's device gives up, the other devices do not wait for it.
            relay.begin(group);
            let outcome = prove(&mut relay, device);
            let (Some(back), _) = relay.take_group() else { unreachable!("it was lent above") };
            group = back;
            agreed = agree(&mut group, outcome?.map(|()| relay))?;
        }
        Ok((group, agreed))
    }

    /// Counts a thread's polls per second. Nobody answers meanwhile, so this also proves that the
    /// device gives up.
    fn bound_looks(
        &mut self,
        device: &mut Device,
        is_real: bool,
    ) -> Result<Result<(), String>, ComputeError> {
        let x = device.memory(4 * BLOCK_COLUMNS, "a proof of exchanges")?;
        let to = device.memory(4 * BLOCK_COLUMNS, "a proof of exchanges")?;
        // Compiles all forms before peers wait for this rank.
        device.prepare(&Kernel::Relay(self.form(true, true)))?;
        device.prepare(&Kernel::Quantize { pairs: false })?;
        self.looks = 1;
        if let Err(reason) = self.give_up(device, &x, To::Rows(&to))? {
            return Ok(Err(reason));
        }
        let looks_per_s = looks_per_s(|looks| {
            self.looks = looks;
            self.give_up(device, &x, To::Place)
        })?;
        let most = if is_real { u32::MAX } else { MAX_SOFTWARE_LOOKS / 2 };
        Ok(looks_per_s.map(|looks_per_s| {
            let looks = looks_per_s * patience(is_real).as_secs_f64();
            self.looks = looks.clamp(1.0, f64::from(most)) as u32;
        }))
    }

    /// How long the device waits for peers that do not come.
    fn give_up(
        &self,
        device: &mut Device,
        x: &Memory,
        to: To<'_>,
    ) -> Result<Result<Duration, String>, ComputeError> {
        let number = LONELY - self.host.rank as u32;
        let rows = Rows { x, first: 0, rows: 1, width: BLOCK_COLUMNS, stride: BLOCK_COLUMNS };
        let began = Instant::now();
        self.dispatch(device, number, rows, to)?;
        device.submit()?;
        device.wait()?;
        let (took, verdict) = (began.elapsed(), self.verdict());
        self.reset(device)?;
        Ok(match verdict {
            Some((found, Poison::Late)) if found == number => Ok(took),
            _ => Err(format!("it should have given up an exchange, but its verdict is {verdict:?}")),
        })
    }

    /// Clears the poison. The device is idle.
    pub(super) fn reset(&self, device: &mut Device) -> Result<(), ComputeError> {
        self.host.shared.words()[4 * self.host.rank + 1].store(0, Ordering::Release);
        device.upload(&self.state, 0, &[0; 4])?;
        device.submit()?;
        device.wait()
    }

    /// Runs exchanges of all shapes with the other ranks. The inner error says what is wrong.
    pub(super) fn prove(&mut self, device: &mut Device) -> Result<Result<(), String>, ComputeError> {
        const WORDS: usize = MAX_WORDS + STEPS * STEP_WORDS;
        let all: Vec<Vec<f32>> =
            (0..self.host.ranks as u64).map(|rank| Numbers(11 + rank).take(WORDS)).collect();
        let bits = |numbers: &[f32]| numbers.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        let x = device.filled(&bits(&all[self.host.rank]), "a proof of exchanges")?;
        let in_place = device.filled(&bits(&all[self.host.rank]), "a proof of exchanges")?;
        let sums = device.filled(&vec![0; WORDS], "a proof of exchanges")?;
        let mut expected = [vec![0.0; WORDS], all[self.host.rank].clone()];
        let mut parts = all.clone();
        let exchanges = if self.look == Look::Once { EXCHANGES } else { SOFTWARE_EXCHANGES };
        for index in 0..exchanges {
            let [rows, width] = SHAPES[index % SHAPES.len()];
            let stride = stride(width);
            // For each shape first in place of the partial sums, which are then the same on all
            // ranks.
            let adds = index >= SHAPES.len();
            let first = if adds { STEP_WORDS * (index % STEPS) } else { 0 };
            let exchanged = Rows { x: if adds { &x } else { &in_place }, first, rows, width, stride };
            self.record(device, exchanged, if adds { To::Rows(&sums) } else { To::Place })?;
            for at in 0..rows * stride {
                let from = if adds { &all } else { &parts };
                let sum = match at % stride < width {
                    true => from[1..].iter().fold(from[0][first + at], |sum, part| sum + part[first + at]),
                    false => 0.0,
                };
                if adds {
                    expected[0][first + at] += sum;
                    continue;
                }
                expected[1][at] = sum;
                parts.iter_mut().for_each(|part| part[at] = sum);
            }
            if index % OF_A_SUBMISSION == OF_A_SUBMISSION - 1 {
                device.submit()?;
            }
        }
        device.submit()?;
        device.wait()?;
        if let Some(verdict) = self.verdict() {
            return Ok(Err(format!("{verdict:?}")));
        }
        let mut found = Vec::new();
        for (memory, expected) in [(&sums, &expected[0]), (&in_place, &expected[1])] {
            device.read(memory, 0..WORDS, &mut found)?;
            let differs = |at: &usize| found[*at] != expected[*at].to_bits();
            if let Some(at) = (0..WORDS).find(differs) {
                let (found, expected) = (f32::from_bits(found[at]), expected[at]);
                return Ok(Err(format!("word {at} is {found}, not {expected}")));
            }
        }
        Ok(Ok(()))
    }
}

impl Relay {
    /// Exchanges whose sums are also stored as levels, compared with those of the kernel that
    /// rounds rows. Ranks need not agree on this form, because it changes no bit.
    fn prove_leaving(&mut self, device: &mut Device) -> Result<Result<(), String>, ComputeError> {
        const WORDS: usize = 3 * 4096;
        let what = "a proof of exchanges";
        let bits = |numbers: &[f32]| numbers.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        let of_ranks: Vec<_> =
            (0..self.host.ranks as u64).map(|rank| Numbers(21 + rank).take(WORDS)).collect();
        let mut expected = Numbers(31).take(WORDS);
        let x = device.filled(&bits(&of_ranks[self.host.rank]), what)?;
        let sums = device.filled(&bits(&expected), what)?;
        let weights = device.filled(&bits(&Numbers(41).take(4096)), what)?;
        let mut places = Vec::new();
        for _ in 0..2 {
            let [levels, scales, squares] = [WORDS, WORDS / 2, WORDS / 8];
            places.push(Levels {
                levels: device.memory(levels, what)?,
                scales: device.memory(scales, what)?,
                squares: device.memory(squares, what)?,
            });
        }
        let mut wrong = None;
        for [rows, width] in [[1, 4096], [3, 4096], [3, 40], [1, BLOCK_COLUMNS]] {
            let stride = stride(width);
            let (blocks, all) = (stride / BLOCK_COLUMNS, rows * stride);
            let exchanged = Rows { x: &x, first: 0, rows, width, stride };
            self.record(device, exchanged, To::Left(&sums, &weights, &places[0]))?;
            let Levels { levels, scales, squares } = &places[1];
            let buffers = [&weights, &sums, levels, scales, squares];
            let arguments = [0, (stride / 4) as u32, blocks as u32, 1];
            let groups = [rows as u32, blocks.div_ceil(64) as u32, 1];
            device.dispatch(&Kernel::Quantize { pairs: false }, &buffers, &arguments, groups)?;
            for at in (0..all).filter(|at| at % stride < width) {
                expected[at] += of_ranks[1..].iter().fold(of_ranks[0][at], |sum, part| sum + part[at]);
            }
            let of = |levels: &Levels| [&levels.levels, &levels.scales, &levels.squares].map(Memory::clone);
            let pairs = of(&places[0]).into_iter().zip(of(&places[1]));
            for ((found, expected), words) in pairs.zip([all / 4, all / 8, all / 32]) {
                let (mut of_found, mut of_expected) = (Vec::new(), Vec::new());
                device.read(&found, 0..words, &mut of_found)?;
                device.read(&expected, 0..words, &mut of_expected)?;
                if of_found != of_expected {
                    wrong = Some(format!("rows of {width} columns as levels"));
                }
            }
        }
        if let Some(verdict) = self.verdict() {
            return Ok(Err(format!("{verdict:?}")));
        }
        let mut found = Vec::new();
        device.read(&sums, 0..WORDS, &mut found)?;
        if found != bits(&expected) {
            wrong = Some("sums that are left as levels".to_owned());
        }
        let name = &device.name;
        if let Some(reason) = &wrong {
            tracing::warn!(device = name, reason, "levels that relayed sums leave are refused");
        }
        self.can_leave = wrong.is_none() && ![Way::Levels, Way::Relayed].into_iter().any(without);
        Ok(Ok(()))
    }
}

/// This rank's result, if all ranks have one.
pub(crate) fn agree<T>(
    group: &mut Group,
    made: Result<T, String>,
) -> Result<Result<T, String>, ComputeError> {
    let mut all = [u64::from(made.is_ok())];
    group.all_reduce(&mut all, Op::Min)?;
    Ok(made.and_then(|made| match all {
        [1] => Ok(made),
        _ => Err("another rank's device has none".to_owned()),
    }))
}
