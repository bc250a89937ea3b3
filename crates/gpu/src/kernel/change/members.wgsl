// The tokens of selected compressed tokens, `every` each, then the last tokens, which are not
// compressed yet. A workgroup has a row: a number, and as many positions.
struct Args { row: u32, x_stride: u32, out_stride: u32, width: u32, every: u32, table: u32 }
var<immediate> args: Args;
// The position of each row.
@group(0) @binding(0) var<storage, read> positions: array<u32>;
@group(0) @binding(1) var<storage, read> compressed: array<f32>;
@group(0) @binding(2) var<storage, read_write> selection: array<f32>;
@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) id: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let row = args.row + id.x;
    let visible = positions[args.table + id.x] + 1u;
    let source = row * args.x_stride;
    let to = row * args.out_stride;
    let members = u32(compressed[source]) * args.every;
    let rest = visible % args.every;
    let count = min(members + rest, args.width - 1u);
    if (thread == 0u) { selection[to] = f32(count); }
    for (var i = thread; i < count; i += 256u) {
        var position = visible - rest + i - members;
        if (i < members) {
            position = u32(compressed[source + 1u + i / args.every]) * args.every + i % args.every;
        }
        selection[to + 1u + i] = f32(position);
    }
}
