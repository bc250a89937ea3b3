struct Args {
    row: u32, q_stride: u32, q_first: u32, q_head_stride: u32,
    first_dim: u32, second_dim: u32, first_words: u32, second_words: u32,
    table: u32, blocks: u32, heads: u32, splits: u32,
    absorbed_stride: u32, selection_stride: u32, part_stride: u32, whole: u32,
}
var<immediate> args: Args;
@group(0) @binding(0) var<storage, read> tables: array<u32>;
@group(0) @binding(1) var<storage, read> queries: array<f32>;
@group(0) @binding(2) var<storage, read> absorbed: array<f32>;
@group(0) @binding(3) var<storage, read> selection: array<f32>;
// Compressed vectors and rotated parts.
@group(0) @binding(4) var<storage, read> first: array<u32>;
@group(0) @binding(5) var<storage, read> second: array<u32>;
@group(0) @binding(6) var<storage, read_write> parts: array<f32>;
$SCALES
