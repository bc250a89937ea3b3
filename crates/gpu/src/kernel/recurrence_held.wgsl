$INPUTS$BINDINGS
// Of the previous row, the current and the next, in turn. Columns that keys do not have are zero.
var<workgroup> queries: array<f32, 3 * $KEYSu>;
var<workgroup> keys: array<f32, 3 * $KEYSu>;
$MEMORY
// Of two rows, in turn: a thread's sums over its rows of the state, Sᵀ key, Sᵀ query, query · query,
// key · key; and query · key.
var<workgroup> sums: array<vec4<f32>, 512>;
var<workgroup> dots: array<f32, 512>;

// A thread's place.
struct Place { thread: u32, head: u32, key_head: u32, column: u32 }
// What a thread needs of a row besides queries and keys.
struct Own { value: f32, gate: f32, time: f32 }

fn fetch(row: u32, first: u32, place: Place) -> Own {
    let source = row * args.x_stride;
    if (place.thread < $KEYSu) {
        let k = place.thread;
        var query = 0.0;
        var key = 0.0;
        if (k < args.key_dim) {
            query = x[source + args.query_first + place.key_head * args.key_dim + k];
            key = x[source + args.key_first + place.key_head * args.key_dim + k];
            $DECAYS
        }
        queries[first + k] = query;
        keys[first + k] = key;
    }
    let gate = row * args.gates_stride + place.head;
    let value = x[source + args.value_first + place.head * args.value_dim + place.column];
    return Own(value, gates[gate], $TIME_OF_ROW);
}

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) id: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
$PLACE    let place = Place(thread, head, key_head, v);
    let fresh = sequences[at + 2u] + start - begin == 0u;
    // The thread's rows of the state.
    var held: array<f32, $ROWSu>;
    for (var i = 0u; i < $ROWSu; i++) {
        let k = part + 8u * i;
        held[i] = 0.0;
        if (k < args.key_dim && !fresh) { held[i] = state[old_states + k * args.value_dim]; }
    }
    var own = Own(0.0, 0.0, 0.0);
    if (start < end) { own = fetch(start, 0u, place); }
    workgroupBarrier();
    // With one barrier a row, threads are at most a row apart: none writes what another still reads.
    for (var row = start; row < end; row++) {
        let turn = row - start;
        let first = $KEYSu * (turn % 3u);
        let half = 256u * (turn % 2u);
        $TOKEN
        var all = vec4<f32>(0.0);
        var both = 0.0;
        for (var i = 0u; i < $ROWSu; i++) {
            let k = first + part + 8u * i;
            let query = queries[k];
            let key = keys[k];
            held[i] *= $KEEP;
            all = fma(vec4<f32>(held[i], held[i], query, key), vec4<f32>(key, query, query, key), all);
            both = fma(query, key, both);
        }
        sums[half + thread] = all;
        dots[half + thread] = both;
        let next = fetch(min(row + 1u, end - 1u), $KEYSu * ((turn + 1u) % 3u), place);
        workgroupBarrier();
        all = vec4<f32>(0.0);
        both = 0.0;
        for (var i = 0u; i < 8u; i++) {
            all += sums[half + i * 32u + line];
            both += dots[half + i * 32u + line];
        }
        let value = own.value;
        $WRITTEN
        for (var i = 0u; i < $ROWSu; i++) { held[i] = fma(keys[first + part + 8u * i], written, held[i]); }
        if (part == 0u && column < args.value_dim) {
            out[row * args.out_stride + head * args.value_dim + v] = result;
        }
        own = next;
    }
    if (start < end && column < args.value_dim) {
        for (var i = 0u; i < $ROWSu; i++) {
            let k = part + 8u * i;
            if (k < args.key_dim) { state[states + k * args.value_dim] = held[i]; }
        }
    }
}
