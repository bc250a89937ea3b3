// Multiplies each head of a row with the sigmoid of its gate, in place.
struct Args { row: u32, gates_stride: u32, stride: u32, first: u32, dim: u32, count: u32 }
var<immediate> args: Args;
@group(0) @binding(0) var<storage, read> gates: array<f32>;
@group(0) @binding(1) var<storage, read_write> x: array<f32>;
@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) id: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let i = id.x * 256u + thread;
    if (i < args.count) {
        let row = args.row + id.y;
        let gate = gates[row * args.gates_stride + i / args.dim];
        x[row * args.stride + args.first + i] *= 1.0 / (1.0 + exp(-gate));
    }
}
