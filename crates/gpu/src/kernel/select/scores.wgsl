// Scores of 32 keys for a row: the weighted sum over an indexer's heads of the positive products of
// its queries with the key. Each of 8 warps has some heads, four at a time.
struct Args {
    row: u32, q_stride: u32, w_stride: u32, heads: u32,
    first_dim: u32, second_dim: u32, first_words: u32, second_words: u32,
    table: u32, blocks: u32, every: u32, chosen: u32,
    score_stride: u32,
}
var<immediate> args: Args;
@group(0) @binding(0) var<storage, read> tables: array<u32>;
@group(0) @binding(1) var<storage, read> queries: array<vec4<f32>>;
@group(0) @binding(2) var<storage, read> head_weights: array<f32>;
@group(0) @binding(3) var<storage, read> first: array<u32>;
@group(0) @binding(4) var<storage, read> second: array<u32>;
@group(0) @binding(5) var<storage, read_write> scores: array<f32>;
$SCALES
const PITCH = $PITCHu;
var<workgroup> keys: array<f32, 32u * PITCH>;
var<workgroup> sums: array<f32, 256>;
$PLACE
@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) id: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let row = args.row + id.y;
    let visible = (tables[args.table + row * 4u] + 1u) / args.every;
    let key = thread % 32u;
    let number = id.x * 32u + key;
    // All keys are selected, or none of these is visible.
    if (visible <= args.chosen || id.x * 32u >= visible) { return; }
    let blocks = args.blocks + tables[args.table + row * 4u + 1u];
    let vector = place_of(min(number, visible - 1u), args.every, blocks);
    $KEEP
    workgroupBarrier();
    let dim = args.first_dim + args.second_dim;
    let source = row * args.q_stride;
    var sum = 0.0;
    for (var head = thread / 32u * 4u; head < args.heads; head += 32u) {
        let last = args.heads - 1u;
        let q0 = (source + head * dim) / 4u;
        let q1 = (source + min(head + 1u, last) * dim) / 4u;
        let q2 = (source + min(head + 2u, last) * dim) / 4u;
        let q3 = (source + min(head + 3u, last) * dim) / 4u;
        var products = vec4<f32>(0.0);
        for (var d = 0u; d < dim / 4u; d++) {
            let at = key * PITCH + 4u * d;
            let k = vec4<f32>(keys[at], keys[at + 1u], keys[at + 2u], keys[at + 3u]);
            products += vec4<f32>(
                dot(queries[q0 + d], k), dot(queries[q1 + d], k), dot(queries[q2 + d], k), dot(queries[q3 + d], k)
            );
        }
        for (var i = 0u; i < 4u; i++) {
            if (head + i < args.heads) {
                sum = fma(head_weights[row * args.w_stride + head + i], max(products[i], 0.0), sum);
            }
        }
    }
    sums[thread] = sum;
    workgroupBarrier();
    if (thread < 32u && number < visible) {
        var all = 0.0;
        for (var i = 0u; i < 8u; i++) { all += sums[i * 32u + thread]; }
        scores[id.y * args.score_stride + number] = all;
    }
}
