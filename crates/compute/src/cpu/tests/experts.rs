//! A step reads the weights of the experts that its tokens chose, and of no others: the others'
//! weights are on pages that cannot be read.

use std::os::unix::process::ExitStatusExt;
use std::process::Command;

use super::*;
use crate::backend::{Activation, Expert};

const EXPERTS: usize = 6;
const CHOSEN: [usize; 2] = [1, 4];
const COLS: usize = 256;
const CHANNELS: usize = 256;

/// Set for the process in which the last of [`CHOSEN`] cannot be read either.
const PROTECTED: &str = "THUNDER_TEST_PROTECTED_EXPERT";
const TEST: &str = "cpu::tests::experts::a_step_reads_the_chosen_experts_only";

/// Packs an expert whose matrices share pages with no other.
fn packed(backend: &mut CpuBackend, encoding: Encoding, numbers: &mut Random) -> Expert<Linear> {
    let mut matrix = |shapes: &[[usize; 2]]| {
        let of = |[rows, cols]: &[usize; 2]| Stored::random(*rows, *cols, encoding, numbers);
        let stored: Vec<Stored> = shapes.iter().map(of).collect();
        // A new arena begins with a new mapping.
        backend.arena = Arena::default();
        let sources: Vec<_> = stored.iter().map(|stored| stored.source(None)).collect();
        backend.matrix(&sources).unwrap()
    };
    let gate_up = matrix(&[[CHANNELS, COLS]; 2]);
    Expert { gate_up, down: matrix(&[[COLS, CHANNELS]]), down_bias: None }
}

/// The first byte and the length of the pages that hold an expert's weights.
fn pages(expert: &Expert<Linear>) -> Vec<(usize, usize)> {
    // SAFETY: only asks.
    let page = unsafe { libc::sysconf(libc::_SC_PAGESIZE) } as usize;
    let parts = expert.gate_up.parts.iter().chain(&expert.down.parts);
    let of = |part: &Matrix| {
        let start = part.panels.as_ptr() as usize / page * page;
        let end = (part.panels.as_ptr() as usize + part.panels.len()).next_multiple_of(page);
        (start, end - start)
    };
    parts.map(of).collect()
}

/// Ends the process if one of these pages is touched.
fn protect(pages: Vec<(usize, usize)>) {
    for (start, len) in pages {
        // SAFETY: whole pages of a mapping that holds nothing but one expert's matrix.
        let failed = unsafe { libc::mprotect(start as *mut libc::c_void, len, libc::PROT_NONE) };
        assert_eq!(failed, 0, "{}", std::io::Error::last_os_error());
    }
}

fn check(isa: Isa, encoding: Encoding, rows: usize, protects_chosen: bool) {
    let mut numbers = Random::new(rows as u64);
    let mut backend = backend(isa, 2, Activations::Auto);
    let experts: Vec<_> = (0..EXPERTS).map(|_| packed(&mut backend, encoding, &mut numbers)).collect();
    let pages: Vec<_> = experts.iter().map(pages).collect();
    let experts = backend.experts(experts, Activation::Silu).unwrap();
    let x = filled(&mut backend, &numbers.floats(rows * COLS), COLS);
    let choices = CHOSEN.map(|expert| expert as f32).into_iter().chain([0.25, 0.75]);
    let choices: Vec<f32> = std::iter::repeat_n(choices, rows).flatten().collect();
    let choices = filled(&mut backend, &choices, 2 * CHOSEN.len());
    let sum = |backend: &mut CpuBackend| {
        let mut out = backend.buffer(rows, COLS).unwrap();
        backend.expert_sum(&x, 0..rows, &choices, &experts, &mut out).unwrap();
        read(backend, &out)
    };
    let expected = sum(&mut backend);
    for (expert, pages) in pages.into_iter().enumerate() {
        if !CHOSEN.contains(&expert) || (protects_chosen && CHOSEN.ends_with(&[expert])) {
            protect(pages);
        }
    }
    assert_eq!(sum(&mut backend), expected, "{isa:?}, {encoding:?}, {rows} rows");
}

#[test]
fn a_step_reads_the_chosen_experts_only() {
    let formats = [
        Encoding::Float(Float::BF16),
        Encoding::Affine { bits: 4, group: 64, scales: Float::BF16 },
        Encoding::Affine { bits: 8, group: 32, scales: Float::F16 },
        Encoding::Blocks(Block::Q4_0),
        Encoding::Blocks(Block::Q6K),
    ];
    if std::env::var_os(PROTECTED).is_some() {
        check(Isa::Portable, formats[1], 1, true);
        return;
    }
    for isa in Isa::available() {
        for encoding in formats {
            // One generated token, a few, and a prompt.
            for rows in [1, 3, 40] {
                check(isa, encoding, rows, false);
            }
        }
    }
    let itself = std::env::current_exe().unwrap();
    let child = Command::new(itself).args(["--exact", TEST]).env(PROTECTED, "1").output().unwrap();
    // The emulator of `cargo xtask test-neon` cannot start programs of the emulated processor.
    // x86-64 shows that the protection works.
    if cfg!(target_arch = "aarch64") && child.status.code() == Some(127) {
        return;
    }
    let ended_by = child.status.signal();
    assert!(
        matches!(ended_by, Some(libc::SIGSEGV | libc::SIGBUS)),
        "a chosen expert was not read: {} {}",
        child.status,
        String::from_utf8_lossy(&child.stderr)
    );
}
