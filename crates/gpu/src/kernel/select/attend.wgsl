// Attention of a query head of a row to the tokens of a list, or to a split of them: the maximum,
// the sum of weights, and weighted vectors.
$MEMORY
const NONE = -3.0e38;
var<workgroup> query: array<f32, 1032>;
var<workgroup> places: array<u32, 32>;
var<workgroup> partial: array<f32, 128>;
var<workgroup> scores: array<f32, 32>;
var<workgroup> weights: array<f32, 32>;
$SPLIT
$PLACE
@compute @workgroup_size(128)
fn main(@builtin(workgroup_id) id: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let head = id.x;
    let row = args.row + id.y;
    let blocks = args.blocks + tables[args.table + row * 4u + 1u];
    let list = row * args.selection_stride;
    $COUNT
    let size = select(tokens_of_split(0u, count), count, args.whole == 1u);
    let start = id.z * size;
    let end = min(count, start + size);
    let at = ((id.y * args.heads + head) * args.splits + id.z) * args.part_stride;
    if (start >= end) {
        if (thread == 0u) {
            parts[at] = NONE;
            parts[at + 1u] = 0.0;
        }
        return;
    }
    let padded = (args.first_dim + 3u) / 4u * 4u;
    for (var i = thread; i < 1032u; i += 128u) { query[i] = 0.0; }
    workgroupBarrier();
    $QUERY

    var most = NONE;
    var total = 0.0;
    $ZERO
    for (var begin = start; begin < end; begin += 32u) {
        let tokens = min(end - begin, 32u);
        if (thread < 32u) {
            let number = min(begin + thread, end - 1u);
            $FIND
        }
        workgroupBarrier();
        {
            let number = begin + thread / 4u;
            let token = places[thread / 4u];
            var score = 0.0;
            $SCORE
            partial[thread] = score;
        }
        workgroupBarrier();
        if (thread < 32u) {
            let t = thread * 4u;
            let score = (partial[t] + partial[t + 1u]) + (partial[t + 2u] + partial[t + 3u]);
            scores[thread] = select(NONE, score, thread < tokens);
        }
        workgroupBarrier();
        var best = most;
        for (var t = 0u; t < tokens; t++) { best = max(best, scores[t]); }
        let shrink = exp(most - best);
        most = best;
        if (thread < 32u) { weights[thread] = exp(scores[thread] - best); }
        workgroupBarrier();
        total *= shrink;
        for (var t = 0u; t < tokens; t++) { total += weights[t]; }
        $SHRINK
        for (var t = 0u; t < tokens; t++) {
            let number = begin + t;
            let token = places[t];
            $VALUE
        }
        workgroupBarrier();
    }
    if (thread == 0u) {
        parts[at] = most;
        parts[at + 1u] = total;
    }
    $STORE
}
