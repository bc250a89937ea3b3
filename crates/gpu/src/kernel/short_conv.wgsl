// The short convolution, in place, a token after the other: a thread has a channel of a sequence.
struct Args {
    first: u32, end: u32, stride: u32, channels: u32,
    kernel: u32, sequences: u32, slot_numbers: u32, biased: u32,
}
var<immediate> args: Args;
// Of each sequence: first row, end, first position, slot.
@group(0) @binding(0) var<storage, read> sequences: array<u32>;
@group(0) @binding(1) var<storage, read> taps: array<f32>;
@group(0) @binding(2) var<storage, read> biases: array<f32>;
@group(0) @binding(3) var<storage, read_write> state: array<f32>;
@group(0) @binding(4) var<storage, read_write> x: array<f32>;
@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) id: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let channel = id.x * 64u + thread;
    let at = args.sequences + id.y * 4u;
    let begin = sequences[at];
    let start = max(begin, args.first);
    let end = min(sequences[at + 1u], args.end);
    if (channel >= args.channels || start >= end) { return; }
    let kept = sequences[at + 3u] * args.slot_numbers + channel;
    var inputs: array<f32, 16>;
    for (var k = 0u; k + 1u < args.kernel; k++) {
        inputs[k] = state[kept + k * args.channels];
        if (sequences[at + 2u] + start - begin == 0u) { inputs[k] = 0.0; }
    }
    var bias = 0.0;
    if (args.biased == 1u) { bias = biases[channel]; }
    for (var row = start; row < end; row++) {
        let place = row * args.stride + channel;
        inputs[args.kernel - 1u] = x[place];
        var sum = 0.0;
        for (var k = 0u; k < args.kernel; k++) { sum = fma(taps[channel * args.kernel + k], inputs[k], sum); }
        sum += bias;
        x[place] = sum / (1.0 + exp(-sum));
        for (var k = 0u; k + 1u < args.kernel; k++) { inputs[k] = inputs[k + 1u]; }
    }
    for (var k = 0u; k + 1u < args.kernel; k++) { state[kept + k * args.channels] = inputs[k]; }
}
