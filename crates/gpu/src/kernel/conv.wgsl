// A short convolution, a token after the other: a thread has a channel of a sequence.
struct Args {
    first: u32, end: u32, stride: u32, out_stride: u32,
    channels: u32, kernel: u32, sequences: u32, slot_numbers: u32,
    biased: u32,
    // Columns of `sequences`: where states are read and written.
    read_at: u32, write_at: u32,
}
var<immediate> args: Args;
// Of each sequence: first row, end, first position, slot, rows of its draft, right rows of its last
// draft, where its state is read, and where it is written.
@group(0) @binding(0) var<storage, read> sequences: array<u32>;
@group(0) @binding(1) var<storage, read> taps: array<f32>;
@group(0) @binding(2) var<storage, read_write> state: array<f32>;
@group(0) @binding(3) var<storage, read_write> x: array<f32>;
$BINDINGS
// The window ends with the last of the taps, so that loops have a constant length. Weights before
// the first tap are zero.
const TAPS = $TAPSu;
var<private> weights: array<f32, $TAPS>;

// Adds an input, and forgets the oldest one.
fn convolve(inputs: ptr<function, array<f32, $TAPS>>, channel: u32, input: f32) -> f32 {
    (*inputs)[TAPS - 1u] = input;
    var sum = 0.0;
    for (var k = 0u; k < TAPS; k++) { sum = fma(weights[k], (*inputs)[k], sum); }
    for (var k = 0u; k + 1u < TAPS; k++) { (*inputs)[k] = (*inputs)[k + 1u]; }
    return $SUM;
}

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) id: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let channel = id.x * 64u + thread;
    let at = args.sequences + id.y * 8u;
    let begin = sequences[at];
    let start = max(begin, args.first);
    let end = min(sequences[at + 1u], args.end);
    if (channel >= args.channels || start >= end) { return; }
    let states = sequences[at + args.write_at] * args.slot_numbers + channel;
    let read_at = select(args.write_at, args.read_at, start == begin);
    let old_states = sequences[at + read_at] * args.slot_numbers + channel;
    let fresh = sequences[at + 2u] + start - begin == 0u;
    let skipped = TAPS - args.kernel;
    var inputs: array<f32, $TAPS>;
    for (var k = 0u; k < TAPS; k++) {
        inputs[k] = 0.0;
        weights[k] = 0.0;
        if (k < skipped) { continue; }
        weights[k] = taps[channel * args.kernel + k - skipped];
        if (k + 1u < TAPS && !fresh) { inputs[k] = state[old_states + (k - skipped) * args.channels]; }
    }
    $BEFORE
    var row = start;
    // Inputs of several rows are read before the first is used: waits for the memory overlap.
    for (; row + 8u <= $CERTAIN; row += 8u) {
        var next: array<f32, 8>;
        for (var i = 0u; i < 8u; i++) {
            let place = (row + i) * args.stride + channel;
            next[i] = $INPUT;
        }
        for (var i = 0u; i < 8u; i++) {
            let place = (row + i) * args.stride + channel;
            let out_row = (row + i) * args.out_stride + channel;
            let result = convolve(&inputs, channel, next[i]);
            $KEEP
        }
    }
    for (; row < $CERTAIN; row++) {
        $ROW
    }
    for (var k = skipped; k + 1u < TAPS; k++) { state[states + (k - skipped) * args.channels] = inputs[k]; }
    $DRAFT
}
