// LayerNorm of a row in place, with a weight and a bias for each column. A workgroup has a row.
struct Args { row: u32, stride: u32, width: u32, table: u32, eps: f32 }
var<immediate> args: Args;
// The weights, then the biases.
@group(0) @binding(0) var<storage, read> table: array<u32>;
@group(0) @binding(1) var<storage, read_write> x: array<f32>;
var<workgroup> sums: array<f32, 256>;
fn sum_of(sum: f32, thread: u32) -> f32 {
    // All threads have read the sum before.
    workgroupBarrier();
    sums[thread] = sum;
    workgroupBarrier();
    for (var half = 128u; half > 0u; half /= 2u) {
        if (thread < half) { sums[thread] += sums[thread + half]; }
        workgroupBarrier();
    }
    return sums[0];
}
@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) id: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let at = (args.row + id.x) * args.stride;
    var sum = 0.0;
    for (var i = thread; i < args.width; i += 256u) { sum += x[at + i]; }
    let mean = sum_of(sum, thread) / f32(args.width);
    sum = 0.0;
    for (var i = thread; i < args.width; i += 256u) {
        let centered = x[at + i] - mean;
        sum = fma(centered, centered, sum);
    }
    let root = sqrt(sum_of(sum, thread) / f32(args.width) + args.eps);
    for (var i = thread; i < args.width; i += 256u) {
        let weight = bitcast<f32>(table[args.table + i]);
        let bias = bitcast<f32>(table[args.table + args.width + i]);
        x[at + i] = (x[at + i] - mean) / root * weight + bias;
    }
}
