// Rows' weighted sums over their experts, whose results lie side by side, in the order of choices.
// Experts without weights on this rank have no results.
struct Args { row: u32, choices: u32, stride: u32, width: u32, pair_stride: u32, out_stride: u32, adds: u32 }
var<immediate> args: Args;
@group(0) @binding(0) var<storage, read> choices: array<f32>;
// Of each expert: the first block, then 0 if it has no weights.
@group(0) @binding(1) var<storage, read> experts: array<vec4<u32>>;
@group(0) @binding(2) var<storage, read> pairs: array<f32>;
@group(0) @binding(3) var<storage, read_write> out: array<f32>;
@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) id: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let column = id.x * 256u + thread;
    if (column >= args.width) { return; }
    let row = args.row + id.y;
    var sum = 0.0;
    for (var choice = 0u; choice < args.choices; choice++) {
        if (experts[u32(choices[row * args.stride + choice])].y == 0u) { continue; }
        let weight = choices[row * args.stride + args.choices + choice];
        sum = fma(weight, pairs[(id.y * args.choices + choice) * args.pair_stride + column], sum);
    }
    let place = row * args.out_stride + column;
    if (args.adds == 1u) { sum += out[place]; }
    out[place] = sum;
}
