//! Prints in which ways cooperative matrices can be loaded correctly, for a person at a GPU.
//! `THUNDER_TEST_GPU=0 cargo nextest run --release -p thunder-gpu --run-ignored only --no-capture
//! ways_to_load`

use std::sync::Mutex;

use thunder_collectives::Group;
use thunder_compute::Activations;

use super::{backend, device};
use crate::kernel::Kernel;

const SIDE: usize = 16;

/// A way of loading: its name, how the factors lie in memory, and how they are loaded.
struct Way {
    name: &'static str,
    vectors: bool,
    pitch: usize,
    a: &'static str,
    b: &'static str,
    adds: bool,
}

static TEXT: Mutex<String> = Mutex::new(String::new());

impl Way {
    /// Multiplies two matrices of 16 columns, `x[0..256]` and `x[256..512]`, row by row.
    fn source(&self) -> String {
        let (kind, per) = if self.vectors { ("vec4<f16>", 4) } else { ("f16", 1) };
        let pitch = self.pitch / per;
        let put = |tile: &str, is_transposed: bool, first: usize| {
            let at = |c: usize| match is_transposed {
                false => format!("row * {}u + column + {c}u", self.pitch),
                true => format!("(column + {c}u) * {}u + row", self.pitch),
            };
            let from = |c: usize| format!("f16(x[{first}u + row * 16u + column + {c}u])");
            match self.vectors {
                false => (0..4).map(|c| format!("{tile}[{}] = {};\n", at(c), from(c))).collect::<String>(),
                true => {
                    let from = |c: usize| match is_transposed {
                        false => from(c),
                        true => format!("f16(x[{first}u + (column + {c}u) * 16u + row])"),
                    };
                    format!(
                        "{tile}[row * {pitch}u + column / 4u] = vec4<f16>({}, {}, {}, {});\n",
                        from(0),
                        from(1),
                        from(2),
                        from(3)
                    )
                }
            }
        };
        // `coopLoad` takes columns, `coopLoadT` rows.
        let a = put("a_tile", self.a == "coopLoad", 0);
        let b = put("b_tile", self.b == "coopLoad", SIDE * SIDE);
        let sum = match self.adds {
            false => "let sum = coopMultiplyAdd(a, b, coop_mat16x16<f32, C>());",
            true => {
                "let zero = coopMultiplyAdd(a, b, coop_mat16x16<f32, C>());
coopStoreT(zero, &sums[0], 40u);
workgroupBarrier();
let sum = coopLoadT<coop_mat16x16<f32, C>>(&sums[0], 40u);
workgroupBarrier();"
            }
        };
        format!(
            "enable f16;
enable wgpu_cooperative_matrix;
@group(0) @binding(0) var<storage, read> x: array<f32>;
@group(0) @binding(1) var<storage, read_write> out: array<f32>;
var<workgroup> a_tile: array<{kind}, {size}>;
var<workgroup> b_tile: array<{kind}, {size}>;
var<workgroup> sums: array<f32, 640>;
@compute @workgroup_size(32)
fn main(@builtin(local_invocation_index) thread: u32) {{
    for (var i = thread; i < 64u; i += 32u) {{
        let row = i / 4u;
        let column = i % 4u * 4u;
        {a}{b}
    }}
    workgroupBarrier();
    let a = {}<coop_mat16x16<f16, A>>(&a_tile[0], {pitch}u);
    let b = {}<coop_mat16x16<f16, B>>(&b_tile[0], {pitch}u);
    {sum}
    coopStoreT(sum, &sums[0], 40u);
    workgroupBarrier();
    for (var i = thread; i < 256u; i += 32u) {{ out[i] = sums[i / 16u * 40u + i % 16u]; }}
}}
",
            self.a,
            self.b,
            size = 16 * self.pitch / per,
        )
    }
}

#[test]
#[ignore = "prints what a GPU can do"]
fn ways_to_load() {
    let Some(found) = device("ways_to_load") else { return };
    if found.matrix_side() != Some(SIDE) {
        println!("no matrices of 16 columns");
        return;
    }
    let way = |name, vectors, pitch, a, b, adds| Way { name, vectors, pitch, a, b, adds };
    let (columns, rows) = ("coopLoad", "coopLoadT");
    let ways = [
        way("A rows, B columns", false, 40, rows, columns, false),
        way("A rows, B columns, vectors", true, 40, rows, columns, false),
        way("A rows, B rows", false, 40, rows, rows, false),
        way("A rows, B rows, vectors", true, 40, rows, rows, false),
        way("A columns, B columns", false, 40, columns, columns, false),
        way("A columns, B columns, vectors", true, 40, columns, columns, false),
        way("A rows, B rows, pitch 136", false, 136, rows, rows, false),
        way("A rows, B rows, pitch 16", false, 16, rows, rows, false),
        way("sums loaded", false, 40, rows, columns, true),
    ];
    for way in ways {
        // Each kernel has its own name, because pipelines are kept by name.
        let mut backend = backend(&found, Activations::F32, Group::solo());
        *TEXT.lock().unwrap() = way.source();
        backend.device.sabotage = Some(|kernel, text| match kernel {
            Kernel::SquareSums => TEXT.lock().unwrap().clone(),
            _ => text,
        });
        backend.device.forget(&Kernel::SquareSums);
        let numbers: Vec<f32> = (0..2 * SIDE * SIDE).map(|i| ((i * 7 + i / 16) % 11) as f32 - 5.0).collect();
        let words: Vec<u32> = numbers.iter().map(|x| x.to_bits()).collect();
        let x = backend.device.filled(&words, "a test").unwrap();
        let out = backend.device.memory(4 * SIDE * SIDE, "a test").unwrap();
        if let Err(error) = backend.device.dispatch(&Kernel::SquareSums, &[&x, &out], &[0], [1, 1, 1]) {
            println!("{}: {error}", way.name);
            continue;
        }
        let mut found = Vec::new();
        backend.device.read(&out, 0..SIDE * SIDE, &mut found).unwrap();
        let (a, b) = numbers.split_at(SIDE * SIDE);
        let is_wrong = |i: &usize| {
            let (row, column) = (i / SIDE, i % SIDE);
            let right: f32 = (0..SIDE).map(|k| a[row * SIDE + k] * b[k * SIDE + column]).sum();
            f32::from_bits(found[*i]) != right
        };
        let wrong: Vec<usize> = (0..SIDE * SIDE).filter(is_wrong).collect();
        let first: Vec<_> = wrong.iter().take(3).map(|i| (*i, f32::from_bits(found[*i]))).collect();
        println!("{}: {} of 256 wrong {first:?}", way.name, wrong.len());
    }
}
