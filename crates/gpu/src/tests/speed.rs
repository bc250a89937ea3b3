//! Measures the time of products in each shape, from which `Shape::of` was chosen. Run on a real
//! GPU: `THUNDER_TEST_GPU=0 cargo test --release -p thunder-gpu -- --ignored --nocapture
//! product_shapes`

use std::time::Instant;

use thunder_collectives::Group;
use thunder_compute::{Activations, Device, Encoding, Float, LinearInput, MatrixSource, RowOrder, Strided};

use super::{backend, device};
use crate::GpuBackend;
use crate::buffer::Memory;
use crate::kernel::{Batch, Input, Leaves, Product, ProductShape, Role, Sum};
use crate::matrix::Matrix;
use crate::operations::products::ProductArguments;
use crate::proof::{Numbers, Weights};

/// Bytes of matrices that the products cycle through: more than any cache holds.
const BYTES: usize = 400 << 20;

pub(super) fn matrices(backend: &mut GpuBackend, bits: usize, rows: usize, cols: usize) -> Vec<Matrix> {
    let mut random = thunder_testing::Random::new(3);
    let weight = random.bytes(rows * cols * bits / 8);
    let scales = half::f16::from_f32(0.01).to_le_bytes().repeat(rows * cols / 64);
    let view = |bytes| Strided { bytes, stride: bytes.len() / rows, row_bytes: bytes.len() / rows };
    let source = MatrixSource {
        rows,
        cols,
        encoding: Encoding::Affine { bits: bits as u32, group: 64, scales: Float::F16 },
        weight: view(&weight),
        scales: Some(view(&scales)),
        offsets: Some(view(&scales)),
        row_order: RowOrder::AsStored,
        first_row: 0,
        bias: None,
        pages: None,
    };
    let count = (BYTES / weight.len()).clamp(2, 16);
    (0..count).map(|_| backend.matrix(std::slice::from_ref(&source)).unwrap()).collect()
}

/// Microseconds of a dispatch in a chain in which each waits for the previous one.
pub(super) fn time(backend: &mut GpuBackend, mut record: impl FnMut(&mut GpuBackend, usize)) -> f64 {
    let mut run = |backend: &mut GpuBackend, count: usize| {
        let start = Instant::now();
        (0..count).for_each(|index| record(backend, index));
        backend.device.submit().unwrap();
        backend.device.wait().unwrap();
        start.elapsed().as_secs_f64() * 1e6
    };
    run(backend, 32);
    let mut times: Vec<f64> = (0..7).map(|_| (run(backend, 320) - run(backend, 64)) / 256.0).collect();
    times.sort_by(f64::total_cmp);
    times[3]
}

#[test]
#[ignore = "a measurement, for a real GPU"]
fn product_shapes() {
    let Some(found) = device("product_shapes") else { return };
    let mut backend = backend(&found, Activations::Auto, Group::solo());
    let shape = ProductShape::new;
    let shapes = [
        shape(1, 2, 8),
        shape(1, 4, 4),
        shape(1, 4, 8),
        shape(1, 4, 16),
        shape(1, 7, 8),
        shape(2, 1, 8),
        shape(2, 2, 4),
        shape(2, 2, 8),
        shape(2, 4, 4),
        shape(2, 4, 8),
        shape(2, 4, 16),
        shape(2, 7, 16),
        shape(4, 1, 8),
        shape(4, 2, 4),
    ];
    let cases: [(&str, usize, usize, Role, Input); 8] = [
        ("qkv", 6144, 4096, Role::Plain, Input::Bytes),
        ("o", 4096, 4096, Role::Plain, Input::Bytes),
        ("gate and up", 28672, 4096, Role::Gated, Input::Bytes),
        ("down", 4096, 14336, Role::Plain, Input::Pairs),
        ("down, floats", 4096, 14336, Role::Plain, Input::Floats),
        ("vocabulary", 128_256, 4096, Role::Plain, Input::Bytes),
        ("1B gate and up", 16384, 2048, Role::Gated, Input::Bytes),
        ("1B qkv", 3072, 2048, Role::Plain, Input::Bytes),
    ];
    for bits in [4, 8] {
        for (name, rows, cols, role, input) in cases {
            if bits == 8 && (name.starts_with("1B") || name == "down, floats") {
                continue;
            }
            let all = matrices(&mut backend, bits, rows, cols);
            let outputs = if role == Role::Gated { rows / 2 } else { rows };
            let of_all = (all.as_slice(), role, input);
            let found = of_shapes(
                &mut backend,
                of_all,
                (1, outputs, "alike"),
                shapes.iter().map(|shape| (1, *shape)),
            );
            let bytes = (rows * cols * bits / 8 + rows * cols / 16) as f64;
            println!("{bits} bits, {name} {rows}x{cols} (at 4480 GB/s {:.1} us):", bytes / 4480e3);
            print_best(&found, 5);
        }
    }
    let mut x = backend.buffer(1, 14336).unwrap();
    backend.write(&vec![0.5; 14336], &mut x).unwrap();
    let norm = backend.vector(&vec![1.0; 4096]).unwrap();
    let normed = time(&mut backend, |backend, _| {
        backend.quantized(&x, 0..1, 128, Input::Bytes, Some((&norm, 1e-5))).unwrap();
    });
    let plain = time(&mut backend, |backend, _| {
        backend.quantized(&x, 0..1, 448, Input::Pairs, None).unwrap();
    });
    println!("norm to bytes {normed:.2} us, pairs of 14336 columns {plain:.2} us");
}

/// Products that only store their outputs, as those that are summed over ranks: each in each shape.
/// The first are those of a 70B's share on two ranks.
#[test]
#[ignore = "a measurement, for a real GPU"]
fn shapes_of_outputs() {
    let Some(found) = device("shapes_of_outputs") else { return };
    let mut backend = backend(&found, Activations::Auto, Group::solo());
    let shapes = [
        (1, 1, 8),
        (1, 2, 8),
        (1, 4, 8),
        (1, 7, 8),
        (1, 1, 16),
        (2, 1, 8),
        (2, 2, 4),
        (2, 2, 8),
        (2, 4, 4),
        (4, 1, 8),
    ];
    let both = |(per, unroll, warps)| {
        [false, true].map(|ahead| (1, ProductShape { ahead, ..ProductShape::new(per, unroll, warps) }))
    };
    let shapes: Vec<_> = shapes.into_iter().flat_map(both).collect();
    let cases = [
        (4, "qkv", 5120, 8192, Role::Plain, Input::Bytes, "normed"),
        (4, "out", 8192, 4096, Role::Plain, Input::Bytes, "alike"),
        (4, "down", 8192, 14336, Role::Plain, Input::Pairs, "alike"),
        (4, "down of bytes", 8192, 14336, Role::Plain, Input::Bytes, "alike"),
        (4, "8B qkv", 6144, 4096, Role::Plain, Input::Bytes, "normed"),
        (4, "8B share of out", 4096, 2048, Role::Plain, Input::Bytes, "alike"),
        (4, "8B share of down", 4096, 7168, Role::Plain, Input::Pairs, "alike"),
        (4, "8B vocabulary", 128_256, 4096, Role::Plain, Input::Bytes, "normed"),
        (4, "1B qkv", 3072, 2048, Role::Plain, Input::Bytes, "normed"),
        (4, "1B vocabulary", 128_256, 2048, Role::Plain, Input::Bytes, "normed"),
        (4, "32B qkv", 10240, 5120, Role::Plain, Input::Bytes, "normed"),
        (8, "8B qkv", 6144, 4096, Role::Plain, Input::Bytes, "normed"),
        (8, "8B share of down", 4096, 7168, Role::Plain, Input::Pairs, "alike"),
        (8, "8B vocabulary", 128_256, 4096, Role::Plain, Input::Bytes, "normed"),
    ];
    for (bits, name, rows, cols, role, input, kind) in cases {
        let all = matrices(&mut backend, bits, rows, cols);
        let outputs = if role == Role::Gated { rows / 2 } else { rows };
        let of_all = (all.as_slice(), role, input);
        let found = of_shapes(&mut backend, of_all, (1, outputs, kind), shapes.iter().copied());
        let usual = Product::new(all[0].chunks[0].format, input, role, Sum::Subgroup, 1).shape;
        println!("{name} {rows}x{cols}, {bits} bits, usual {usual:?}:");
        print_best(&found, 20);
    }
}

/// Products of several rows: for each number of rows, all forms by the rows that are computed
/// together and by shape.
#[test]
#[ignore = "a measurement, for a real GPU"]
fn batch_shapes() {
    let Some(found) = device("batch_shapes") else { return };
    let mut backend = backend(&found, Activations::Auto, Group::solo());
    let form = |batch, per, unroll, warps| (batch, ProductShape::new(per, unroll, warps));
    let forms = [form(4, 2, 2, 4), form(4, 4, 2, 4), form(8, 4, 1, 2), form(8, 4, 1, 4), form(8, 8, 1, 4)];
    let cases = [
        ("qkv", 6144, 4096, Role::Plain, Input::Bytes),
        ("gate and up", 28672, 4096, Role::Gated, Input::Bytes),
        ("down", 4096, 14336, Role::Plain, Input::Pairs),
    ];
    for (name, rows, cols, role, input) in cases {
        let all = matrices(&mut backend, 4, rows, cols);
        let outputs = if role == Role::Gated { rows / 2 } else { rows };
        for (count, kind) in [4, 16, 64].into_iter().flat_map(|count| KINDS.map(|kind| (count, kind))) {
            let of_all = (all.as_slice(), role, input);
            let fitting = forms.iter().copied().filter(|(batch, _)| *batch <= count);
            let found = of_shapes(&mut backend, of_all, (count, outputs, kind), fitting);
            println!("{name} {rows}x{cols}, {count} rows, {kind}:");
            print_best(&found, 17);
        }
    }
}

/// Content of the input rows.
const KINDS: [&str; 3] = ["alike", "random", "normed"];

/// Microseconds of a product, the number of rows that it computes together, and its shape.
type Found = (f64, usize, ProductShape);

fn print_best(found: &[Found], most: usize) {
    for (time, batch, ProductShape { per, unroll, warps, ahead, .. }) in found.iter().take(most) {
        let ahead = if *ahead { ", ahead" } else { "" };
        println!("  {time:.2} us, {batch} rows: {per}, {unroll}, {warps}{ahead}");
    }
}

/// All forms, the fastest first.
fn of_shapes(
    backend: &mut GpuBackend,
    (all, role, input): (&[Matrix], Role, Input),
    (rows, outputs, kind): (usize, usize, &str),
    forms: impl Iterator<Item = (usize, ProductShape)>,
) -> Vec<Found> {
    let (format, blocks) = (all[0].chunks[0].format, all[0].blocks);
    let mut x = backend.buffer(rows, blocks * 32).unwrap();
    let random = Numbers(1).take(rows * blocks * 32);
    let alike = vec![0.5; rows * blocks * 32];
    backend.write(if kind == "alike" { &alike } else { &random }, &mut x).unwrap();
    let mut out = backend.buffer(rows, outputs).unwrap();
    out.shape(rows).unwrap();
    let weight = backend.vector(&random[..blocks * 32]).unwrap();
    let x = match kind {
        "normed" => LinearInput::Normed { x: &x, weight: &weight, eps: 1e-5 },
        _ => LinearInput::Plain(&x),
    };
    let operand = backend.operand(&x, 0..rows, blocks, input, &mut None).unwrap();
    let mut results = Vec::new();
    for (batch, shape) in forms {
        let lines = shape.per * if role == Role::Gated { 2 } else { 1 };
        if lines * batch > 64 || lines * shape.unroll > 8 {
            continue;
        }
        let product = Product { shape, ..Product::new(format, input, role, Sum::Subgroup, batch) };
        let each = time(backend, |backend, index| {
            let chunk = &all[index % all.len()].chunks[0];
            let weights = Weights { chunk, blocks };
            let arguments = ProductArguments::new(weights, outputs, 0..rows, operand.stride(), &out);
            backend
                .record_product(product, (chunk, None), &operand, &[], &arguments, (&out.memory, None))
                .unwrap();
        });
        results.push((each, batch, shape));
    }
    results.sort_by(|a, b| a.0.total_cmp(&b.0));
    results
}

/// Products of several rows by matrices of bytes, next to those that lanes share.
#[test]
#[ignore = "a measurement, for a real GPU"]
fn products_by_matrices_of_bytes() {
    let Some(found) = device("products_by_matrices_of_bytes") else { return };
    let mut backend = backend(&found, Activations::Auto, Group::solo());
    if !backend.device.multiplies_bytes {
        let reason = "the device has no cooperative matrices of bytes";
        thunder_testing::skip("products_by_matrices_of_bytes", reason);
        return;
    }
    let cases = [
        ("1B out", 2048, 2048, Role::Plain, Input::Bytes),
        ("1B gate and up", 16384, 2048, Role::Gated, Input::Bytes),
        ("1B down", 2048, 8192, Role::Plain, Input::Pairs),
        ("8B qkv", 6144, 4096, Role::Plain, Input::Bytes),
        ("8B out", 4096, 4096, Role::Plain, Input::Bytes),
        ("8B gate and up", 28672, 4096, Role::Gated, Input::Bytes),
        ("8B down", 4096, 14336, Role::Plain, Input::Pairs),
        ("8B vocabulary", 128_256, 4096, Role::Plain, Input::Bytes),
        ("32B qkv", 10240, 5120, Role::Plain, Input::Bytes),
        ("32B out", 5120, 8192, Role::Plain, Input::Bytes),
        ("32B gate and up", 51200, 5120, Role::Gated, Input::Bytes),
        ("32B down", 5120, 25600, Role::Plain, Input::Pairs),
        ("70B qkv", 10240, 8192, Role::Plain, Input::Bytes),
        ("70B out", 8192, 8192, Role::Plain, Input::Bytes),
        ("70B down", 8192, 28672, Role::Plain, Input::Pairs),
    ];
    for (name, rows, cols, role, input) in cases {
        let all = matrices(&mut backend, 4, rows, cols);
        let gated = role == Role::Gated;
        let outputs = if gated { rows / 2 } else { rows };
        let (format, blocks) = (all[0].chunks[0].format, all[0].blocks);
        for count in [6, 8, 12, 16, 24, 32, 64] {
            let usual = Product::new(format, input, role, Sum::Subgroup, 8).shape;
            let of_all = (all.as_slice(), role, input);
            let lanes = of_shapes(&mut backend, of_all, (count, outputs, "random"), [(8, usual)].into_iter());
            let mut x = backend.buffer(count, cols).unwrap();
            backend.write(&Numbers(1).take(count * cols), &mut x).unwrap();
            let mut out = backend.buffer(count, outputs).unwrap();
            out.shape(count).unwrap();
            let x = LinearInput::Plain(&x);
            let operand = backend.operand(&x, 0..count, blocks, input, &mut None).unwrap();
            // Tiles of 16 rows, and of 32.
            let each = Batch::all(format, input, gated).map(|form| {
                time(&mut backend, |backend, index| {
                    let weights = Weights { chunk: &all[index % all.len()].chunks[0], blocks };
                    let arguments = ProductArguments::new(weights, outputs, 0..count, operand.stride(), &out);
                    backend.record_batch(form, (weights, None), &operand, &arguments, &out.memory).unwrap();
                })
            });
            println!(
                "{name} {rows}x{cols}, {count} rows: by lanes {:.1} us, by matrices {:.1} and {:.1}",
                lanes[0].0, each[0], each[1]
            );
        }
    }
}

/// Products that store levels, in each shape, compared with the usual form and the kernel that
/// rounds.
#[test]
#[ignore = "a measurement, for a real GPU"]
fn leaving_shapes() {
    let Some(found) = device("leaving_shapes") else { return };
    let mut backend = backend(&found, Activations::Auto, Group::solo());
    let plain = ProductShape::new;
    let ahead = |per, unroll, warps| plain(per, unroll, warps).ahead();
    let shapes = [
        plain(1, 2, 32),
        plain(2, 2, 16),
        plain(2, 4, 16),
        plain(2, 1, 16),
        plain(4, 1, 8),
        plain(4, 2, 8),
        ahead(1, 1, 32),
        ahead(1, 2, 32),
        ahead(2, 1, 16),
        ahead(2, 2, 16),
        ahead(2, 4, 16),
        ahead(4, 1, 8),
        ahead(4, 2, 8),
    ];
    let cases = [
        ("out", 4096, 4096, Role::Plain, Input::Bytes, Leaves::Normed),
        ("gate and up", 28672, 4096, Role::Gated, Input::Bytes, Leaves::Pairs),
        ("down", 4096, 14336, Role::Plain, Input::Pairs, Leaves::Normed),
        ("down of bytes", 4096, 14336, Role::Plain, Input::Bytes, Leaves::Normed),
        ("gate and up of a share", 28672, 8192, Role::Gated, Input::Bytes, Leaves::Pairs),
        ("1B out", 2048, 2048, Role::Plain, Input::Bytes, Leaves::Normed),
        ("1B gate and up", 16384, 2048, Role::Gated, Input::Bytes, Leaves::Pairs),
        ("1B down", 2048, 8192, Role::Plain, Input::Pairs, Leaves::Normed),
        ("out, 8 bits", 4096, 4096, Role::Plain, Input::Bytes, Leaves::Normed),
        ("gate and up, 8 bits", 28672, 4096, Role::Gated, Input::Bytes, Leaves::Pairs),
        ("down, 8 bits", 4096, 14336, Role::Plain, Input::Pairs, Leaves::Normed),
    ];
    for (name, rows, cols, role, input, leaves) in cases {
        let bits = if name.ends_with("8 bits") { 8 } else { 4 };
        let all = matrices(&mut backend, bits, rows, cols);
        let outputs = if role == Role::Gated { rows / 2 } else { rows };
        let mut x = backend.buffer(1, cols).unwrap();
        backend.write(&vec![0.5; cols], &mut x).unwrap();
        let mut out = backend.buffer(1, outputs).unwrap();
        out.shape(1).unwrap();
        let (format, blocks) = (all[0].chunks[0].format, all[0].blocks);
        let weights = Weights { chunk: &all[0].chunks[0], blocks };
        backend.form_of(weights, input, role, 1).unwrap();
        let operand = backend.operand(&LinearInput::Plain(&x), 0..1, blocks, input, &mut None).unwrap();
        let norm = backend.vector(&vec![1.0; outputs]).unwrap();
        let [levels, scales, squares] =
            [4, 1, 1].map(|n| backend.device.memory(n * outputs, "a test").unwrap());
        let run = |backend: &mut GpuBackend, product: Product, index: usize, left: &[&Memory]| {
            let chunk = &all[index % all.len()].chunks[0];
            let weights = Weights { chunk, blocks };
            let arguments = ProductArguments::new(weights, outputs, 0..1, operand.stride(), &out);
            let to = (&out.memory, None);
            backend.record_leaving(product, (chunk, None), &operand, &[], &arguments, to, left).unwrap();
        };
        let usual = Product::new(format, input, role, Sum::Subgroup, 1);
        let of_usual = time(&mut backend, |backend, index| run(backend, usual, index, &[]));
        let wanted = if leaves == Leaves::Pairs { Input::Pairs } else { Input::Bytes };
        let both = time(&mut backend, |backend, index| {
            run(backend, usual, index, &[]);
            let norm = (leaves == Leaves::Normed).then_some((&norm, 1e-5));
            backend.quantized(&out, 0..1, outputs / 32, wanted, norm).unwrap();
        });
        println!("{name}: usual {of_usual:.2} us, with a kernel that rounds {both:.2} us");
        let mut left = vec![&levels, &scales];
        if leaves == Leaves::Normed {
            left = vec![&norm.memory, &levels, &scales, &squares];
        }
        for shape in shapes {
            let product = Product { shape, ..usual.leaving(leaves) };
            let each = time(&mut backend, |backend, index| run(backend, product, index, &left));
            println!("  {each:.2} us {shape:?}");
        }
    }
}

#[test]
fn bandwidth_is_measured() {
    let Some(found) = device("bandwidth_is_measured") else { return };
    let rate = crate::bandwidth(&found).unwrap();
    assert!((1e8..1e14).contains(&rate), "{rate} bytes/s");
}

/// Products of four bytes that a GPU computes per second, by the use of the results.
#[test]
#[ignore = "a measurement, for a real GPU"]
fn products_of_bytes() {
    use std::fmt::Write;
    use std::sync::atomic::{AtomicUsize, Ordering};
    static WAY: AtomicUsize = AtomicUsize::new(0);
    const WAYS: [&str; 6] = ["dots", "sum + dot", "dot + sum", "block", "block, converted", "block of u8"];
    fn text(way: usize) -> String {
        let (mut state, mut round, mut end) = (String::new(), String::new(), "out[at] = 0.0".to_owned());
        for i in 0..8 {
            let next = (i + 1) % 8;
            match way {
                0..3 => {
                    let _ = writeln!(state, "var a{i} = i32(thread * 77u + {i}u);");
                    let dot = format!("dot4I8Packed(bitcast<u32>(a{i}), k)");
                    let _ = match way {
                        0 => writeln!(round, "a{i} = {dot};"),
                        1 => writeln!(round, "a{i} = a{next} + {dot};"),
                        _ => writeln!(round, "a{i} = {dot} + a{next};"),
                    };
                    end += &format!(" + f32(a{i})");
                }
                _ => {
                    let _ = writeln!(state, "var v{i} = thread * 77u + {i}u;");
                    let _ = writeln!(round, "v{i} += 0x01010101u;");
                }
            }
        }
        for line in 0..if way < 3 { 0 } else { 4 } {
            let dot = if way == 5 { "dot4U8Packed" } else { "dot4I8Packed" };
            let dots: Vec<_> = (0..8).map(|i| format!("{dot}(q{line}_{i}, v{i})")).collect();
            (0..8).for_each(|i| {
                let _ = writeln!(state, "let q{line}_{i} = thread * {}u + k;", 1 + line * 8 + i);
            });
            let sum = match way {
                3 => format!("(bitcast<f32>(0x4b400000i + {}) - 12582912.0)", dots.join(" + ")),
                4 => format!("f32({})", dots.join(" + ")),
                _ => format!("(bitcast<f32>(0x4b400000u + {}) - 12582912.0)", dots.join(" + ")),
            };
            let _ = writeln!(state, "var s{line} = 0.0;");
            let _ = writeln!(round, "s{line} = fma(args.factor, {sum}, s{line});");
            end += &format!(" + s{line}");
        }
        format!(
            "struct Args {{ rounds: u32, factor: f32 }}
var<immediate> args: Args;
@group(0) @binding(0) var<storage, read_write> out: array<f32>;
@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) id: vec3<u32>, @builtin(local_invocation_index) thread: u32) {{
    let at = id.x * 256u + thread;
    let k = bitcast<u32>(args.factor);
    {state}
    for (var i = 0u; i < args.rounds; i++) {{ {} }}
    {end};
}}",
            if way < 3 { round.repeat(8) } else { round.repeat(2) }
        )
    }
    let Some(found) = device("products_of_bytes") else { return };
    let mut device = crate::device::Device::open(&found, false).unwrap();
    device.sabotage = Some(|_, _| text(WAY.load(Ordering::Relaxed)));
    let out = device.memory(4 * 1024 * 256, "results of arithmetic").unwrap();
    for (way, name) in WAYS.into_iter().enumerate() {
        WAY.store(way, Ordering::Relaxed);
        device.forget(&crate::kernel::Kernel::PeakFloats);
        let mut run = |rounds: u32| {
            let start = Instant::now();
            let arguments = [rounds, 0.001f32.to_bits()];
            device.dispatch(&crate::kernel::Kernel::PeakFloats, &[&out], &arguments, [1024, 1, 1]).unwrap();
            device.submit().unwrap();
            device.wait().unwrap();
            start.elapsed().as_secs_f64()
        };
        run(10);
        let seconds = (0..5).map(|_| run(6000) - run(2000)).fold(f64::MAX, f64::min);
        println!("{name}: {:.2} T dots/s", 64.0 * 4000.0 * 1024.0 * 256.0 / seconds / 1e12);
    }
}
