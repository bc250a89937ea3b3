// out[r] = activation(gate, up), where a row of both is [gate, up].
struct Args { width: u32, row: u32, x_stride: u32, out_stride: u32, activation: u32, alpha: f32, limit: f32 }
var<immediate> args: Args;
@group(0) @binding(0) var<storage, read> both: array<f32>;
@group(0) @binding(1) var<storage, read_write> out: array<f32>;
$ACTIVATE
@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) id: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let i = id.x * 256u + thread;
    let row = args.row + id.y;
    if (i < args.width) {
        let source = row * args.x_stride + i;
        out[row * args.out_stride + i] = activate(both[source], both[source + args.width]);
    }
}
