// x[r][h] = norm(x[r][h]) * silu(z[r][h]), in place. A workgroup has a head of a row.
struct Args { row: u32, x_stride: u32, z_stride: u32, width: u32, eps: f32 }
var<immediate> args: Args;
@group(0) @binding(0) var<storage, read> weight: array<f32>;
@group(0) @binding(1) var<storage, read> z: array<f32>;
@group(0) @binding(2) var<storage, read_write> x: array<f32>;
var<workgroup> sums: array<f32, 64>;
@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) id: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let row = args.row + id.x;
    let at = row * args.x_stride + id.y * args.width;
    let gate_at = row * args.z_stride + id.y * args.width;
    var sum = 0.0;
    for (var i = thread; i < args.width; i += 64u) { sum = fma(x[at + i], x[at + i], sum); }
    sums[thread] = sum;
    workgroupBarrier();
    for (var half = 32u; half > 0u; half /= 2u) {
        if (thread < half) { sums[thread] += sums[thread + half]; }
        workgroupBarrier();
    }
    let rms = sqrt(sums[0] / f32(args.width) + args.eps);
    for (var i = thread; i < args.width; i += 64u) {
        let g = z[gate_at + i];
        x[at + i] = x[at + i] / rms * weight[i] * (g / (1.0 + exp(-g)));
    }
}
