// out[r] = x[r] / sqrt(mean(x[r]^2) + eps) * weight. A workgroup has a row. Up to 4 quads of it stay
// with a thread, so that everything is asked for at once.
struct Args { width: u32, row: u32, x_stride: u32, out_stride: u32, eps: f32 }
var<immediate> args: Args;
@group(0) @binding(0) var<storage, read> weight: array<vec4<f32>>;
@group(0) @binding(1) var<storage, read> x: array<vec4<f32>>;
@group(0) @binding(2) var<storage, read_write> out: array<vec4<f32>>;
const THREADS = 512u;
// Not vectors: a write of one component may touch the others, which are other threads'.
var<workgroup> sums: array<f32, 512>;
var<workgroup> totals: array<f32, 32>;
$LEAVING
fn squares_of(v: vec4<f32>) -> f32 {
    return fma(v.w, v.w, fma(v.z, v.z, fma(v.y, v.y, v.x * v.x)));
}
fn four_sums(n: u32) -> vec4<f32> {
    return vec4<f32>(sums[4u * n], sums[4u * n + 1u], sums[4u * n + 2u], sums[4u * n + 3u]);
}
fn four_totals(n: u32) -> vec4<f32> {
    return vec4<f32>(totals[4u * n], totals[4u * n + 1u], totals[4u * n + 2u], totals[4u * n + 3u]);
}
@compute @workgroup_size(512)
fn main(@builtin(workgroup_id) id: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let source = (args.row + id.x) * args.x_stride / 4u;
    let to = (args.row + id.x) * args.out_stride / 4u;
    let quads = (args.width + 3u) / 4u;
    var sum = 0.0;
    $READ
    $SQUARES
    for (var quad = thread + 4u * THREADS; quad < quads; quad += THREADS) {
        sum += squares_of(x[source + quad]);
    }
    sums[thread] = sum;
    workgroupBarrier();
    if (thread < 32u) {
        let first = 4u * thread;
        let four = (four_sums(first) + four_sums(first + 1u)) + (four_sums(first + 2u) + four_sums(first + 3u));
        totals[thread] = (four.x + four.y) + (four.z + four.w);
    }
    workgroupBarrier();
    let all = ((four_totals(0u) + four_totals(1u)) + (four_totals(2u) + four_totals(3u)))
        + ((four_totals(4u) + four_totals(5u)) + (four_totals(6u) + four_totals(7u)));
    let rms = sqrt(((all.x + all.y) + (all.z + all.w)) / f32(args.width) + args.eps);
    $WRITE
    for (var quad = thread + 4u * THREADS; quad < quads; quad += THREADS) {
        out[to + quad] = x[source + quad] / rms * weight[quad];
    }
    $LEAVE
}
