// Multiplies the weights of chosen experts with factors, one for each expert. A workgroup has a
// row.
struct Args { row: u32, stride: u32, choices: u32, table: u32, experts: u32 }
var<immediate> args: Args;
@group(0) @binding(0) var<storage, read> factors: array<u32>;
@group(0) @binding(1) var<storage, read_write> choices: array<f32>;
@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) id: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let at = (args.row + id.x) * args.stride;
    for (var i = thread; i < args.choices; i += 64u) {
        let expert = u32(choices[at + i]);
        if (expert < args.experts) {
            choices[at + args.choices + i] *= bitcast<f32>(factors[args.table + expert]);
        }
    }
}
