// Adds the splits of a query head of a row. Splits without tokens are skipped, so a result does not
// depend on their number. With `sinks`, each head has one more score, without a value.
struct Args {
    row: u32, heads: u32, splits: u32, part_stride: u32, out_stride: u32, out_dim: u32, sinks: u32,
}
var<immediate> args: Args;
@group(0) @binding(0) var<storage, read> sinks: array<f32>;
@group(0) @binding(1) var<storage, read> parts: array<f32>;
@group(0) @binding(2) var<storage, read_write> out: array<f32>;
const NONE = -3.0e38;
var<workgroup> most: array<f32, 64>;
var<workgroup> totals: array<f32, 64>;
@compute @workgroup_size(128)
fn main(@builtin(workgroup_id) id: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let head = id.x;
    let row = args.row + id.y;
    let source = (id.y * args.heads + head) * args.splits * args.part_stride;
    if (thread < args.splits) {
        most[thread] = parts[source + thread * args.part_stride];
        totals[thread] = parts[source + thread * args.part_stride + 1u];
    }
    workgroupBarrier();
    var largest = NONE;
    if (args.sinks == 1u) { largest = sinks[head]; }
    for (var i = 0u; i < args.splits; i++) { largest = max(largest, most[i]); }
    var total = 0.0;
    if (args.sinks == 1u) { total = exp(sinks[head] - largest); }
    for (var i = 0u; i < args.splits; i++) {
        if (totals[i] != 0.0) { total = fma(totals[i], exp(most[i] - largest), total); }
    }
    for (var d = thread; d < args.out_dim; d += 128u) {
        var sum = 0.0;
        for (var i = 0u; i < args.splits; i++) {
            if (totals[i] != 0.0) {
                sum = fma(parts[source + i * args.part_stride + 2u + d], exp(most[i] - largest), sum);
            }
        }
        out[row * args.out_stride + head * args.out_dim + d] = sum / total;
    }
}
