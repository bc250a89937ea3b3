// The score of a sum of the residual stream in a mix: its norm's product with a vector. A workgroup
// has a row.
struct Args { row: u32, stride: u32, width: u32, table: u32, eps: f32, sums: u32, number: u32 }
var<immediate> args: Args;
@group(0) @binding(0) var<storage, read> weight: array<u32>;
@group(0) @binding(1) var<storage, read> x: array<f32>;
@group(0) @binding(2) var<storage, read_write> scores: array<f32>;
var<workgroup> sums: array<vec2<f32>, 256>;
@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) id: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let at = (args.row + id.x) * args.stride;
    var sum = vec2<f32>(0.0);
    for (var i = thread; i < args.width; i += 256u) {
        let value = x[at + i];
        sum = fma(vec2<f32>(value), vec2<f32>(bitcast<f32>(weight[args.table + i]), value), sum);
    }
    sums[thread] = sum;
    workgroupBarrier();
    for (var half = 128u; half > 0u; half /= 2u) {
        if (thread < half) { sums[thread] += sums[thread + half]; }
        workgroupBarrier();
    }
    if (thread == 0u) {
        scores[id.x * args.sums + args.number] = sums[0].x / sqrt(sums[0].y / f32(args.width) + args.eps);
    }
}
