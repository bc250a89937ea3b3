// out[i] = x[rows[i]].
struct Args { table: u32, width: u32, stride: u32 }
var<immediate> args: Args;
@group(0) @binding(0) var<storage, read> rows: array<u32>;
@group(0) @binding(1) var<storage, read> x: array<f32>;
@group(0) @binding(2) var<storage, read_write> out: array<f32>;
@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) id: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let source = rows[args.table + id.x] * args.stride;
    for (var i = thread; i < args.width; i += 256u) { out[id.x * args.stride + i] = x[source + i]; }
}
