// Attention of all query heads of a KV head to splits of a row's tokens: keys and values are read
// once for all of them. A workgroup visits TOKENS tokens at a time; its results are each split's
// maximum, sum and weighted values of each head. Where there are many rows, it has several splits,
// one after the other.
//
// A unit is 8 numbers of a vector. Eight threads score a token. Values go through workgroup memory:
// a thread adds the same columns of some tokens, and then the sums of all tokens of its head, always in
// the same order.
struct Args {
    row: u32, x_stride: u32, key_dim: u32, value_dim: u32,
    heads: u32, kv_heads: u32, splits: u32, table: u32,
    blocks: u32, window: u32, flags: u32, eps: f32,
    pairs: u32, rotations: u32, scale: f32, beta: f32,
    original: u32, out_stride: u32, out_first: u32, x_blocks: u32,
    chain: u32, chunk: u32, cap: f32,
}
var<immediate> args: Args;
// Of each row: position, first block of its sequence in the table of blocks, slot, its sequence's first row.
@group(0) @binding(0) var<storage, read> tables: array<u32>;
// Queries, keys and values of rows.
@group(0) @binding(1) var<storage, read> x: array<f32>;
// KV head, first query head, number of query heads.
@group(0) @binding(2) var<storage, read> groups: array<vec4<u32>>;
@group(0) @binding(3) var<storage, $CACHE> keys: array<$UNIT>;
@group(0) @binding(4) var<storage, $CACHE> values: array<$UNIT>;
@group(0) @binding(5) var<storage, read_write> parts: array<$PART>;
$BINDINGS
// Flags: queries and keys are not prepared, and the cache lacks the rows' own; they have norms; pairs
// are neighbours; there are sinks; results are left as levels.
const PREPARES = 1u;
const NORMS = 2u;
const NEIGHBOURS = 4u;
const SINKS = 8u;
const LEAVES = 16u;
const NONE = -3.0e38;
const HEADS = $HEADSu;
const UNITS = $UNITSu;
const TOKENS = $TOKENSu;
// From a lane's scores to the next lane's, so that threads write to different banks.
const LANE = HEADS * TOKENS + 4u;
// Queries of the heads, then the row's own key. At the end, results.
var<workgroup> query: array<vec4<f32>, (HEADS + 1u) * UNITS * 2u>;
// Lanes' shares of scores, then the tokens' values as the cache has them, then threads' sums of them.
var<workgroup> pool: array<vec4<u32>, $POOLu>;
// 64 of a head: scores of tokens, and at the end maxima of splits.
var<workgroup> scores: array<vec4<f32>, (HEADS + 1u) * 16u>;
var<workgroup> weights: array<vec4<f32>, HEADS * 16u>;
var<workgroup> tops: array<f32, HEADS>;
$MEMORY
$SPLIT
$CAP
@compute @workgroup_size(256)
fn main(
    @builtin(workgroup_id) id: vec3<u32>,
    @builtin(num_workgroups) workgroups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let group = groups[id.x];
    let row = args.row + id.y;
    let position = tables[args.table + row * 4u];
    let blocks = args.blocks + tables[args.table + row * 4u + 1u];
    let all = position + 1u;
    let visible = first_visible(position);
    let size = tokens_of_split(visible, all);
    // Splits of the row before this one's, and behind this workgroup's.
    let first_part = id.z * args.chain;
    let parts_end = min(first_part + args.chain, (all - 1u) / size + 1u - visible / size);
    if (first_part >= parts_end) { return; }
    var part = first_part;
    var start = max(visible, (visible / size + part) * size);
    var end = min(all, (visible / size + part + 1u) * size);
    let prepares = (args.flags & PREPARES) != 0u;
    // The row's own token is in one of these splits, and not yet in the cache.
    let fresh = prepares && (visible / size + parts_end) * size >= all;
    // What is masked or not in the cache reads a token that is.
    var last = select(end, max(end - 1u, start + 1u), fresh && end == all) - 1u;
    let lane = thread % 8u;
    let unit = thread % UNITS;
    let key_units = args.key_dim / 8u;
    let value_units = args.value_dim / 8u;
    let value_unit = min(unit, value_units - 1u);
    var base = start / 32u * 32u;
    $VARIABLES
    $LOAD
    $QUERY
    $STATE
    loop {
        $FRESH
        $SCORE
        workgroupBarrier();
        $SUM
        workgroupBarrier();
        $KEEP
        base += TOKENS;
        let is_complete = base >= end;
        let goes_on = !is_complete || part + 1u < parts_end;
        if (is_complete && goes_on) {
            start = end;
            end = min(all, end + size);
            base = start / 32u * 32u;
            last = select(end, max(end - 1u, start + 1u), fresh && end == all) - 1u;
        }
        // Not in a branch, because compilers wait for loads where a branch ends. After the last
        // split, all threads read a token of it again.
        $LOAD
        $WEIGHT
        workgroupBarrier();
        $VALUE
        if (is_complete) {
            $STORE
            part++;
        }
        if (!goes_on) { break; }
        workgroupBarrier();
    }
    $FINISH
}
