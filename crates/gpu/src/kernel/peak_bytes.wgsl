// Dot products of four bytes whose sums wait for nothing but themselves: what the device's integer
// arithmetic gives. The results keep them alive.
struct Args { rounds: u32, factor: u32 }
var<immediate> args: Args;
@group(0) @binding(0) var<storage, read_write> out: array<f32>;
@compute @workgroup_size(256)
fn main(@builtin(global_invocation_id) id: vec3<u32>) {
    $START
    for (var round = 0u; round < args.rounds; round++) {
        $ROUND
    }
    out[id.x] = f32($TOTAL);
}
