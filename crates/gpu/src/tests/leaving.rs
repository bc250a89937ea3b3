//! Kernels that leave levels of their results for the product that follows.

use thunder_collectives::Group;
use thunder_compute::{
    Activation, Activations, Backend, Device, Encoding, Float, LinearInput, MatrixSource, Norm, RowOrder,
    Strided,
};

use super::{backend, device};
use crate::proof::Numbers;
use crate::{Buffer, GpuBackend, Matrix, Vector};

const WIDTH: usize = 64;
const CHANNELS: usize = 128;

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
        Self { norms, gate_up, down, channels: backend.buffer(4, CHANNELS).unwrap() }
    }

    /// Bits of the rows after the layers, and the dispatches that they took.
    fn run(&mut self, backend: &mut GpuBackend, rows: &[f32]) -> (Vec<u32>, u64) {
        let count = rows.len() / WIDTH;
        let mut residual = backend.buffer(4, WIDTH).unwrap();
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
    let rows = Numbers(4).take(2 * WIDTH);
    // Two rows are rounded by a kernel of its own, before each of four products.
    layers.run(&mut backend, &rows);
    let (both, dispatches) = layers.run(&mut backend, &rows);
    assert_eq!(dispatches, 8);
    // One row: at first the norm behind the first product back is not known.
    let (first, _) = layers.run(&mut backend, &rows[..WIDTH]);
    let (second, dispatches) = layers.run(&mut backend, &rows[..WIDTH]);
    assert_eq!(dispatches, 5, "only the first row of all is rounded by a kernel of its own");
    assert!(backend.refusals().is_empty(), "{:?}", backend.refusals());
    assert_eq!(first, second);
    assert_eq!(first, both[..WIDTH]);
}
