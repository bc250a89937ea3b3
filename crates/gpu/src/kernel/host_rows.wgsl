// Copies rows to memory that the host sees, or from there. Rows have no padding there.
struct Args { first: u32, count: u32, width: u32, stride: u32, groups: u32 }
var<immediate> args: Args;
@group(0) @binding(0) var<storage, $ACCESS> x: array<f32>;
@group(0) @binding(1) var<storage, read_write> host: array<f32>;
@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) id: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    for (var i = id.x * 256u + thread; i < args.count; i += args.groups * 256u) {
        let column = i % args.stride;
        let there = i / args.stride * args.width + column;
        $COPY
    }
}
