$INPUTS$BINDINGS
// Rows of the state that a thread has: part, part + 8, and so on. Their queries and keys lie side
// by side.
const ROWS = $ROWSu;
// Of the previous row, the current and the next, in turn. Columns that keys do not have are zero.
const QUADS = $KEYSu / 4u;
var<workgroup> queries: array<vec4<f32>, 3u * QUADS>;
var<workgroup> keys: array<vec4<f32>, 3u * QUADS>;
$MEMORY
// Of two rows, in turn: a thread's sums over its rows of the state, Sᵀ key, Sᵀ query, query · query,
// key · key; and query · key.
var<workgroup> sums: array<vec4<f32>, 512>;
var<workgroup> dots: array<f32, 512>;

// What a thread needs of a row besides queries and keys.
struct Own { value: f32, gate: f32, time: f32 }

fn own_of(row: u32, head: u32, column: u32) -> Own {
    let gate = row * args.gates_stride + head;
    let value = x[row * args.x_stride + args.value_first + head * args.value_dim + column];
    return Own(value, gates[gate], $TIME_OF_ROW);
}

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) id: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
$PLACE    if (start >= end) { return; }
    let fresh = sequences[at + 2u] + start - begin == 0u;
    // The thread's rows of the state, each in a variable: an array may end up in memory.
    $STATE
    // A thread's numbers of a row's query or key. They are asked for two rows ahead.
    $SLOTS
    var row_ahead = start;
    $ASK
    $PUT_FIRST
    row_ahead = min(start + 1u, end - 1u);
    $ASK
    var own = own_of(start, head, v);
    var next = own_of(row_ahead, head, v);
    workgroupBarrier();
    // With one barrier a row, threads are at most a row apart: none writes what another still reads.
    var turn = 0u;
    var half = 0u;
    for (var row = start; row < end; row++) {
        let first = QUADS * turn + part * (ROWS / 4u);
        let first_decay = $KEYSu * turn + part;
        turn = select(turn + 1u, 0u, turn == 2u);
        $TOKEN
        var all = vec4<f32>(0.0);
        var both = 0.0;
        $ADD
        sums[half + thread] = all;
        dots[half + thread] = both;
        $PUT
        row_ahead = min(row + 2u, end - 1u);
        $ASK
        let later = own_of(row_ahead, head, v);
        workgroupBarrier();
        all = vec4<f32>(0.0);
        both = 0.0;
        $COLLECT
        let value = own.value;
        $WRITTEN
        $WRITE
        if (part == 0u && column < args.value_dim) {
            out[row * args.out_stride + head * args.value_dim + v] = result;
        }
        own = next;
        next = later;
        half = 256u - half;
    }
    if (column < args.value_dim) {
        $STORE
    }
}
