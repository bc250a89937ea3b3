//! Sorting and adding pairs of rows and experts, which need no matrix units.

use thunder_collectives::Group;
use thunder_compute::{Activation, Activations, Backend as _, Device as _, Expert, RareOperations as _};

use super::leaving::matrix;
use super::matrices::{distance, quantized};
use super::{backend, device};
use crate::buffer::{Buffer, Memory};
use crate::kernel::{Kernel, Role};
use crate::proof::Numbers;
use crate::{Experts, GpuBackend};

const ROWS: usize = 70;
const OF_ROW: usize = 3;
const TILE: usize = 16;
const WIDTH: usize = 300;
/// Whether each expert has weights on this rank.
const HERE: [bool; 5] = [true, false, true, true, false];

type Sabotage = fn(&Kernel, String) -> String;

/// Forms of pairs add the bias of another expert.
const WRONG_BIAS: Sabotage = |kernel, text| match kernel {
    Kernel::Tiles(form) if form.pairs => text.replace("experts[expert].z", "experts[0].z"),
    Kernel::Matrices(form) if form.pairs => text.replace("experts[expert].z", "experts[0].z"),
    _ => text,
};

fn expert_of(pair: usize) -> usize {
    (pair / OF_ROW + [0, 1, 3][pair % OF_ROW]) % HERE.len()
}

/// The pairs of rows from `first` on, counted from there, which must be in tiles of their experts.
fn sorted(
    backend: &mut GpuBackend,
    (choices, first): (&Buffer, usize),
    (table, experts): (&Memory, usize),
    expert_of: &dyn Fn(usize) -> usize,
) -> Vec<usize> {
    let sorted = backend.sort_pairs(choices, &(first..choices.rows), (table, experts), TILE).unwrap();
    let mut words = Vec::new();
    backend.read_words(&sorted.memory, 0..3 * sorted.tiles + sorted.pairs, &mut words).unwrap();
    let (tiles, places) = words.split_at(3 * sorted.tiles);
    let mut seen = Vec::new();
    for tile in tiles.chunks(3).filter(|tile| tile[2] > 0) {
        let [expert, start, count] = [tile[0], tile[1], tile[2]].map(|word| word as usize);
        assert!(count <= TILE, "{count} pairs of expert {expert}");
        let pairs = places[start..][..count].iter().map(|pair| *pair as usize);
        seen.extend(pairs.inspect(|pair| assert_eq!(expert_of(*pair), expert, "pair {pair}")));
    }
    seen.sort_unstable();
    seen
}

#[test]
fn pairs_are_sorted_if_there_are_more_experts_than_threads() {
    let Some(found) = device("pairs_are_sorted_if_there_are_more_experts_than_threads") else { return };
    let mut backend = backend(&found, Activations::F32, Group::solo());
    // Most have no pairs, the last has more than a tile.
    let experts = 600;
    let expert_of = |pair: usize| if pair.is_multiple_of(3) { experts - 1 } else { pair * pair % experts };
    let of_row =
        |row: usize| (0..OF_ROW).map(move |i| expert_of(row * OF_ROW + i) as f32).chain([0.0; OF_ROW]);
    let mut choices = backend.buffer(ROWS, 2 * OF_ROW).unwrap();
    backend.write(&(0..ROWS).flat_map(of_row).collect::<Vec<_>>(), &mut choices).unwrap();
    let table = backend.device.filled(&[0, 1, 0, 1].repeat(experts), "a table of experts").unwrap();
    let seen = sorted(&mut backend, (&choices, 0), (&table, experts), &expert_of);
    assert_eq!(seen, (0..ROWS * OF_ROW).collect::<Vec<_>>());
}

#[test]
fn pairs_of_experts_without_weights_are_left_out() {
    let Some(found) = device("pairs_of_experts_without_weights_are_left_out") else { return };
    let mut backend = backend(&found, Activations::F32, Group::solo());
    let weights = [0.5, 0.25, 2.0];
    let rows: Vec<f32> = (0..ROWS)
        .flat_map(|row| (0..OF_ROW).map(move |i| expert_of(row * OF_ROW + i) as f32).chain(weights))
        .collect();
    let mut choices = backend.buffer(ROWS, 2 * OF_ROW).unwrap();
    backend.write(&rows, &mut choices).unwrap();
    let table: Vec<u32> = HERE.iter().flat_map(|here| [0, u32::from(*here), 0, 0]).collect();
    let table = backend.device.filled(&table, "a table of experts").unwrap();

    // Not from the first row on.
    let first = 4;
    let expert_of_pair = |pair: usize| expert_of(first * OF_ROW + pair);
    let seen = sorted(&mut backend, (&choices, first), (&table, HERE.len()), &expert_of_pair);
    let expected: Vec<usize> =
        (0..(ROWS - first) * OF_ROW).filter(|pair| HERE[expert_of_pair(*pair)]).collect();
    assert_eq!(seen, expected);

    let value = |pair: usize, column: usize| (pair % 7) as f32 + column as f32;
    let of_pair = |pair: usize| {
        (0..WIDTH).map(move |column| if HERE[expert_of(pair)] { value(pair, column) } else { f32::NAN })
    };
    let mut results = backend.buffer(ROWS * OF_ROW, WIDTH).unwrap();
    let numbers: Vec<f32> = (0..ROWS * OF_ROW).flat_map(of_pair).collect();
    backend.write(&numbers, &mut results).unwrap();
    let mut sums = backend.buffer(ROWS, WIDTH).unwrap();
    backend.write(&[1.0; ROWS * WIDTH], &mut sums).unwrap();
    backend.add_pairs(&choices, &(0..ROWS), (&results, &table), (&sums, true)).unwrap();
    let mut found = vec![0.0; ROWS * WIDTH];
    backend.read(&sums, 0..ROWS, &mut found).unwrap();
    for (row, found) in found.chunks(WIDTH).enumerate() {
        for (column, found) in found.iter().enumerate() {
            let pairs = (0..OF_ROW).filter(|i| HERE[expert_of(row * OF_ROW + i)]);
            let expected: f32 = pairs.map(|i| weights[i] * value(row * OF_ROW + i, column)).sum();
            assert_eq!(*found, 1.0 + expected, "row {row}, column {column}");
        }
    }
}

/// Experts with these bits and channels of each; all have biases.
fn experts(backend: &mut GpuBackend, sizes: &[(u32, usize)], gated: bool) -> Experts {
    experts_with(backend, sizes, gated, true)
}

fn experts_with(backend: &mut GpuBackend, sizes: &[(u32, usize)], gated: bool, has_biases: bool) -> Experts {
    let all = sizes.iter().enumerate().map(|(i, &(bits, channels))| {
        let rows = if gated { 2 * channels } else { channels };
        let bias = has_biases.then(|| Numbers(70 + i as u64).take(rows));
        let gate_up = quantized(backend, [rows, 128], bits, 10 + i as u64, bias);
        let down = quantized(backend, [WIDTH, channels], bits, 30 + i as u64, None);
        let down_bias = has_biases.then(|| Numbers(90 + i as u64).take(WIDTH));
        Expert { gate_up, down, down_bias }
    });
    let all: Vec<_> = all.collect();
    if gated { backend.experts(all, Activation::Silu) } else { backend.ungated_experts(all) }.unwrap()
}

/// The sums of `ROWS` rows, computed `together` rows at a time.
fn sums(backend: &mut GpuBackend, experts: &Experts, count: usize, together: usize) -> Vec<f32> {
    let x: Vec<f32> = Numbers(4).take(ROWS * 128).iter().map(|x| x * 0.1).collect();
    // The last expert is a shared one.
    let of_row = |row: usize| {
        [row % (count - 1), (row + 1 + row / 9) % (count - 1), count - 1].map(|expert| expert as f32)
    };
    let mut all = Vec::new();
    for (start, x) in (0..ROWS).step_by(together).zip(x.chunks(128 * together)) {
        let rows = x.len() / 128;
        let [mut from, mut choices, mut out] =
            [128, 2 * OF_ROW, WIDTH].map(|width| backend.buffer(rows, width).unwrap());
        backend.write(x, &mut from).unwrap();
        let chosen: Vec<f32> =
            (start..start + rows).flat_map(|row| of_row(row).into_iter().chain([0.5, 0.25, 2.0])).collect();
        backend.write(&chosen, &mut choices).unwrap();
        backend.expert_sum(&from, 0..rows, &choices, experts, &mut out).unwrap();
        let mut found = vec![0.0; rows * WIDTH];
        backend.read(&out, 0..rows, &mut found).unwrap();
        all.extend(found);
    }
    all
}

#[test]
fn experts_of_prompts_share_weights_whatever_their_sizes_formats_and_biases() {
    let test = "experts_of_prompts_share_weights_whatever_their_sizes_formats_and_biases";
    let Some(found) = device(test) else { return };
    let mut backend = backend(&found, Activations::F32, Group::solo());
    for sizes in [
        [(4, 64); 5],
        [(4, 64), (4, 64), (4, 64), (4, 64), (4, 160)],
        [(4, 64), (4, 64), (8, 64), (8, 64), (4, 96)],
    ] {
        let experts = experts(&mut backend, &sizes, true);
        let forms = backend.pair_forms(&experts, ROWS * OF_ROW).unwrap();
        assert!(forms.is_some(), "{sizes:?}: {:?}", backend.refusals());
        let expected = sums(&mut backend, &experts, sizes.len(), 1);
        let together = sums(&mut backend, &experts, sizes.len(), ROWS);
        // Fewer pairs than 16 for each of the 5 experts.
        let few = sums(&mut backend, &experts, sizes.len(), 20);
        // The last rows are so few that they are computed one by one.
        assert!(few[..60 * WIDTH] == together[..60 * WIDTH], "{sizes:?}");
        let off = distance(&together, &expected);
        assert!(off < 1e-5, "{sizes:?}: off by {off}");
        assert!(off > 0.0, "{sizes:?}: rows were computed one by one");
    }
}

/// Which forms of sharing were proved, and whether they are right.
fn sharing(backend: &GpuBackend) -> Vec<(usize, bool)> {
    let of = |(kernel, right): (&Kernel, &bool)| match kernel {
        Kernel::Product(product) if product.shares_experts() => Some((product.batch, *right)),
        _ => None,
    };
    let mut all: Vec<_> = backend.products.iter().filter_map(of).collect();
    all.sort_unstable();
    all
}

#[test]
fn experts_of_generated_tokens_share_weights_and_change_no_bit() {
    let Some(found) = device("experts_of_generated_tokens_share_weights_and_change_no_bit") else { return };
    // Few pairs for each expert, and many; experts of several sizes and formats.
    let alike = [(4, 96); 10];
    let unlike = [(4, 64), (4, 160), (8, 64), (3, 96)];
    for (sizes, gated, batches) in
        [(&alike[..], true, &[4][..]), (&unlike, true, &[8, 8, 8]), (&unlike[..2], false, &[8])]
    {
        let mut backend = backend(&found, Activations::Auto, Group::solo());
        let experts = experts(&mut backend, sizes, gated);
        let alone = sums(&mut backend, &experts, sizes.len(), 1);
        assert!(sharing(&backend).is_empty());
        let together = sums(&mut backend, &experts, sizes.len(), 14);
        // First matrices and down projections.
        let both = batches.iter().flat_map(|batch| [(*batch, true); 2]);
        assert_eq!(sharing(&backend), both.collect::<Vec<_>>());
        let same = alone.iter().zip(&together).all(|(a, b)| a.to_bits() == b.to_bits());
        assert!(same, "{sizes:?}: distance {}", distance(&together, &alone));
        assert!(backend.refusals().is_empty(), "{:?}", backend.refusals());
    }
}

#[test]
fn rows_that_share_experts_may_begin_later_and_choose_experts_without_weights() {
    let test = "rows_that_share_experts_may_begin_later_and_choose_experts_without_weights";
    let Some(found) = device(test) else { return };
    let mut backend = backend(&found, Activations::Auto, Group::solo());
    let (all, first) = (14, 3);
    // With biases, nothing would add those of experts without weights. With few choices, other
    // lanes share an expert's outputs.
    for (has_biases, of_row, shared) in [
        (true, 2, &[(4, true)][..]),
        (true, 5, &[(8, true)]),
        (false, 2, &[(4, true)]),
        (false, 5, &[(8, true); 2]),
    ] {
        let experts = experts_with(&mut backend, &[(4, 64), (4, 0), (4, 96)], true, has_biases);
        let [mut from, mut choices] = [128, 2 * of_row].map(|width| backend.buffer(all, width).unwrap());
        let x: Vec<f32> = Numbers(4).take(all * 128).iter().map(|x| x * 0.1).collect();
        backend.write(&x, &mut from).unwrap();
        let of_row = |row: usize| {
            let experts = (0..of_row).map(move |i| ((row + i) % 3) as f32);
            experts.chain([0.5, 0.25, 2.0, -0.5, 1.5].into_iter().take(of_row))
        };
        backend.write(&(0..all).flat_map(of_row).collect::<Vec<f32>>(), &mut choices).unwrap();
        let mut sums = |rows: std::ops::Range<usize>| {
            let mut out = backend.buffer(all, WIDTH).unwrap();
            backend.expert_sum(&from, rows.clone(), &choices, &experts, &mut out).unwrap();
            let mut found = vec![0.0; rows.len() * WIDTH];
            backend.read(&out, rows, &mut found).unwrap();
            found.iter().map(|value| value.to_bits()).collect::<Vec<_>>()
        };
        let alone: Vec<u32> = (first..all).flat_map(|row| sums(row..row + 1)).collect();
        assert_eq!(sums(first..all), alone);
        assert_eq!(sharing(&backend), shared);
        backend.products.clear();
    }
}

fn wrong_sharing(kernel: &Kernel, text: String, role: Role) -> String {
    match kernel {
        Kernel::Product(product) if product.shares_experts() && product.role == role => {
            text.replace("count - 1u", "count - 2u")
        }
        _ => text,
    }
}

#[test]
fn wrong_sharing_of_experts_is_refused_and_rows_are_computed_one_by_one() {
    let test = "wrong_sharing_of_experts_is_refused_and_rows_are_computed_one_by_one";
    let Some(found) = device(test) else { return };
    // The tile's last pair has the row of the one before. One of both roles, then the other.
    let sabotages: [(Role, Sabotage); 2] = [
        (Role::ExpertGated, |kernel, text| wrong_sharing(kernel, text, Role::ExpertGated)),
        (Role::ExpertDown, |kernel, text| wrong_sharing(kernel, text, Role::ExpertDown)),
    ];
    for (role, sabotage) in sabotages {
        let mut backend = self::backend(&found, Activations::Auto, Group::solo());
        backend.device.sabotage = Some(sabotage);
        let sizes = [(4, 96); 4];
        let experts = experts(&mut backend, &sizes, true);
        let alone = sums(&mut backend, &experts, sizes.len(), 1);
        assert_eq!(sums(&mut backend, &experts, sizes.len(), 14), alone);
        assert_eq!(sharing(&backend), [(8, false), (8, true)]);
        let refusals = backend.refusals();
        assert!(refusals.iter().any(|it| it.contains(&format!("{role:?}"))), "{refusals:?}");
    }
}

#[test]
fn a_wrong_form_of_pairs_is_refused_and_rows_are_computed_one_by_one() {
    let test = "a_wrong_form_of_pairs_is_refused_and_rows_are_computed_one_by_one";
    let Some(found) = device(test) else { return };
    let mut backend = backend(&found, Activations::F32, Group::solo());
    backend.device.sabotage = Some(WRONG_BIAS);
    let sizes = [(4, 64); 5];
    let experts = experts(&mut backend, &sizes, true);
    assert!(backend.pair_forms(&experts, ROWS * OF_ROW).unwrap().is_none());
    assert!(backend.refusals().iter().any(|refusal| refusal.contains("Tiles")), "{:?}", backend.refusals());
    assert_eq!(sums(&mut backend, &experts, 5, ROWS), sums(&mut backend, &experts, 5, 1));
}

#[test]
fn prompts_that_read_experts_row_by_row_are_cut_into_submissions() {
    let test = "prompts_that_read_experts_row_by_row_are_cut_into_submissions";
    let Some(found) = device(test) else { return };
    let mut backend = backend(&found, Activations::F32, Group::solo());
    backend.device.sabotage = Some(WRONG_BIAS);
    let expert = |backend: &mut _| Expert {
        gate_up: matrix(backend, 128, 64, 2),
        down: matrix(backend, 64, 128, 1),
        down_bias: None,
    };
    let experts = (0..3).map(|_| expert(&mut backend)).collect();
    let experts = backend.experts(experts, Activation::Silu).unwrap();
    let [mut x, mut choices, mut out] = [64, 2, 64].map(|width| backend.buffer(ROWS, width).unwrap());
    backend.write(&[0.5; ROWS * 64], &mut x).unwrap();
    backend.write(&[2.0, 1.0].repeat(ROWS), &mut choices).unwrap();
    let mut sum = |backend: &mut GpuBackend| backend.expert_sum(&x, 0..ROWS, &choices, &experts, &mut out);
    // Kernels are proved meanwhile.
    sum(&mut backend).unwrap();
    let mut submissions = |others: f32| {
        backend.device.submit().unwrap();
        sum(&mut backend).unwrap();
        let before = backend.device.submissions;
        backend.device.record_share(others).unwrap();
        sum(&mut backend).unwrap();
        let at_limit = backend.device.submissions - before;
        // The other work is submitted now.
        sum(&mut backend).unwrap();
        [at_limit, backend.device.submissions - before]
    };
    assert_eq!([0.0, 0.999_999].map(&mut submissions), [[0; 2], [1; 2]]);
}
