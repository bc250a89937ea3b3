// Adds the pieces of all ranks' partial sums, in rank order, and stores this rank's next piece in
// memory of the host, where all ranks' devices read it. This rank's own piece is read where it is.
struct Args {
    first: u32, quads: u32, slot: u32, next_first: u32, next_quads: u32, next_place: u32,
    groups: u32, of_rank: u32, width: u32, stride: u32
}
var<immediate> args: Args;
@group(0) @binding(0) var<storage, $ACCESS> x: array<vec4<f32>>;
@group(0) @binding(1) var<storage, read_write> pieces: array<vec4<f32>>;
$ROWS
@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) id: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let quads = max(args.quads, args.next_quads);
    for (var i = id.x * 256u + thread; i < quads; i += args.groups * 256u) {
        // Both at once, because the bus carries both directions at once.
        if (i < args.next_quads) { pieces[args.next_place + i] = x[args.next_first + i]; }
        if (i < args.quads) {
            let at = args.first + i;
            let column = vec4<u32>(4u * at % args.stride) + vec4<u32>(0u, 1u, 2u, 3u);
            // Padding is not summed.
            let sum = select(vec4<f32>(), $SUM, column < vec4<u32>(args.width));
            $TAKE
        }
    }
}
