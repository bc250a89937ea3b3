// Adds the splits of a query head of a row.
struct Args {
    row: u32, heads: u32, splits: u32, part_stride: u32,
    out_stride: u32, out_first: u32, out_dim: u32, table: u32,
    window: u32, sinks: u32,
}
var<immediate> args: Args;
@group(0) @binding(0) var<storage, read> tables: array<u32>;
@group(0) @binding(1) var<storage, read> sinks: array<f32>;
@group(0) @binding(2) var<storage, read> parts: array<f32>;
@group(0) @binding(3) var<storage, read_write> out: array<f32>;
var<workgroup> most: array<f32, 128>;
var<workgroup> totals: array<f32, 128>;
$SPLIT
@compute @workgroup_size(128)
fn main(@builtin(workgroup_id) id: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let head = id.x;
    let row = args.row + id.y;
    let end = tables[args.table + row * 4u] + 1u;
    let visible = select(0u, max(end, args.window) - args.window, args.window > 0u);
    let size = tokens_of_split(visible, end);
    let count = (end - 1u) / size + 1u - visible / size;
    let source = (id.y * args.heads + head) * args.splits * args.part_stride;
    if (thread < count) {
        most[thread] = parts[source + thread * args.part_stride];
        totals[thread] = parts[source + thread * args.part_stride + 1u];
    }
    workgroupBarrier();
    var largest = -3.0e38;
    if (args.sinks == 1u) { largest = sinks[head]; }
    for (var i = 0u; i < count; i++) { largest = max(largest, most[i]); }
    workgroupBarrier();
    if (thread < count) { most[thread] = exp(most[thread] - largest); }
    workgroupBarrier();
    var sum = 0.0;
    for (var i = 0u; i < count; i++) { sum = fma(totals[i], most[i], sum); }
    if (args.sinks == 1u) { sum += exp(sinks[head] - largest); }
    let to = row * args.out_stride + args.out_first + head * args.out_dim;
    for (var d = thread; d < args.out_dim; d += 128u) {
        let at = source + 2u + d;
        var value = 0.0;
        var i = 0u;
        // Four at a time, so that they are read at once.
        for (; i + 4u <= count; i += 4u) {
            let a = parts[at + i * args.part_stride];
            let b = parts[at + (i + 1u) * args.part_stride];
            let c = parts[at + (i + 2u) * args.part_stride];
            let e = parts[at + (i + 3u) * args.part_stride];
            value = fma(a, most[i], value);
            value = fma(b, most[i + 1u], value);
            value = fma(c, most[i + 2u], value);
            value = fma(e, most[i + 3u], value);
        }
        for (; i < count; i++) { value = fma(parts[at + i * args.part_stride], most[i], value); }
        out[to + d] = value / sum;
    }
}
