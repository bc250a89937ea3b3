// A recurrence of a head of a sequence, a token after the other. Its state S is a matrix, [key_dim,
// value_dim]: S[k] *= decay[k], S += key ⊗ written, out = Sᵀ query. A workgroup has 32 columns of
// the matrix; of each, 8 threads have every eighth row.
struct Args {
    first: u32, end: u32, x_stride: u32, gates_stride: u32,
    out_stride: u32, query_first: u32, key_first: u32, value_first: u32,
    key_heads: u32, key_dim: u32, value_dim: u32, heads: u32,
    sequences: u32, slot_numbers: u32, state_first: u32,
    // Heads that follow each other and share a key.
    run: u32,
    decays_stride: u32,
    // Added to the sums of squares of queries and keys.
    unit_eps: f32,
    // Limits of a time step. Of delta rules: the first is the lowest logarithm of a decay, or 0.
    low: f32, high: f32,
    // Of drafts: numbers that are kept for a row, as inputs and as gates.
    channels: u32, kept_gates: u32,
}
var<immediate> args: Args;
// Of each sequence: first row, end, first position, slot, rows of its draft, right rows of its last
// draft.
@group(0) @binding(0) var<storage, read> sequences: array<u32>;
@group(0) @binding(1) var<storage, read> rates: array<f32>;
@group(0) @binding(2) var<storage, read> biases: array<f32>;
// Queries, keys and values of rows.
@group(0) @binding(3) var<storage, read> x: array<f32>;
@group(0) @binding(4) var<storage, read> gates: array<f32>;
@group(0) @binding(5) var<storage, read_write> state: array<f32>;
@group(0) @binding(6) var<storage, read_write> out: array<f32>;
$BINDINGS
var<workgroup> query: array<f32, 512>;
var<workgroup> key: array<f32, 512>;
$MEMORY
// A thread's sums over its rows: Sᵀ key, Sᵀ query, query · query, key · key; and query · key.
var<workgroup> sums: array<vec4<f32>, 256>;
var<workgroup> dots: array<f32, 256>;

// ln(1 + e^x), which is x where e^x would be infinite.
fn softplus(x: f32) -> f32 {
    if (x > 20.0) { return x; }
    let e = exp(x);
    // Logarithms of numbers near 1 have few correct digits.
    if (e < 0.05) { return e * (1.0 - e * (0.5 - e * (0.33333334 - e * (0.25 - e * 0.2)))); }
    return log(1.0 + e);
}

fn decay_of(rate: f32, time: f32) -> f32 {
    if (args.low < 0.0) { return exp(args.low / (1.0 + exp(-rate * time))); }
    return exp(-rate * softplus(time));
}

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) id: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let head = id.x;
    let at = args.sequences + id.y * 6u;
    let begin = sequences[at];
    let start = max(begin, args.first);
    let end = min(sequences[at + 1u], args.end);
    let line = thread % 32u;
    let part = thread / 32u;
    let column = id.z * 32u + line;
    let v = min(column, args.value_dim - 1u);
    let key_head = head / args.run % args.key_heads;
    let states = sequences[at + 3u] * args.slot_numbers + args.state_first + head * args.key_dim * args.value_dim + v;
    let rate = exp(rates[head]);
    $ROWS
        let query_at = source + args.query_first + key_head * args.key_dim;
        let key_at = source + args.key_first + key_head * args.key_dim;
        let gate = $GATE_ROW + head;
        for (var k = thread; k < args.key_dim; k += 256u) {
            query[k] = x_of($AGAINquery_at + k);
            key[k] = x_of($AGAINkey_at + k);
            $DECAYS
        }
        $TOKEN
        workgroupBarrier();
        var all = vec4<f32>(0.0);
        var both = 0.0;
        for (var k = part; k < args.key_dim; k += 8u) {
            let decayed = select(state_of($COPYstates + k * args.value_dim) * $KEEP, 0.0, fresh);
            all = fma(vec4<f32>(decayed, decayed, query[k], key[k]), vec4<f32>(key[k], query[k], query[k], key[k]), all);
            both = fma(query[k], key[k], both);
        }
        sums[thread] = all;
        dots[thread] = both;
        workgroupBarrier();
        all = vec4<f32>(0.0);
        both = 0.0;
        for (var i = 0u; i < 8u; i++) {
            all += sums[i * 32u + line];
            both += dots[i * 32u + line];
        }
        let value = x_of($AGAINsource + args.value_first + head * args.value_dim + v);
        $WRITTEN
        if (column < args.value_dim) {
            for (var k = part; k < args.key_dim; k += 8u) {
                let s = states + k * args.value_dim;
                let next = fma(key[k], written, select(state_of($COPYs) * $KEEP, 0.0, fresh));
                $STORE
            }
            if (part == 0u$AND_OUT) { out[row * args.out_stride + head * args.value_dim + v] = result; }
        }
        workgroupBarrier();
    }
}
