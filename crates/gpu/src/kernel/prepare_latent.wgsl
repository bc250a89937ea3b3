// Rows before latent attention: the last columns of queries are rotated, and queries scaled, in place.
// Compressed vectors are normed, their rotated parts rotated, and both go to the cache. A workgroup
// has a head's query, or after the last head a row's compressed vector.
struct Args {
    row: u32, query_stride: u32, heads: u32, query_dim: u32,
    plain: u32, scale: f32, latent_stride: u32, rank: u32,
    rotated: u32, eps: f32, pairs: u32, interleaved: u32,
    rotations: u32, table: u32, blocks: u32, compressed_words: u32,
    turned_words: u32,
}
var<immediate> args: Args;
// Of each row: position, first block of its sequence in the table of blocks, slot, its sequence's first row.
@group(0) @binding(0) var<storage, read> tables: array<u32>;
@group(0) @binding(1) var<storage, read> rotations: array<vec2<f32>>;
@group(0) @binding(2) var<storage, read> weight: array<f32>;
@group(0) @binding(3) var<storage, read_write> queries: array<f32>;
@group(0) @binding(4) var<storage, read> latent: array<f32>;
@group(0) @binding(5) var<storage, read_write> compressed: array<u32>;
@group(0) @binding(6) var<storage, read_write> turned: array<u32>;
$SCALES
var<workgroup> head: array<f32, 1024>;
var<workgroup> sums: array<f32, 64>;
var<workgroup> most: array<u32, 64>;
@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) id: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let row = args.row + id.x;
    let is_query = id.y < args.heads;
    let query = row * args.query_stride + id.y * args.query_dim;
    let columns = select(args.rank + args.rotated, args.query_dim, is_query);
    var sum = 0.0;
    for (var i = thread; i < columns; i += 64u) {
        var value = 0.0;
        if (is_query) { value = queries[query + i]; } else { value = latent[row * args.latent_stride + i]; }
        head[i] = value;
        if (i < args.rank) { sum = fma(value, value, sum); }
    }
    sums[thread] = sum;
    workgroupBarrier();
    for (var half = 32u; half > 0u; half /= 2u) {
        if (thread < half) { sums[thread] += sums[thread + half]; }
        workgroupBarrier();
    }
    if (!is_query) {
        let rms = sqrt(sums[0] / f32(args.rank) + args.eps);
        for (var i = thread; i < args.rank; i += 64u) { head[i] = head[i] / rms * weight[i]; }
    }
    workgroupBarrier();
    let rotate_from = select(args.rank, args.plain, is_query);
    $ROTATE
    workgroupBarrier();
    if (is_query) {
        for (var i = thread; i < columns; i += 64u) { queries[query + i] = head[i] * args.scale; }
        return;
    }
    let position = tables[args.table + row * 4u];
    let block = tables[args.blocks + tables[args.table + row * 4u + 1u] + position / 32u];
    let vector = block * 32u + position % 32u;
    {
        let width = args.rank;
        let words = args.compressed_words;
        $KEEP_COMPRESSED
    }
    workgroupBarrier();
    {
        let width = args.rotated;
        let words = args.turned_words;
        $KEEP_TURNED
    }
}
