// Attention of all query heads of a KV head to a split of a row's tokens: keys and values are read
// once for all of them. A workgroup visits 64 tokens at a time; its results are the split's maximum,
// sum and weighted values of each head.
//
// A unit is 8 numbers of a vector. Eight threads score two tokens; then a thread adds one unit of the
// values of a few tokens.
struct Args {
    row: u32, q_stride: u32, key_units: u32, value_units: u32,
    out_dim: u32, kv_heads: u32, heads: u32, splits: u32,
    table: u32, blocks: u32, window: u32,
}
var<immediate> args: Args;
@group(0) @binding(0) var<storage, read> tables: array<u32>;
@group(0) @binding(1) var<storage, read> queries: array<vec4<f32>>;
// KV head, first query head, number of query heads.
@group(0) @binding(2) var<storage, read> groups: array<vec4<u32>>;
@group(0) @binding(3) var<storage, read> keys: array<$UNIT>;
@group(0) @binding(4) var<storage, read> values: array<$UNIT>;
@group(0) @binding(5) var<storage, read_write> parts: array<f32>;
$SCALES
const NONE = -3.0e38;
const HEADS = $HEADSu;
const UNITS = $UNITSu;
// From a lane's scores to the next lane's, so that threads write to different banks.
const LANE = HEADS * 64u + 4u;
// From a component of weighted values to the next.
const PITCH = 260u;
var<workgroup> query: array<vec4<f32>, HEADS * UNITS * 2u>;
// Lanes' shares of scores; at the end, threads' weighted values.
var<workgroup> pool: array<f32, $POOLu>;
// Scores of the tokens, then weights.
var<workgroup> scores: array<f32, HEADS * 64u>;
var<workgroup> best: array<f32, HEADS * 8u>;
$SPLIT
@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) id: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let group = groups[id.x];
    let row = args.row + id.y;
    let all = tables[args.table + row * 4u] + 1u;
    let blocks = args.blocks + tables[args.table + row * 4u + 1u];
    let visible = select(0u, max(all, args.window) - args.window, args.window > 0u);
    let size = tokens_of_split(visible, all);
    let split = visible / size + id.z;
    let start = max(visible, split * size);
    let end = min(all, (split + 1u) * size);
    if (start >= end) { return; }
    for (var i = thread; i < HEADS * UNITS * 2u; i += 256u) {
        let head = group.y + min(i / (UNITS * 2u), group.z - 1u);
        let quad = i % (UNITS * 2u);
        let place = row * args.q_stride + head * args.key_units * 2u + min(quad, args.key_units * 2u - 1u);
        query[i] = select(vec4<f32>(0.0), queries[place], quad < args.key_units * 2u);
    }
    workgroupBarrier();
    let lane = thread % 8u;
    let unit = thread % UNITS;
    let value_unit = min(unit, args.value_units - 1u);
    $STATE
    for (var base = start / 32u * 32u; base < end; base += 64u) {
        // What is masked reads a token that is not.
        let even = (tables[blocks + base / 32u] * args.kv_heads + group.x) * 32u;
        let odd = (tables[blocks + min(base / 32u + 1u, (end - 1u) / 32u)] * args.kv_heads + group.x) * 32u;
        $LOAD
        $SCORE
        workgroupBarrier();
        if (thread < HEADS * 8u) {
            let head = thread / 8u * 64u;
            var most = NONE;
            for (var n = 0u; n < 8u; n++) {
                let i = thread % 8u + n * 8u;
                let at = head + i;
                let low = (pool[at] + pool[LANE + at]) + (pool[2u * LANE + at] + pool[3u * LANE + at]);
                let high = (pool[4u * LANE + at] + pool[5u * LANE + at]) + (pool[6u * LANE + at] + pool[7u * LANE + at]);
                let score = low + high;
                let masked = select(NONE, score, base + i >= start && base + i < end);
                scores[at] = masked;
                most = max(most, masked);
            }
            best[thread] = most;
        }
        workgroupBarrier();
        $WEIGHT
        workgroupBarrier();
        $VALUE
    }
    $FINISH
}
