// Heads of rows before attention: queries are normed, rotated and scaled in place; keys are normed,
// rotated and go to the cache, as values do. A workgroup has a query, a key or a value of a row.
struct Args {
    row: u32, stride: u32, heads: u32, kv_heads: u32,
    key_dim: u32, value_dim: u32, key_words: u32, value_words: u32,
    norm: u32, eps: f32, pairs: u32, interleaved: u32,
    rotations: u32, table: u32, blocks: u32, scale: f32,
    beta: f32, original: u32,
}
var<immediate> args: Args;
// Of each row: position, first block of its sequence in the table of blocks, slot, its sequence's first row.
@group(0) @binding(0) var<storage, read> tables: array<u32>;
@group(0) @binding(1) var<storage, read> rotations: array<vec2<f32>>;
@group(0) @binding(2) var<storage, read> query_norm: array<f32>;
@group(0) @binding(3) var<storage, read> key_norm: array<f32>;
@group(0) @binding(4) var<storage, read_write> x: array<f32>;
@group(0) @binding(5) var<storage, read_write> keys: array<u32>;
@group(0) @binding(6) var<storage, read_write> values: array<u32>;
$SCALES
var<workgroup> head: array<f32, 1024>;
var<workgroup> sums: array<f32, 64>;
var<workgroup> most: array<u32, 64>;
@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) id: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let row = args.row + id.x;
    let keyed = args.heads + args.kv_heads;
    let is_value = id.y >= keyed;
    let is_query = id.y < args.heads;
    let of_value = args.key_dim * keyed + args.value_dim * (id.y - keyed);
    let source = row * args.stride + select(args.key_dim * id.y, of_value, is_value);
    let width = select(args.key_dim, args.value_dim, is_value);
    let position = tables[args.table + row * 4u];
    let block = tables[args.blocks + tables[args.table + row * 4u + 1u] + position / 32u];
    var sum = 0.0;
    for (var i = thread; i < width; i += 64u) {
        let value = x[source + i];
        head[i] = value;
        sum = fma(value, value, sum);
    }
    if (args.norm == 1u) {
        sums[thread] = sum;
        workgroupBarrier();
        for (var half = 32u; half > 0u; half /= 2u) {
            if (thread < half) { sums[thread] += sums[thread + half]; }
            workgroupBarrier();
        }
        let rms = sqrt(sums[0] / f32(width) + args.eps);
        if (!is_value) {
            for (var i = thread; i < width; i += 64u) {
                head[i] = head[i] / rms * select(key_norm[i], query_norm[i], is_query);
            }
        }
    }
    workgroupBarrier();
    if (!is_value) {
        let rotate_from = 0u;
        $ROTATE
    }
    workgroupBarrier();
    if (is_query) {
        var scale = args.scale;
        if (args.original > 0u) { scale *= 1.0 + args.beta * log(1.0 + f32(position / args.original)); }
        for (var i = thread; i < width; i += 64u) { x[source + i] = head[i] * scale; }
        return;
    }
    let kv_head = select(id.y - args.heads, id.y - keyed, is_value);
    let vector = (block * args.kv_heads + kv_head) * 32u + position % 32u;
    let words = select(args.key_words, args.value_words, is_value);
    $KEEP
}
