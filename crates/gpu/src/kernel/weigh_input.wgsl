// x[r] *= w, where w is the weight of the row's only choice, which becomes 1.
struct Args { row: u32, stride: u32, width: u32, choices_stride: u32 }
var<immediate> args: Args;
@group(0) @binding(0) var<storage, read_write> choices: array<f32>;
@group(0) @binding(1) var<storage, read_write> x: array<f32>;
@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) id: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let row = args.row + id.x;
    let place = row * args.choices_stride + 1u;
    let weight = choices[place];
    for (var i = thread; i < args.width; i += 256u) { x[row * args.stride + i] *= weight; }
    storageBarrier();
    if (thread == 0u) { choices[place] = 1.0; }
}
