// A short convolution, a token after the other: a thread has a channel of a sequence.
struct Args {
    first: u32, end: u32, stride: u32, out_stride: u32,
    channels: u32, kernel: u32, sequences: u32, slot_numbers: u32,
    biased: u32,
}
var<immediate> args: Args;
// Of each sequence: first row, end, first position, slot, rows of its draft, right rows of its last
// draft.
@group(0) @binding(0) var<storage, read> sequences: array<u32>;
@group(0) @binding(1) var<storage, read> taps: array<f32>;
@group(0) @binding(2) var<storage, read_write> state: array<f32>;
@group(0) @binding(3) var<storage, read_write> x: array<f32>;
$BINDINGS
// Adds an input, and forgets the oldest one.
fn convolve(inputs: ptr<function, array<f32, 16>>, channel: u32, input: f32) -> f32 {
    (*inputs)[args.kernel - 1u] = input;
    var sum = 0.0;
    for (var k = 0u; k < args.kernel; k++) { sum = fma(taps[channel * args.kernel + k], (*inputs)[k], sum); }
    for (var k = 0u; k + 1u < args.kernel; k++) { (*inputs)[k] = (*inputs)[k + 1u]; }
    return $SUM;
}

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) id: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let channel = id.x * 64u + thread;
    let at = args.sequences + id.y * 6u;
    let begin = sequences[at];
    let start = max(begin, args.first);
    let end = min(sequences[at + 1u], args.end);
    if (channel >= args.channels || start >= end) { return; }
    let states = sequences[at + 3u] * args.slot_numbers + channel;
    var inputs: array<f32, 16>;
    for (var k = 0u; k + 1u < args.kernel; k++) {
        inputs[k] = state[states + k * args.channels];
        if (sequences[at + 2u] + start - begin == 0u) { inputs[k] = 0.0; }
    }
    $BEFORE
    for (var row = start; row < $CERTAIN; row++) {
        let place = row * args.stride + channel;
        $ROW
    }
    for (var k = 0u; k + 1u < args.kernel; k++) { state[states + k * args.channels] = inputs[k]; }
    $DRAFT
}
