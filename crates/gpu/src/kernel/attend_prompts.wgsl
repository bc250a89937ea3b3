// What a kernel of prompts' attention is told.
struct Args {
    q_stride: u32, key_units: u32, value_units: u32, out_stride: u32,
    out_first: u32, out_dim: u32, kv_heads: u32, blocks: u32,
    window: u32, tiles: u32, count: u32, source: u32,
    end: u32, sinks: u32, chunk: u32, cap: f32,
    // Later tokens that a token attends to.
    after: u32,
    $MORE
}
var<immediate> args: Args;
// Of each tile: first row, rows, its position, first block in the table of blocks, position of the
// sequence's last token.
@group(0) @binding(0) var<storage, read> tables: array<u32>;
@group(0) @binding(1) var<storage, read> queries: array<vec4<f32>>;
// The KV head of each query head.
@group(0) @binding(2) var<storage, read> kv_of: array<u32>;
@group(0) @binding(3) var<storage, read> sinks: array<f32>;
@group(0) @binding(4) var<storage, read> keys: array<$ELEMENT>;
@group(0) @binding(5) var<storage, read> values: array<$ELEMENT>;
@group(0) @binding(6) var<storage, read_write> out: array<f32>;
$SCALES$VISIBLE$CAP