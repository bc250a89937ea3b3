// out[r][to + i] = x[r][from + i].
struct Args { row: u32, from_stride: u32, from_column: u32, to_stride: u32, to_column: u32, width: u32 }
var<immediate> args: Args;
@group(0) @binding(0) var<storage, read> x: array<f32>;
@group(0) @binding(1) var<storage, read_write> out: array<f32>;
@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) id: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let column = id.x * 256u + thread;
    if (column >= args.width) { return; }
    let row = args.row + id.y;
    out[row * args.to_stride + args.to_column + column] = x[row * args.from_stride + args.from_column + column];
}
