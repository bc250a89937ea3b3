// Sets numbers to zero.
struct Args { first: u32, count: u32, groups: u32 }
var<immediate> args: Args;
@group(0) @binding(0) var<storage, read_write> x: array<f32>;
@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) id: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    for (var i = id.x * 256u + thread; i < args.count; i += args.groups * 256u) {
        x[args.first + i] = 0.0;
    }
}
