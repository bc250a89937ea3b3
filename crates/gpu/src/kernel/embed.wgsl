// out[r] = scale * table[ids[r] - first] for the rows that this chunk of the table has; zero where
// the whole table does not hold the id.
struct Args {
    blocks: u32, shift: u32, table: u32, count: u32,
    first: u32, rows: u32, chunk: u32, chunk_rows: u32,
    width: u32, stride: u32, scale: f32,
}
var<immediate> args: Args;
@group(0) @binding($IDS) var<storage, read> ids: array<u32>;
@group(0) @binding($OUT) var<storage, read_write> out: array<f32>;
$DECLARE
fn store(at: u32, column: u32, value: vec4<f32>) {
    for (var i = 0u; i < 4u; i++) {
        if (column + i < args.width) { out[at + column + i] = value[i] * args.scale; }
    }
}
@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) id: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let row = ids[args.table + id.x] - args.first;
    let at = id.x * args.stride;
    for (var b = thread; b < args.blocks; b += 64u) {
        if (row >= args.rows) {
            for (var q = 0u; q < 8u; q++) { store(at, b * 32u + q * 4u, vec4<f32>(0.0)); }
        } else if (row - args.chunk < args.chunk_rows) {
            let block = (row - args.chunk) * args.blocks + b;
            $STORE
        }
    }
}
