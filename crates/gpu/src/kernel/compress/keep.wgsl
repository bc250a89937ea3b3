// Keeps values and gates of rows in their sequences' states: of the rows that share a place in the
// state, the last one.
struct Args {
    row: u32, end: u32, values_stride: u32, gates_stride: u32,
    table: u32, width: u32, every: u32, slots: u32,
    numbers: u32,
}
var<immediate> args: Args;
@group(0) @binding(0) var<storage, read> tables: array<u32>;
@group(0) @binding(1) var<storage, read> values: array<f32>;
@group(0) @binding(2) var<storage, read> gates: array<f32>;
@group(0) @binding(3) var<storage, read> place_bias: array<f32>;
@group(0) @binding(4) var<storage, read_write> state: array<f32>;
@compute @workgroup_size(128)
fn main(@builtin(workgroup_id) id: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let row = args.row + id.y;
    let c = id.x * 128u + thread;
    let at = args.table + row * 4u;
    let later = row + args.slots;
    var is_last = true;
    if (later < args.end) { is_last = tables[args.table + later * 4u + 3u] != tables[at + 3u]; }
    if (c < args.width && is_last) {
        let position = tables[at];
        let to = tables[at + 2u] * args.numbers + position % args.slots * 2u * args.width + c;
        state[to] = values[row * args.values_stride + c];
        state[to + args.width] = gates[row * args.gates_stride + c] + place_bias[position % args.every * args.width + c];
    }
}
