// kept[slot][i][column + j] = x[r][j], where r is row i of a sequence's draft.
struct Args {
    first: u32, end: u32, stride: u32, sequences: u32,
    rows: u32, kept_width: u32, column: u32, width: u32,
}
var<immediate> args: Args;
// Of each sequence: first row, end, first position, slot, rows of its draft, right rows of its last
// draft, where its state is read, and where it is written.
@group(0) @binding(0) var<storage, read> sequences: array<u32>;
@group(0) @binding(1) var<storage, read> x: array<f32>;
@group(0) @binding(2) var<storage, read_write> kept: array<f32>;
@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) id: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let at = args.sequences + id.y * 8u;
    let j = id.x * 64u + thread;
    if (j >= args.width || id.z >= sequences[at + 4u]) { return; }
    let row = sequences[at + 1u] - sequences[at + 4u] + id.z;
    if (row < args.first || row >= args.end) { return; }
    let place = (sequences[at + 3u] * args.rows + id.z) * args.kept_width;
    kept[place + args.column + j] = x[row * args.stride + j];
}
