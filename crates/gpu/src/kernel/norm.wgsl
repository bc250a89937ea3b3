// out[r] = x[r] / sqrt(mean(x[r]^2) + eps) * weight. A workgroup has a row.
struct Args { width: u32, row: u32, x_stride: u32, out_stride: u32, eps: f32 }
var<immediate> args: Args;
@group(0) @binding(0) var<storage, read> weight: array<f32>;
@group(0) @binding(1) var<storage, read> x: array<f32>;
@group(0) @binding(2) var<storage, read_write> out: array<f32>;
var<workgroup> sums: array<f32, 256>;
@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) id: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let source = (args.row + id.x) * args.x_stride;
    let to = (args.row + id.x) * args.out_stride;
    var sum = 0.0;
    for (var i = thread; i < args.width; i += 256u) { sum = fma(x[source + i], x[source + i], sum); }
    sums[thread] = sum;
    workgroupBarrier();
    for (var half = 128u; half > 0u; half /= 2u) {
        if (thread < half) { sums[thread] += sums[thread + half]; }
        workgroupBarrier();
    }
    let rms = sqrt(sums[0] / f32(args.width) + args.eps);
    for (var i = thread; i < args.width; i += 256u) { out[to + i] = x[source + i] / rms * weight[i]; }
}
