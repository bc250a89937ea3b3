// One sum over ranks inside of a submission: leaves partial sums in the host's memory, waits for
// the sums, and takes them. mailbox.rs has the other side. Counts are in vectors of four words.
struct Args { first: u32, count: u32, slot: u32, number: u32, looks: u32, groups: u32 }
var<immediate> args: Args;
$BINDINGS
// A NaN that arithmetic does not make: what the other side has not written yet.
const ABSENT = 0x7fc0deadu;
// In place of a number: the host gave up.
const ENDED = 0xffffffffu;
// Why there was no sum.
const LATE = 1u;
const TOLD = 2u;
const TORN = 3u;
// No verdict yet.
const WAITING = 0xffffffffu;
// Threads that look at the flag, one after the other.
const TURNS = 128u;
var<workgroup> verdict: u32;

// All exchanges that follow give up at once. The host looks at the outbox's first words.
fn poison(reason: u32) {
    atomicStore(&state[0], reason);
    outbox[0] = vec4<u32>(args.number, reason, 0u, 0u);
}

@compute @workgroup_size(1024)
fn main(@builtin(workgroup_id) id: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let start = id.x * 1024u + thread;
    let stride = args.groups * 1024u;
$BODY
}
