//! Kernels that leave levels of their results: the same bits as the kernel that rounds rows.

use thunder_compute::{ComputeError, Device as _};

use super::Numbers;
use crate::backend::GpuBackend;
use crate::buffer::Memory;
use crate::kernel::{Input, Kernel};

/// Levels of attention's results, of two query heads of 64 columns.
pub(super) fn combined(backend: &mut GpuBackend) -> Result<Result<(), String>, ComputeError> {
    const [ROWS, HEADS, SPLITS, WIDTH]: [usize; 4] = [2, 2, 3, 64];
    const BLOCKS: usize = HEADS * WIDTH / 32;
    let mut numbers = Numbers(12).take(ROWS * HEADS * SPLITS * (WIDTH + 2));
    // Sums of weights are positive.
    numbers.chunks_mut(WIDTH + 2).for_each(|part| part[1] = part[1].abs() + 0.5);
    let parts: Vec<u32> = numbers.iter().map(|x| x.to_bits()).collect();
    let parts = backend.device.filled(&parts, "a proof")?;
    // Positions of rows with three and with two splits.
    let tables = backend.device.filled(&[150, 0, 0, 0, 70, 0, 0, 0], "a proof")?;
    let mut plain = backend.buffer(ROWS, HEADS * WIDTH)?;
    let mut leaving = backend.buffer(ROWS, HEADS * WIDTH)?;
    plain.shape(ROWS)?;
    leaving.shape(ROWS)?;
    let levels = backend.device.memory(ROWS * BLOCKS * 32, "a proof")?;
    let scales = backend.device.memory(ROWS * BLOCKS * 16, "a proof")?;
    let arguments =
        [0, HEADS, SPLITS, WIDTH + 2, plain.stride(), 0, WIDTH, 0, 0, 0, BLOCKS].map(|number| number as u32);
    let groups = [HEADS as u32, ROWS as u32, (WIDTH / 32) as u32];
    let nothing = backend.nothing.clone();
    let buffers = [&tables, &nothing, &parts, &plain.memory];
    backend.device.dispatch(&Kernel::Combine { levels: false }, &buffers, &arguments, groups)?;
    let buffers = [&tables, &nothing, &parts, &leaving.memory, &levels, &scales];
    backend.device.dispatch(&Kernel::Combine { levels: true }, &buffers, &arguments, groups)?;
    let operand = backend.quantized(&plain, 0..ROWS, BLOCKS, Input::Bytes, None)?;
    let pairs = [
        (&plain.memory, &leaving.memory, ROWS * plain.stride()),
        (&operand.buffers[0], &levels, ROWS * BLOCKS * 8),
        (&operand.buffers[1], &scales, ROWS * BLOCKS * 4),
    ];
    same(backend, &pairs)
}

/// Whether buffers have the same words.
fn same(
    backend: &mut GpuBackend,
    pairs: &[(&Memory, &Memory, usize)],
) -> Result<Result<(), String>, ComputeError> {
    let (mut expected, mut found) = (Vec::new(), Vec::new());
    for (index, (of_expected, of_found, words)) in pairs.iter().enumerate() {
        backend.device.read(of_expected, 0..*words, &mut expected)?;
        backend.device.read(of_found, 0..*words, &mut found)?;
        if let Some(at) = (0..*words).find(|&at| found[at] != expected[at]) {
            let (found, expected) = (found[at], expected[at]);
            return Ok(Err(format!("word {at} of result {index} is {found:#010x}, not {expected:#010x}")));
        }
    }
    Ok(Ok(()))
}
