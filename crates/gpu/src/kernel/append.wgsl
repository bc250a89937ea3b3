// Rows' vectors to a cache of blocks: [block][head][32 tokens][words], or only those of every few
// tokens. A workgroup has a vector.
struct Args {
    row: u32, stride: u32, first: u32, width: u32, heads: u32, words: u32, table: u32, blocks: u32, every: u32,
}
var<immediate> args: Args;
@group(0) @binding(0) var<storage, read> tables: array<u32>;
@group(0) @binding(1) var<storage, read> x: array<f32>;
@group(0) @binding(2) var<storage, read_write> cache: array<u32>;
$SCALES
var<workgroup> most: array<u32, 64>;
@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) id: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let row = args.row + id.x;
    let source = row * args.stride + args.first + id.y * args.width;
    let position = tables[args.table + row * 4u];
    let block = tables[args.blocks + tables[args.table + row * 4u + 1u] + position / 32u];
    if ((position + 1u) % args.every != 0u) { return; }
    let vectors = max(32u / args.every, 1u);
    let vector = (block * args.heads + id.y) * vectors + position % 32u / args.every;
    let width = args.width;
    let words = args.words;
    $KEEP
}
