// A short convolution, a token after the other. args.segments threads have a channel of a sequence,
// and of its rows a part each.
struct Args {
    first: u32, end: u32, stride: u32, out_stride: u32,
    channels: u32, kernel: u32, sequences: u32, slot_numbers: u32,
    biased: u32,
    // Columns of `sequences`: where states are read and written.
    read_at: u32, write_at: u32,
    // Threads that share the rows of a channel; 1 if sequences have drafts.
    segments: u32,
}
var<immediate> args: Args;
// Of each sequence: first row, end, first position, slot, rows of its draft, right rows of its last
// draft, where its state is read, and where it is written.
@group(0) @binding(0) var<storage, read> sequences: array<u32>;
@group(0) @binding(1) var<storage, read> taps: array<f32>;
@group(0) @binding(2) var<storage, read_write> state: array<f32>;
@group(0) @binding(3) var<storage, read_write> x: array<f32>;
$BINDINGS
// The window ends with the last of the taps, so that all have places of their own: an array that is
// indexed in a loop may end up in memory. Weights before the first tap are zero.
const TAPS = $TAPSu;

@compute @workgroup_size($THREADS)
fn main(@builtin(workgroup_id) id: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let wide = $THREADSu / args.segments;
    let segment = thread / wide;
    let mine = id.x * wide + thread % wide;
    let channel = min(mine, args.channels - 1u);
    let at = args.sequences + id.y * 8u;
    let begin = sequences[at];
    let start = max(begin, args.first);
    let end = min(sequences[at + 1u], args.end);
    if (start >= end) { return; }
    let states = sequences[at + args.write_at] * args.slot_numbers + channel;
    let read_at = select(args.write_at, args.read_at, start == begin);
    let old_states = sequences[at + read_at] * args.slot_numbers + channel;
    let fresh = sequences[at + 2u] + start - begin == 0u;
    let skipped = TAPS - args.kernel;
    $BEFORE
    let share = (certain - start + args.segments - 1u) / args.segments;
    let my_start = min(start + segment * share, certain);
    let my_end = select(my_start, min(my_start + share, certain), mine < args.channels);
    $WINDOW
    // Results may take the place of inputs, of which the next segment has read the last ones.
    storageBarrier();
    $AGAIN
    var row = my_start;
    // Inputs of several rows are read before the first is used: waits for the memory overlap.
    for (; row + 8u <= my_end; row += 8u) {
        $EIGHT
    }
    for (; row < my_end; row++) {
        $ROW
    }
    if (mine < args.channels && my_end == certain && (my_start < my_end || segment == 0u)) { $STATE }
    $DRAFT
}
