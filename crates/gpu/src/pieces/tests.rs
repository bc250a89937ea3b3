//! Large sums on the test device or on several GPUs: correct, refused and lost ones.

use thunder_collectives::{CommError, Group, TransportChoice, local};
use thunder_compute::{Backend as _, ComputeError, Device as _};

use super::Pieces;
use crate::device::Device;
use crate::kernel::Kernel;
use crate::tests::{device, devices_apart};
use crate::{Found, GpuBackend, GpuConfig, Mailboxes, SumForm};

/// Rows and columns of a sum that no kernel waits for: four pieces of 64 Ki words, the last a part.
const ROWS: usize = 55;
const WIDTH: usize = 4090;

fn devices(test: &str, count: usize) -> Option<Vec<Found>> {
    devices_apart(&device(test)?, count)
}

fn backend(found: &Found, group: Group) -> GpuBackend {
    let config = GpuConfig { mailboxes: Mailboxes::Always, peers: true, ..GpuConfig::default() };
    let mut backend = GpuBackend::new(found, config, group).unwrap();
    assert_eq!(backend.sum_form_of(1, WIDTH), SumForm::Relay);
    assert_eq!(backend.sum_form_of(ROWS, WIDTH), SumForm::Pieces);
    backend.sums.pieces.as_mut().unwrap().words = 64 << 10;
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
        let mut one = backend.buffer(1, WIDTH).unwrap();
        for sum in 0..5 {
            let values: Vec<f32> = (0..ROWS * WIDTH).map(|at| part(rank, sum, at)).collect();
            backend.write(&values, &mut x).unwrap();
            backend.write(&values, &mut y).unwrap();
            backend.write(&values[..WIDTH], &mut one).unwrap();
            backend.all_reduce(&mut one, 0..1).unwrap();
            // Without the first rows, so that no piece begins with a row.
            backend.all_reduce_both([&mut x, &mut y], 3..ROWS).unwrap();
            backend.all_reduce(&mut one, 0..1).unwrap();
            let mut found = vec![0.0; ROWS * WIDTH];
            let both = |at: usize| part(0, sum, at) + part(1, sum, at);
            let expected = |at: usize| if at < 3 * WIDTH { part(rank, sum, at) } else { both(at) };
            for x in [&x, &y] {
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
    let wrong: [fn(&Kernel, String) -> String; 4] = [
        |_, text| text.replace("pieces[args.next_place + i] = x", "pieces[i] = x"),
        |_, text| text.replace("let at = args.first + i", "let at = i"),
        // Wrong only in one of the two targets.
        |_, text| text.replace("to[at] += sum", "to[at] = sum"),
        |_, text| text.replace("x[at] = sum", "x[at] += sum"),
    ];
    for sabotage in wrong {
        let refused = local::run(2, TransportChoice::Shm, |mut group| {
            let mut device = Device::open(&devices[group.rank()], true).unwrap();
            device.sabotage = (group.rank() == 1).then_some(sabotage);
            Pieces::agreed(&mut device, &mut group).unwrap().err()
        });
        let refused = refused.unwrap();
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
