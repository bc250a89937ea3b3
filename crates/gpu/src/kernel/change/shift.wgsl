// Adds numbers to columns of rows.
struct Args { row: u32, stride: u32, first: u32, count: u32, table: u32 }
var<immediate> args: Args;
@group(0) @binding(0) var<storage, read> added: array<u32>;
@group(0) @binding(1) var<storage, read_write> x: array<f32>;
@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) id: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let i = id.x * 256u + thread;
    if (i < args.count) {
        x[(args.row + id.y) * args.stride + args.first + i] += bitcast<f32>(added[args.table + i]);
    }
}
