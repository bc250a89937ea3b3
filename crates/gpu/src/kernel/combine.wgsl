// Adds the splits of a query head of a row.
struct Args {
    row: u32, heads: u32, splits: u32, split_tokens: u32,
    part_stride: u32, out_stride: u32, out_first: u32, out_dim: u32,
    table: u32, window: u32, sinks: u32,
}
var<immediate> args: Args;
@group(0) @binding(0) var<storage, read> tables: array<u32>;
@group(0) @binding(1) var<storage, read> sinks: array<f32>;
@group(0) @binding(2) var<storage, read> parts: array<f32>;
@group(0) @binding(3) var<storage, read_write> out: array<f32>;
@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) id: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let head = id.x;
    let row = args.row + id.y;
    let position = tables[args.table + row * 4u];
    let visible = select(0u, max(position + 1u, args.window) - args.window, args.window > 0u);
    let begin = visible / args.split_tokens;
    let end = position / args.split_tokens + 1u;
    let source = (id.y * args.heads + head) * args.splits;
    var largest = -3.0e38;
    if (args.sinks == 1u) { largest = sinks[head]; }
    for (var i = begin; i < end; i++) { largest = max(largest, parts[(source + i) * args.part_stride]); }
    var sum = 0.0;
    for (var i = begin; i < end; i++) {
        let at = (source + i) * args.part_stride;
        sum = fma(parts[at + 1u], exp(parts[at] - largest), sum);
    }
    if (args.sinks == 1u) { sum += exp(sinks[head] - largest); }
    let to = row * args.out_stride + args.out_first + head * args.out_dim;
    for (var d = thread; d < args.out_dim; d += 64u) {
        var value = 0.0;
        for (var i = begin; i < end; i++) {
            let at = (source + i) * args.part_stride;
            value = fma(parts[at + 2u + d], exp(parts[at] - largest), value);
        }
        out[to + d] = value / sum;
    }
}
