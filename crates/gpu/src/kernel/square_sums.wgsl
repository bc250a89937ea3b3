// out[r][column] = the sum of squares of columns of x[r]. A workgroup has a row.
struct Args { row: u32, x_stride: u32, first: u32, count: u32, out_stride: u32, column: u32 }
var<immediate> args: Args;
@group(0) @binding(0) var<storage, read> x: array<f32>;
@group(0) @binding(1) var<storage, read_write> out: array<f32>;
var<workgroup> sums: array<f32, 256>;
@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) id: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let row = args.row + id.x;
    let source = row * args.x_stride + args.first;
    var sum = 0.0;
    for (var i = thread; i < args.count; i += 256u) { sum = fma(x[source + i], x[source + i], sum); }
    sums[thread] = sum;
    workgroupBarrier();
    for (var half = 128u; half > 0u; half /= 2u) {
        if (thread < half) { sums[thread] += sums[thread + half]; }
        workgroupBarrier();
    }
    if (thread == 0u) { out[row * args.out_stride + args.column] = sums[0]; }
}
