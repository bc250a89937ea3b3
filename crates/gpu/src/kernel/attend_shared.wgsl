// Attention of up to $HEADS query heads of a row to a split of its tokens, or to all of them: each block
// of 32 tokens' compressed vectors, which are keys and values, is read once for all heads. Results
// are each split's maximum, sum of weights and weighted vectors.
struct Args {
    row: u32, splits: u32, heads: u32, part_stride: u32,
    // In quads, of both parts of queries.
    first_stride: u32, first_of_head: u32, second_stride: u32, second_first: u32,
    second_of_head: u32, first_units: u32, second_units: u32, table: u32,
    blocks: u32, whole: u32, selection_stride: u32, window: u32,
    every: u32, selects: u32,
}
var<immediate> args: Args;
@group(0) @binding(0) var<storage, read> tables: array<u32>;
@group(0) @binding(1) var<storage, read> queries: array<vec4<f32>>;
$BINDINGS
$MEMORY
// Where the caches have the block's tokens.
var<workgroup> places: array<u32, 32>;
$SPLIT
$PLACE
@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) id: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let head = id.x * $HEADSu;
    let row = args.row + id.y;
    let blocks = args.blocks + tables[args.table + row * 4u + 1u];
    $COUNT
    let size = select(tokens_of_split(0u, count), count, args.whole == 1u);
    let start = id.z * size;
    let end = min(count, start + size);
    // A head's parts are next to each other.
    let part = (id.y * args.heads + head) * args.splits + id.z;
$PLACES    $STATE
    for (var begin = start; begin < end; begin += 32u) {
        if (thread < 32u) {
            let number = min(begin + thread, end - 1u);
            $FIND
        }
        workgroupBarrier();
$BLOCK    }
    if (column == 0u && mine < $HEADSu && head + mine < args.heads) {
        let at = (part + mine * args.splits) * args.part_stride;
        parts[at] = most;
        parts[at + 1u] = total;
    }
    $SUMS
}
