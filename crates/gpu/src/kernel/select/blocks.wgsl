// The largest score of each block of a row's keys, after the scores; the newest block's is larger
// than all others.
struct Args { table: u32, every: u32, keys: u32, score_stride: u32, first: u32, row: u32 }
var<immediate> args: Args;
@group(0) @binding(0) var<storage, read> tables: array<u32>;
@group(0) @binding(1) var<storage, read_write> scores: array<u32>;
@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) id: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let block = id.x * 64u + thread;
    let visible = (tables[args.table + (args.row + id.y) * 4u] + 1u) / args.every;
    let begin = block * args.keys;
    if (begin >= visible) { return; }
    let source = id.y * args.score_stride;
    let end = min(visible, begin + args.keys);
    var largest = bitcast<f32>(scores[source + begin]);
    for (var i = begin + 1u; i < end; i++) { largest = max(largest, bitcast<f32>(scores[source + i])); }
    // The bits of infinity.
    scores[source + args.first + block] = select(bitcast<u32>(largest), 0x7f800000u, end == visible);
}
