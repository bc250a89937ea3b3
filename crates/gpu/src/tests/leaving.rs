//! Kernels that leave levels of their results for the product that follows.

use thunder_collectives::Group;
use thunder_compute::{
    Activation, Activations, Backend, Device, Encoding, Float, LinearInput, MatrixSource, Norm, RowOrder,
    Step, Strided,
};

use super::{backend, device};
use crate::kernel::Kernel;
use crate::proof::Numbers;
use crate::{Buffer, GpuBackend, Matrix, Vector};

const WIDTH: usize = 64;
const CHANNELS: usize = 128;
/// More rows than a product computes together.
const ROWS: usize = 11;

fn matrix(backend: &mut GpuBackend, rows: usize, cols: usize, parts: usize) -> Matrix {
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
}

impl Layers {
    fn new(backend: &mut GpuBackend) -> Self {
        let mut numbers = Numbers(3);
        let norms =
            [(); 2].map(|()| Norm { weight: backend.vector(&numbers.take(WIDTH)).unwrap(), eps: 1e-5 });
        let gate_up = [(); 2].map(|()| matrix(backend, CHANNELS, WIDTH, 2));
        let down = [(); 2].map(|()| matrix(backend, WIDTH, CHANNELS, 1));
        Self { norms, gate_up, down, channels: backend.buffer(ROWS, CHANNELS).unwrap() }
    }

    /// Bits of the rows after the layers, and the dispatches that they took.
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
        // At first the norm behind the first product back is not known, then a form is proved.
        let (first, _) = layers.run(&mut backend, &rows[..count * WIDTH]);
        layers.run(&mut backend, &rows[..count * WIDTH]);
        let (second, dispatches) = layers.run(&mut backend, &rows[..count * WIDTH]);
        // Of one row, products leave levels; otherwise rows are rounded before each of four.
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
        // What comes between writes neither the rows nor their levels.
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
    // Forms of the product are proved in the first run, that of the norm when levels were wanted.
    assert_eq!(runs[3].1, 3, "the norm, what comes between, and the product");
    assert_eq!(runs[0].0, runs[3].0);
    // Rows that were written since are rounded anew.
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
