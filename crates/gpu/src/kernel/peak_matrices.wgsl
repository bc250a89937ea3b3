// Products of cooperative matrices that wait for nothing but sums eight back: what the device's
// matrix units give. The results keep them alive.
enable f16;
enable wgpu_cooperative_matrix;
struct Args { rounds: u32, factor: f32 }
var<immediate> args: Args;
@group(0) @binding(0) var<storage, read_write> out: array<f32>;
var<workgroup> factors: array<f16, $SIZEu>;
var<workgroup> sums: array<f32, $SIZEu * 8u>;
@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) id: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    for (var i = thread; i < $SIZEu; i += 256u) { factors[i] = f16(args.factor * f32(i % 7u)); }
    workgroupBarrier();
    let a = coopLoadT<coop_mat$SIDEx$SIDE<f16, A>>(&factors[0], $SIDEu);
    let b = coopLoad<coop_mat$SIDEx$SIDE<f16, B>>(&factors[0], $SIDEu);
    $STATE
    for (var round = 0u; round < args.rounds; round++) {
        $ROUND
    }
    var sum = 0.0;
    $STORE
    out[id.x * 256u + thread] = sum;
}
