// Adds the words of each thread's vectors, four loads at a time; the sums keep the loads alive.
struct Args { vectors: u32, stride: u32 }
var<immediate> args: Args;
@group(0) @binding(0) var<storage, read> x: array<vec4<u32>>;
@group(0) @binding(1) var<storage, read_write> out: array<u32>;
@compute @workgroup_size(256)
fn main(@builtin(global_invocation_id) id: vec3<u32>) {
    var sum = vec4<u32>(0u);
    for (var i = id.x; i + 3u * args.stride < args.vectors; i += 4u * args.stride) {
        let a = x[i];
        let b = x[i + args.stride];
        let c = x[i + 2u * args.stride];
        let d = x[i + 3u * args.stride];
        sum += (a + b) + (c + d);
    }
    out[id.x] = sum.x + sum.y + sum.z + sum.w;
}
