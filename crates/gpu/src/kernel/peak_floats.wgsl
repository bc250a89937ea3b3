// Multiplications and additions of f32 that wait for nothing but sums four back: what the device's
// arithmetic gives. The results keep them alive.
struct Args { rounds: u32, factor: f32 }
var<immediate> args: Args;
@group(0) @binding(0) var<storage, read_write> out: array<f32>;
@compute @workgroup_size(256)
fn main(@builtin(global_invocation_id) id: vec3<u32>) {
    let factor = vec4<f32>(args.factor);
    var a = vec4<f32>(f32(id.x % 7u));
    var b = a + 1.0;
    var c = a + 2.0;
    var d = a + 3.0;
    for (var round = 0u; round < args.rounds; round++) {
        $ROUND
    }
    let sum = (a + b) + (c + d);
    out[id.x] = sum.x + sum.y + sum.z + sum.w;
}
