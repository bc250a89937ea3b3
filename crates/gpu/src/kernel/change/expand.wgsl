// Mixes a row's residual streams and adds a part's result to each.
struct Args { row: u32, w_stride: u32, result_stride: u32, x_stride: u32, streams: u32, width: u32 }
var<immediate> args: Args;
@group(0) @binding(0) var<storage, read> weights: array<f32>;
@group(0) @binding(1) var<storage, read> result: array<f32>;
@group(0) @binding(2) var<storage, read_write> x: array<f32>;
@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) id: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let c = id.x * 256u + thread;
    let row = args.row + id.y;
    let n = args.streams;
    if (c < args.width) {
        let of_row = row * args.w_stride;
        let at = row * args.x_stride + c;
        var before: array<f32, $STREAMSu>;
        for (var j = 0u; j < n; j++) { before[j] = x[at + j * args.width]; }
        let added = result[row * args.result_stride + c];
        for (var k = 0u; k < n; k++) {
            var sum = 0.0;
            for (var j = 0u; j < n; j++) { sum = fma(weights[of_row + (2u + j) * n + k], before[j], sum); }
            x[at + k * args.width] = fma(weights[of_row + n + k], added, sum);
        }
    }
}
