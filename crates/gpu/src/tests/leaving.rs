//! Kernels that also store levels of their results for the next product.

use thunder_collectives::{Group, TransportChoice, local};
use thunder_compute::{
    Activation, Activations, Backend, Device, Encoding, Expert, ExpertGroups, Float, LayerNorm, LinearInput,
    MatrixSource, Norm, RareOperations, RouterSpec, RowOrder, Scores, SharedExpert, Step, Strided,
};

use super::{backend, device, devices};
use crate::kernel::{Kernel, Leaves, Role};
use crate::proof::Numbers;
use crate::{Buffer, GpuBackend, Matrix, Vector};

const WIDTH: usize = 64;
const CHANNELS: usize = 128;
/// More rows than a product computes together.
const ROWS: usize = 11;

pub(super) fn matrix(backend: &mut GpuBackend, rows: usize, cols: usize, parts: usize) -> Matrix {
    let mut random = thunder_testing::Random::new((rows + cols) as u64);
    let weight = random.bytes(rows * cols / 2);
    let halves = |value: f32| half::f16::from_f32(value).to_le_bytes().repeat(rows * cols / 64);
    let (scales, offsets) = (halves(0.02), halves(-0.15));
    let view = |bytes| -> Strided<'_> {
        let bytes: &[u8] = bytes;
        Strided { bytes, stride: bytes.len() / rows, row_bytes: bytes.len() / rows }
    };
    let source = MatrixSource {
        rows,
        cols,
        encoding: Encoding::Affine { bits: 4, group: 64, scales: Float::F16 },
        weight: view(&weight),
        scales: Some(view(&scales)),
        offsets: Some(view(&offsets)),
        row_order: RowOrder::AsStored,
        first_row: 0,
        bias: None,
        pages: None,
    };
    backend.matrix(&vec![source; parts]).unwrap()
}

/// Two MLPs, one after the other.
struct Layers {
    norms: [Norm<Vector>; 2],
    gate_up: [Matrix; 2],
    down: [Matrix; 2],
    channels: Buffer,
    /// Of the residual stream after each MLP, which is then centered.
    of_stream: Option<LayerNorm>,
}

impl Layers {
    fn new(backend: &mut GpuBackend) -> Self {
        let mut numbers = Numbers(3);
        let norms =
            [(); 2].map(|()| Norm { weight: backend.vector(&numbers.take(WIDTH)).unwrap(), eps: 1e-5 });
        let gate_up = [(); 2].map(|()| matrix(backend, CHANNELS, WIDTH, 2));
        let down = [(); 2].map(|()| matrix(backend, WIDTH, CHANNELS, 1));
        Self { norms, gate_up, down, channels: backend.buffer(ROWS, CHANNELS).unwrap(), of_stream: None }
    }

    /// Bits of the rows after the layers, and the number of dispatches.
    fn run(&mut self, backend: &mut GpuBackend, rows: &[f32]) -> (Vec<u32>, u64) {
        let count = rows.len() / WIDTH;
        let mut residual = backend.buffer(ROWS, WIDTH).unwrap();
        backend.write(rows, &mut residual).unwrap();
        let before = backend.device.recorded;
        for ((norm, gate_up), down) in self.norms.iter().zip(&self.gate_up).zip(&self.down) {
            let x = LinearInput::Normed { x: &residual, weight: &norm.weight, eps: norm.eps };
            let next = (Activation::Silu, down);
            backend.linear_gated(x, 0..count, gate_up, next, &mut self.channels).unwrap();
            let x = LinearInput::Gated(&self.channels);
            backend.linear_reduce_add(x, 0..count, down, &mut residual).unwrap();
            if let Some(norm) = &self.of_stream {
                backend.layer_norm(norm, 0..count, &mut residual).unwrap();
                backend.center(&[0..WIDTH], 0..count, &mut residual).unwrap();
            }
        }
        let dispatches = backend.device.recorded - before;
        let mut values = vec![0.0; rows.len()];
        backend.read(&residual, 0..count, &mut values).unwrap();
        (values.iter().map(|value| value.to_bits()).collect(), dispatches)
    }
}

#[test]
fn levels_that_kernels_leave_change_no_bit() {
    let Some(found) = device("levels_that_kernels_leave_change_no_bit") else { return };
    let mut backend = backend(&found, Activations::Auto, Group::solo());
    let mut layers = Layers::new(&mut backend);
    let rows = Numbers(4).take(ROWS * WIDTH);
    let mut all = Vec::new();
    for count in [1, 3, ROWS] {
        // In the first run, the norm after the first down projection is not known; then a form is
        // proved.
        let (first, _) = layers.run(&mut backend, &rows[..count * WIDTH]);
        layers.run(&mut backend, &rows[..count * WIDTH]);
        let (second, dispatches) = layers.run(&mut backend, &rows[..count * WIDTH]);
        // With one row, products store levels; otherwise rows are rounded before each of four
        // products.
        let rounded = if count > 1 { 4 } else { 1 };
        assert_eq!(dispatches, 4 + rounded, "{count} rows");
        assert_eq!(first, second);
        assert!(second.starts_with(&all), "a row does not depend on others");
        all = second;
    }
    assert!(backend.refusals().is_empty(), "{:?}", backend.refusals());
    // As if all forms were refused: rows are rounded before each of four products.
    backend.leaving.values_mut().for_each(|right| *right = false);
    let (rounded, dispatches) = layers.run(&mut backend, &rows);
    assert_eq!(dispatches, 8);
    assert_eq!(rounded, all);
}

#[test]
fn a_layer_norm_ends_what_a_product_has_left() {
    let Some(found) = device("a_layer_norm_ends_what_a_product_has_left") else { return };
    let mut backend = backend(&found, Activations::Auto, Group::solo());
    let mut layers = Layers::new(&mut backend);
    let row = Numbers(4).take(WIDTH);
    // The products have learned which norm follows.
    for _ in 0..2 {
        layers.run(&mut backend, &row);
    }
    let [weight, bias] = [5, 6].map(|seed| Numbers(seed).take(WIDTH));
    layers.of_stream = Some(LayerNorm { weight, bias, eps: 1e-5 });
    layers.run(&mut backend, &row);
    let (left, dispatches) = layers.run(&mut backend, &row);
    // The norm after each of two products is rounded by a kernel of its own.
    assert_eq!(dispatches, 4 + 2 * 2 + 2);
    backend.leaving.values_mut().for_each(|right| *right = false);
    let (rounded, dispatches) = layers.run(&mut backend, &row);
    assert_eq!(dispatches, 4 + 2 * 2 + 4);
    assert_eq!(left, rounded);
}

#[test]
fn a_rows_product_does_not_depend_on_the_rows_next_to_it() {
    let Some(found) = device("a_rows_product_does_not_depend_on_the_rows_next_to_it") else { return };
    for activations in [Activations::Auto, Activations::Int8] {
        let mut backend = backend(&found, activations, Group::solo());
        let w = matrix(&mut backend, 40, 2 * CHANNELS, 1);
        let rows = Numbers(6).take(ROWS * 2 * CHANNELS);
        let mut all: Vec<u32> = Vec::new();
        for count in [1, 2, 4, 5, 8, ROWS] {
            let mut x = backend.buffer(count, 2 * CHANNELS).unwrap();
            let mut out = backend.buffer(count, 40).unwrap();
            backend.write(&rows[..count * 2 * CHANNELS], &mut x).unwrap();
            backend.write(&vec![0.0; count * 40], &mut out).unwrap();
            backend.linear_reduce_add(LinearInput::Gated(&x), 0..count, &w, &mut out).unwrap();
            let mut found = vec![0.0; count * 40];
            backend.read(&out, 0..count, &mut found).unwrap();
            let found: Vec<u32> = found.iter().map(|value| value.to_bits()).collect();
            assert!(found.starts_with(&all), "{activations:?}, {count} rows");
            all = found;
        }
        let widest = backend.forms.iter().any(|((.., batch), form)| *batch == 8 && form.is_some());
        assert!(widest && backend.refusals().is_empty(), "{:?}", backend.refusals());
    }
}

#[test]
fn a_norm_leaves_levels_once_they_were_wanted() {
    let Some(found) = device("a_norm_leaves_levels_once_they_were_wanted") else { return };
    let mut backend = backend(&found, Activations::Auto, Group::solo());
    let w = matrix(&mut backend, 40, WIDTH, 1);
    let norm = Norm { weight: backend.vector(&Numbers(7).take(WIDTH)).unwrap(), eps: 1e-5 };
    let mut step = Step::default();
    (0..2).for_each(|slot| step.push(&[0], 0, &[slot], slot as usize, false));
    let [mut x, mut normed] = [(); 2].map(|()| backend.buffer(2, WIDTH).unwrap());
    let mut out = backend.buffer(2, 40).unwrap();
    let between = backend.device.memory(64, "a test").unwrap();
    let mut runs = Vec::new();
    for _ in 0..4 {
        backend.write(&Numbers(8).take(2 * WIDTH), &mut x).unwrap();
        backend.write(&[0.0; 80], &mut out).unwrap();
        backend.begin(&step, &[]).unwrap();
        let before = backend.device.recorded;
        backend.rms_norm(&x, 0..2, &norm, &mut normed).unwrap();
        // The operation in between writes neither the rows nor their levels.
        backend
            .device
            .dispatch(&Kernel::Largest, &[&x.memory, &between], &[WIDTH as u32, WIDTH as u32, 256], [1, 1, 1])
            .unwrap();
        backend.linear_reduce_add(LinearInput::Plain(&normed), 0..2, &w, &mut out).unwrap();
        let dispatches = backend.device.recorded - before;
        let mut found = vec![0.0; 80];
        backend.read(&out, 0..2, &mut found).unwrap();
        runs.push((found, dispatches));
    }
    // Forms of the product are proved in the first run, the norm's form when levels were wanted.
    assert_eq!(runs[3].1, 3, "the norm, what comes between, and the product");
    assert_eq!(runs[0].0, runs[3].0);
    // Rows that were written since are rounded again.
    backend.begin(&step, &[]).unwrap();
    backend.rms_norm(&x, 0..2, &norm, &mut normed).unwrap();
    backend.write(&[0.0; 2 * WIDTH], &mut normed).unwrap();
    backend.write(&[1.0; 80], &mut out).unwrap();
    backend.linear_reduce_add(LinearInput::Plain(&normed), 0..2, &w, &mut out).unwrap();
    let mut found = vec![0.0; 80];
    backend.read(&out, 0..2, &mut found).unwrap();
    assert_eq!(found, [1.0; 80]);
    assert!(backend.refusals().is_empty(), "{:?}", backend.refusals());
}

#[test]
fn relayed_sums_leave_levels_and_change_no_bit() {
    let test = "relayed_sums_leave_levels_and_change_no_bit";
    let Some(devices) = devices(test, 2) else { return };
    local::run(2, TransportChoice::Shm, |group| {
        let rank = group.rank();
        let mut backend = super::relaying(&devices[rank], Activations::Auto, group);
        assert!(backend.sums.relay.as_ref().unwrap().can_leave);
        let mut layers = Layers::new(&mut backend);
        let rows = Numbers(4).take(ROWS * WIDTH);
        for count in [1, 3, ROWS] {
            let rows = &rows[..count * WIDTH];
            // In the first runs, forms are proved and the norm after a sum is not known.
            layers.run(&mut backend, rows);
            let (left, dispatches) = layers.run(&mut backend, rows);
            // Each layer has two products and two sums. Rows are rounded before the first product,
            // and gated rows unless the product of a single row stores their levels.
            let rounded = if count == 1 { 1 } else { 3 };
            assert_eq!(dispatches, 6 + rounded, "{count} rows");
            backend.sums.relay.as_mut().unwrap().can_leave = false;
            let (plain, dispatches) = layers.run(&mut backend, rows);
            backend.sums.relay.as_mut().unwrap().can_leave = true;
            assert_eq!(dispatches, 7 + rounded);
            assert_eq!(left, plain, "{count} rows");
        }
        assert!(backend.refusals().is_empty(), "{:?}", backend.refusals());
    })
    .unwrap();
}

/// A router that chooses three of four experts, after a norm; their sum comes before another norm.
struct Routed {
    norms: [Norm<Vector>; 2],
    router: Matrix,
    spec: RouterSpec<Vector>,
    experts: crate::operations::experts::Experts,
    after: Matrix,
}

impl Routed {
    fn new(backend: &mut GpuBackend, spec: RouterSpec<Vec<f32>>) -> Self {
        let mut numbers = Numbers(9);
        let norms =
            [(); 2].map(|()| Norm { weight: backend.vector(&numbers.take(WIDTH)).unwrap(), eps: 1e-5 });
        let router = matrix(backend, spec.logits(), WIDTH, 1);
        let experts = (0..spec.experts + usize::from(spec.shared != SharedExpert::None))
            .map(|_| Expert {
                gate_up: matrix(backend, CHANNELS, WIDTH, 2),
                down: matrix(backend, WIDTH, CHANNELS, 1),
                down_bias: None,
            })
            .collect();
        let experts = backend.experts(experts, Activation::Silu).unwrap();
        let after = matrix(backend, 40, WIDTH, 1);
        let spec = spec.try_map(&mut |values| backend.vector(&values)).unwrap();
        Self { norms, router, spec, experts, after }
    }

    /// Bits of all results, and the number of dispatches.
    fn run(&self, backend: &mut GpuBackend, rows: &[f32]) -> (Vec<u32>, u64) {
        let count = rows.len() / WIDTH;
        let mut step = Step::default();
        (0..count).for_each(|slot| step.push(&[0], 0, &[slot as u32], slot, false));
        let mut residual = backend.buffer(count, WIDTH).unwrap();
        let mut normed = backend.buffer(count, WIDTH).unwrap();
        let mut logits = backend.buffer(count, self.spec.logits()).unwrap();
        let mut choices = backend.buffer(count, 2 * self.spec.choices()).unwrap();
        let mut out = backend.buffer(count, 40).unwrap();
        backend.write(rows, &mut residual).unwrap();
        backend.begin(&step, &[]).unwrap();
        let (before, all) = (backend.device.recorded, 0..count);
        let to = [&mut normed, &mut logits, &mut choices];
        let router = (&self.router, &self.spec);
        backend.norm_route(&residual, all.clone(), &self.norms[0], router, to).unwrap();
        backend.experts_reduce_add(&normed, all.clone(), &choices, &self.experts, &mut residual).unwrap();
        let x = LinearInput::Normed { x: &residual, weight: &self.norms[1].weight, eps: 1e-5 };
        backend.linear(x, all.clone(), &self.after, &mut out).unwrap();
        let dispatches = backend.device.recorded - before;
        let mut bits = Vec::new();
        for x in [&normed, &choices, &residual, &out] {
            let mut values = vec![0.0; count * x.width];
            backend.read(x, all.clone(), &mut values).unwrap();
            bits.extend(values.iter().map(|value| value.to_bits()));
        }
        (bits, dispatches)
    }
}

fn plain_router() -> RouterSpec<Vec<f32>> {
    RouterSpec {
        experts: 4,
        chosen: 3,
        scores: Scores::Softmax,
        correction: None,
        groups: None,
        renormalise: true,
        scale: 1.0,
        shared: SharedExpert::None,
    }
}

#[test]
fn experts_in_few_kernels_change_no_bit() {
    let Some(found) = device("experts_in_few_kernels_change_no_bit") else { return };
    let plain = RouterSpec { scale: 1.5, ..plain_router() };
    let grouped = RouterSpec {
        experts: 21,
        scores: Scores::Sigmoid,
        correction: Some(Numbers(2).take(21)),
        groups: Some(ExpertGroups { count: 7, chosen: 3, best: 2 }),
        shared: SharedExpert::Gated,
        ..plain.clone()
    };
    for spec in [plain, grouped] {
        let mut backend = backend(&found, Activations::Auto, Group::solo());
        let routed = Routed::new(&mut backend, spec);
        let rows = Numbers(4).take(3 * WIDTH);
        for count in [1, 3] {
            let rows = &rows[..count * WIDTH];
            // First forms are proved, then the norm after the sum is known, then its form is
            // proved.
            (0..3).for_each(|_| _ = routed.run(&mut backend, rows));
            let (few, dispatches) = routed.run(&mut backend, rows);
            // The choice, gates and ups, the sum, and the next product, for which the sum of a
            // single row stores levels.
            assert_eq!(dispatches, if count == 1 { 4 } else { 5 }, "{count} rows");
            assert_eq!(backend.choosing.values().collect::<Vec<_>>(), [&true]);
            // As if all forms were refused.
            backend.choosing.values_mut().for_each(|right| *right = false);
            let leaving = backend.leaving.clone();
            backend.leaving.values_mut().for_each(|right| *right = false);
            backend.rounded_norms.clear();
            let (many, dispatches) = routed.run(&mut backend, rows);
            assert_eq!(dispatches, 9, "{count} rows");
            assert_eq!(few, many, "{count} rows");
            backend.choosing.values_mut().for_each(|right| *right = true);
            backend.leaving = leaving;
        }
        assert!(backend.refusals().is_empty(), "{:?}", backend.refusals());
    }
}

#[test]
fn wrong_kernels_of_experts_are_refused() {
    let Some(found) = device("wrong_kernels_of_experts_are_refused") else { return };
    // Wrong logits of the experts; and of the form that stores sums as levels, squares of a wrong
    // block, or wrong sums.
    let sabotages: [fn(&Kernel, String) -> String; 2] = [
        |kernel, text| wrong_experts(kernel, text, ["squares_out[row", "squares_out[1u + row"]),
        |kernel, text| wrong_experts(kernel, text, ["total0 = fma(shares", "total0 = fma(2.0 * shares"]),
    ];
    for sabotage in sabotages {
        let mut backend = self::backend(&found, Activations::Auto, Group::solo());
        backend.device.sabotage = Some(sabotage);
        let routed = Routed::new(&mut backend, plain_router());
        let rows = Numbers(4).take(WIDTH);
        let first = routed.run(&mut backend, &rows).0;
        (0..2).for_each(|_| _ = routed.run(&mut backend, &rows));
        let (again, dispatches) = routed.run(&mut backend, &rows);
        assert_eq!(first, again);
        assert_eq!(backend.choosing.values().collect::<Vec<_>>(), [&false]);
        assert_eq!(backend.refusals().len(), 2, "{:?}", backend.refusals());
        assert_eq!(dispatches, 7, "norm, product, choice, gates and ups, sum, rounding, product");
    }
}

fn wrong_experts(kernel: &Kernel, text: String, [right, wrong]: [&str; 2]) -> String {
    match kernel {
        Kernel::Choose(_) => text.replace("route(row, 0u,", "route(row, 1u,"),
        Kernel::Product(product) if product.role == Role::ExpertDown && product.leaves == Leaves::Normed => {
            text.replace(right, wrong)
        }
        _ => text,
    }
}
