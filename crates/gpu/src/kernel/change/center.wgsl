// Subtracts from some columns of a row their mean. A workgroup has a row.
struct Args { row: u32, stride: u32, first: u32, count: u32 }
var<immediate> args: Args;
@group(0) @binding(0) var<storage, read_write> x: array<f32>;
var<workgroup> sums: array<f32, 256>;
@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) id: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let at = (args.row + id.x) * args.stride + args.first;
    var sum = 0.0;
    for (var i = thread; i < args.count; i += 256u) { sum += x[at + i]; }
    sums[thread] = sum;
    workgroupBarrier();
    for (var half = 128u; half > 0u; half /= 2u) {
        if (thread < half) { sums[thread] += sums[thread + half]; }
        workgroupBarrier();
    }
    let mean = sums[0] / f32(args.count);
    for (var i = thread; i < args.count; i += 256u) { x[at + i] -= mean; }
}
