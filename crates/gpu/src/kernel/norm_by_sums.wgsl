// x[r][c] *= weight[c] / sqrt(sums[r][column] / width + eps), for columns from `first` on.
struct Args {
    row: u32, x_stride: u32, first: u32, count: u32,
    sums_stride: u32, column: u32, width: u32, eps: f32,
}
var<immediate> args: Args;
@group(0) @binding(0) var<storage, read> weight: array<f32>;
@group(0) @binding(1) var<storage, read> sums: array<f32>;
@group(0) @binding(2) var<storage, read_write> x: array<f32>;
@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) id: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let row = args.row + id.x;
    let i = id.y * 256u + thread;
    if (i < args.count) {
        let at = row * args.x_stride + args.first + i;
        let rms = sqrt(sums[row * args.sums_stride + args.column] / f32(args.width) + args.eps);
        x[at] = x[at] * weight[i] / rms;
    }
}
