// Adds a sum of the residual stream to a mix, by the softmax of the sums' scores.
struct Args { row: u32, x_stride: u32, out_stride: u32, width: u32, sums: u32, number: u32 }
var<immediate> args: Args;
@group(0) @binding(0) var<storage, read> scores: array<f32>;
@group(0) @binding(1) var<storage, read> x: array<f32>;
@group(0) @binding(2) var<storage, read_write> out: array<f32>;
@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) id: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let c = id.x * 256u + thread;
    let row = args.row + id.y;
    if (c < args.width) {
        let of_row = id.y * args.sums;
        var largest = scores[of_row];
        for (var i = 1u; i < args.sums; i++) { largest = max(largest, scores[of_row + i]); }
        var total = 0.0;
        for (var i = 0u; i < args.sums; i++) { total += exp(scores[of_row + i] - largest); }
        let share = exp(scores[of_row + args.number] - largest) / total;
        let at = row * args.out_stride + c;
        var before = 0.0;
        if (args.number > 0u) { before = out[at]; }
        out[at] = fma(share, x[row * args.x_stride + c], before);
    }
}
