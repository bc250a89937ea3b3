// x[r][column + i] *= factors[r].
struct Args { row: u32, stride: u32, column: u32, width: u32, table: u32 }
var<immediate> args: Args;
// A factor for each row, as words.
@group(0) @binding(0) var<storage, read> factors: array<u32>;
@group(0) @binding(1) var<storage, read_write> x: array<f32>;
@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) id: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let i = id.x * 256u + thread;
    if (i >= args.width) { return; }
    x[(args.row + id.y) * args.stride + args.column + i] *= bitcast<f32>(factors[args.table + id.y]);
}
