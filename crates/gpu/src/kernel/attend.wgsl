// Attention of a query head of a row to the tokens of its sequence, or to a split of them: a
// workgroup visits blocks of 32 tokens by their position. Without splits the result goes to `out`,
// else the split's maximum, sum and weighted values.
struct Args {
    row: u32, q_stride: u32, q_first: u32, q_head_stride: u32,
    first_dim: u32, second_dim: u32, first_words: u32, second_words: u32,
    out_stride: u32, out_first: u32, out_dim: u32, kv_heads: u32,
    table: u32, blocks: u32, window: u32, splits: u32,
    heads: u32, sinks: u32, absorbed_stride: u32, chunk: u32,
    cap: f32,
    // Without splits: later tokens that a row attends to, and the position of its sequence's last.
    after: u32, newest: u32,
}
var<immediate> args: Args;
@group(0) @binding(0) var<storage, read> tables: array<u32>;
@group(0) @binding(1) var<storage, read> queries: array<f32>;
@group(0) @binding(2) var<storage, read> absorbed: array<f32>;
// The KV head of each query head.
@group(0) @binding(3) var<storage, read> kv_of: array<u32>;
@group(0) @binding(4) var<storage, read> sinks: array<f32>;
// Keys and values, or compressed vectors and rotated parts.
@group(0) @binding(5) var<storage, read> first: array<u32>;
@group(0) @binding(6) var<storage, read> second: array<u32>;
@group(0) @binding(7) var<storage, read_write> out: array<f32>;
$SCALES
const NONE = -3.0e38;
var<workgroup> query: array<f32, 1032>;
var<workgroup> partial: array<f32, 128>;
var<workgroup> scores: array<f32, 32>;
var<workgroup> weights: array<f32, 32>;
$SPLIT
$CAP
@compute @workgroup_size(128)
fn main(@builtin(workgroup_id) id: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let head = id.x;
    let row = args.row + id.y;
    let kv_head = kv_of[head];
    let position = tables[args.table + row * 4u];
    let blocks = args.blocks + tables[args.table + row * 4u + 1u];
    let visible = first_visible(position);
    var start = visible;
    var end = position + 1u;
    if (args.after > 0u) { end = min(position + args.after, args.newest) + 1u; }
    if (args.splits > 0u) {
        let size = tokens_of_split(visible, end);
        let split = visible / size + id.z;
        start = max(visible, split * size);
        end = min(end, (split + 1u) * size);
    }
    let padded = (args.first_dim + 3u) / 4u * 4u;
    for (var i = thread; i < 1032u; i += 128u) { query[i] = 0.0; }
    workgroupBarrier();
    $QUERY
    workgroupBarrier();

    var most = NONE;
    var total = 0.0;
    $ZERO
    for (var chunk = start / 32u; chunk * 32u < end; chunk++) {
        let vector = (tables[blocks + chunk] * args.kv_heads + kv_head) * 32u;
        let token = vector + thread / 4u;
        $SCORE
        workgroupBarrier();
        let source = max(start, chunk * 32u) - chunk * 32u;
        let to = min(end - chunk * 32u, 32u);
        if (thread < 32u) {
            let t = thread * 4u;
            var score = (partial[t] + partial[t + 1u]) + (partial[t + 2u] + partial[t + 3u]);
            if (args.cap > 0.0) { score = capped(score); }
            scores[thread] = select(NONE, score, thread >= source && thread < to);
        }
        workgroupBarrier();
        var best = most;
        for (var t = source; t < to; t++) { best = max(best, scores[t]); }
        let shrink = exp(most - best);
        most = best;
        if (thread < 32u) { weights[thread] = exp(scores[thread] - best); }
        workgroupBarrier();
        total *= shrink;
        for (var t = source; t < to; t++) { total += weights[t]; }
        $SHRINK
        for (var t = source; t < to; t++) {
            $VALUE
        }
    }
    if (args.splits > 0u) {
        let at = ((id.y * args.heads + head) * args.splits + id.z) * args.out_stride;
        if (thread == 0u) {
            out[at] = most;
            out[at + 1u] = total;
        }
        $PARTIAL
        return;
    }
    var largest = most;
    if (args.sinks == 1u) { largest = max(most, sinks[head]); }
    let factor = exp(most - largest);
    var sum = fma(total, factor, 0.0);
    if (args.sinks == 1u) { sum += exp(sinks[head] - largest); }
    let at = row * args.out_stride + args.out_first + head * args.out_dim;
    $OUT
}
