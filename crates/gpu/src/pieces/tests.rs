//! Large sums on the test device or on several GPUs: correct, refused and lost ones.

use std::time::Duration;

use thunder_collectives::{CommError, Group, TransportChoice, local};
use thunder_compute::{Activations, Backend as _, ComputeError, Device as _};

use super::Pieces;
use crate::device::Device;
use crate::kernel::Kernel;
use crate::tests::{devices, relaying};
use crate::{Found, GpuBackend, SumForm};

/// Rows and columns of a sum that no kernel waits for, and words of a piece, which begins within a
/// row.
const ROWS: usize = 55;
const WIDTH: usize = 4090;
const PIECE_WORDS: usize = 40_000;

fn backend(found: &Found, group: Group) -> GpuBackend {
    let mut backend = relaying(found, Activations::Auto, group);
    assert_eq!(backend.sum_form_of(1, WIDTH), SumForm::Relay);
    assert_eq!(backend.sum_form_of(ROWS, WIDTH), SumForm::Pieces);
    backend.sums.pieces.as_mut().unwrap().words = PIECE_WORDS;
    backend
}

/// A whole number that no other rank, sum or place nearby has.
fn part(rank: usize, sum: usize, at: usize) -> f32 {
    ((sum * 31 + at * 7 + rank * 13) % 1021) as f32
}

#[test]
fn prompts_sums_are_right_between_those_of_tokens() {
    let Some(devices) = devices("prompts_sums_are_right_between_those_of_tokens", 2) else { return };
    local::run(2, TransportChoice::Shm, |group| {
        let rank = group.rank();
        let mut backend = backend(&devices[rank], group);
        let [mut x, mut y] = [0; 2].map(|_| backend.buffer(ROWS, WIDTH).unwrap());
        let [mut one, mut to] = [1, ROWS].map(|rows| backend.buffer(rows, WIDTH).unwrap());
        for sum in 0..6 {
            let values: Vec<f32> = (0..ROWS * WIDTH).map(|at| part(rank, sum, at)).collect();
            backend.write(&values, &mut x).unwrap();
            backend.write(&values, &mut y).unwrap();
            backend.write(&values[..WIDTH], &mut one).unwrap();
            backend.all_reduce(&mut one, 0..1).unwrap();
            // The ranks are late in turn.
            std::thread::sleep(Duration::from_millis(if sum % 2 == rank { 20 } else { 0 }));
            backend.all_reduce_both([&mut x, &mut y], 3..ROWS).unwrap();
            backend.all_reduce(&mut one, 0..1).unwrap();
            // Rows that are sums already, added to others.
            backend.write(&vec![0.5; ROWS * WIDTH], &mut to).unwrap();
            backend.add_sums(&mut y, 3..ROWS, &mut to, None).unwrap();
            let mut found = vec![0.0; ROWS * WIDTH];
            let both = |at: usize| part(0, sum, at) + part(1, sum, at);
            let expected = |at: usize| if at < 3 * WIDTH { part(rank, sum, at) } else { both(at) };
            let added = |at: usize| if at < 3 * WIDTH { 0.5 } else { 0.5 + 2.0 * both(at) };
            let of_both: [(_, &dyn Fn(usize) -> f32); 2] = [(&x, &expected), (&to, &added)];
            for (x, expected) in of_both {
                backend.read(x, 0..ROWS, &mut found).unwrap();
                let wrong = (0..found.len()).find(|at| found[*at] != expected(*at));
                assert_eq!(wrong, None, "sum {sum}");
            }
            backend.read(&one, 0..1, &mut found[..WIDTH]).unwrap();
            let wrong = (0..WIDTH).find(|at| found[*at] != 2.0 * both(*at));
            assert_eq!(wrong, None, "the row of sum {sum}");
        }
    })
    .unwrap();
}

#[test]
fn one_rank_with_wrong_sums_keeps_all_from_them() {
    let Some(devices) = devices("one_rank_with_wrong_sums_keeps_all_from_them", 2) else { return };
    let agreed = |sabotage: Option<fn(&Kernel, String) -> String>| {
        let refused = local::run(2, TransportChoice::Shm, |mut group| {
            let mut device = Device::open(&devices[group.rank()], true).unwrap();
            device.sabotage = sabotage.filter(|_| group.rank() == 1);
            Pieces::agreed(&mut device, &mut group).unwrap().err()
        });
        refused.unwrap()
    };
    assert_eq!(agreed(None), [None, None]);
    let wrong: [fn(&Kernel, String) -> String; 6] = [
        |_, text| text.replace("pieces[args.next_place + i] = x", "pieces[i] = x"),
        |_, text| text.replace("let at = args.first + i", "let at = i"),
        |_, text| text.replace("column < vec4<u32>(args.width)", "column < vec4<u32>(args.stride)"),
        // Wrong only in one of the two targets.
        |kernel, text| match kernel {
            Kernel::AddPieces(form) if !form.adds => {
                text.replace("pieces[args.next_place + i] = x[args.next_first + i]", "")
            }
            _ => text,
        },
        |_, text| text.replace("to[at] += sum", "to[at] = sum"),
        |_, text| text.replace("x[at] = sum", "x[at] += sum"),
    ];
    for sabotage in wrong {
        let refused = agreed(Some(sabotage));
        assert!(refused.iter().all(Option::is_some), "{refused:?}");
    }
}

#[test]
fn a_lost_rank_ends_a_prompts_sum() {
    let Some(devices) = devices("a_lost_rank_ends_a_prompts_sum", 2) else { return };
    local::run(2, TransportChoice::Shm, |group| {
        let rank = group.rank();
        let mut backend = backend(&devices[rank], group);
        backend.group().barrier().unwrap();
        if rank == 1 {
            return;
        }
        let mut x = backend.buffer(ROWS, WIDTH).unwrap();
        backend.write(&vec![1.0; ROWS * WIDTH], &mut x).unwrap();
        let error = backend.all_reduce(&mut x, 0..ROWS).unwrap_err();
        assert!(matches!(error, ComputeError::Comm(CommError::PeerLost { rank: 1, .. })), "{error}");
        let mut found = [0.0; WIDTH];
        backend.read(&x, 0..1, &mut found).unwrap();
        assert_eq!(found, [1.0; WIDTH], "the device works");
    })
    .unwrap();
}
