// The root of a row's mean square: each of 512 threads has the sum of some squares.
const THREADS = 512u;
// Not vectors: a write of one component may touch the others, which are other threads'.
var<workgroup> norm_sums: array<f32, 512>;
var<workgroup> norm_totals: array<f32, 32>;
fn squares_of(v: vec4<f32>) -> f32 {
    return fma(v.w, v.w, fma(v.z, v.z, fma(v.y, v.y, v.x * v.x)));
}
fn four_sums(n: u32) -> vec4<f32> {
    return vec4<f32>(norm_sums[4u * n], norm_sums[4u * n + 1u], norm_sums[4u * n + 2u], norm_sums[4u * n + 3u]);
}
fn four_totals(n: u32) -> vec4<f32> {
    return vec4<f32>(norm_totals[4u * n], norm_totals[4u * n + 1u], norm_totals[4u * n + 2u], norm_totals[4u * n + 3u]);
}
fn root_of(sum: f32, thread: u32) -> f32 {
    norm_sums[thread] = sum;
    workgroupBarrier();
    if (thread < 32u) {
        let first = 4u * thread;
        let four = (four_sums(first) + four_sums(first + 1u)) + (four_sums(first + 2u) + four_sums(first + 3u));
        norm_totals[thread] = (four.x + four.y) + (four.z + four.w);
    }
    workgroupBarrier();
    let all = ((four_totals(0u) + four_totals(1u)) + (four_totals(2u) + four_totals(3u)))
        + ((four_totals(4u) + four_totals(5u)) + (four_totals(6u) + four_totals(7u)));
    return sqrt(((all.x + all.y) + (all.z + all.w)) / f32(args.width) + args.eps);
}
