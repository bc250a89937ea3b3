// The weighted sum of a row's residual streams.
struct Args { row: u32, w_stride: u32, x_stride: u32, out_stride: u32, streams: u32, width: u32 }
var<immediate> args: Args;
@group(0) @binding(0) var<storage, read> weights: array<f32>;
@group(0) @binding(1) var<storage, read> x: array<f32>;
@group(0) @binding(2) var<storage, read_write> out: array<f32>;
@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) id: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let c = id.x * 256u + thread;
    let row = args.row + id.y;
    if (c < args.width) {
        var sum = 0.0;
        for (var j = 0u; j < args.streams; j++) {
            sum = fma(weights[row * args.w_stride + j], x[row * args.x_stride + j * args.width + c], sum);
        }
        out[row * args.out_stride + c] = sum;
    }
}
