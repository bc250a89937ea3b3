// One sum over ranks: leaves partial sums in memory of the host, where all ranks' hosts see them,
// waits for those of the others, and adds. relay.rs says why it is right.
struct Args { first: u32, words: u32, number: u32, looks: u32, width: u32, stride: u32 }
var<immediate> args: Args;
@group(0) @binding(0) var<storage, $ACCESS> x: array<f32>;
@group(0) @binding(1) @coherent @volatile var<storage, read_write> outbox: array<vec4<u32>>;
// The host writes here meanwhile: each load is one, and none is of a cache.
@group(0) @binding(2) @coherent @volatile var<storage, read_write> inbox: array<vec4<u32>>;
@group(0) @binding(3) var<storage, read_write> state: array<atomic<u32>>;
@group(0) @binding(4) var<storage, read_write> ended: array<atomic<u32>>;
$ROWS$LEAVING
// The host's word that it gave up.
const ENDED = 0xffffffffu;
// Why there was no sum.
const LATE = 1u;
const TOLD = 2u;
var<workgroup> is_there: bool;

fn place_of(rank: u32, i: u32) -> u32 { return $HEADER + (2u * rank + args.number % 2u) * $SLOT + i; }

$CHECK
fn is_whole(v: vec4<u32>) -> bool { return v.w == check(v.xyz); }

// Padding is not summed.
fn number(at: u32) -> f32 {
    if (at >= args.words || at % args.stride >= args.width) { return 0.0; }
    return x[args.first + at];
}

fn take(at: u32, sum: f32) {
    if (at < args.words) {
        $TAKE
    }
}

@compute @workgroup_size($THREADS)
fn main(@builtin(workgroup_id) id: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let i = id.x * $THREADS + thread;
    let at = i * 3u;
    let alive = atomicLoad(&state[0]) == 0u;
    let mine = bitcast<vec3<u32>>(vec3<f32>(number(at), number(at + 1u), number(at + 2u)));
    if (alive && at < args.words) { outbox[place_of($RANK, i)] = vec4<u32>(mine, check(mine)); }
$TURNS
    if (alive && at < args.words) {
        var is_done = false;
        var looks = 0u;
        var told = 0u;
$KEPT
        loop {
            if (is_done || told == ENDED || looks >= args.looks) { break; }
$SEEN
            if ($ARE_WHOLE) {
                is_done = true;
$KEEP
            }
            $LOOK
            looks++;
        }
        if (is_done) {
            let sum = $SUM;
            take(at, sum.x);
            take(at + 1u, sum.y);
            take(at + 2u, sum.z);
        } else {
            // All exchanges that follow give up at once.
            let why = select(LATE, TOLD, told == ENDED);
            atomicStore(&state[0], why);
            outbox[$RANK] = vec4<u32>(args.number, why, 0u, 0u);
        }
    }
$LEAVE}
