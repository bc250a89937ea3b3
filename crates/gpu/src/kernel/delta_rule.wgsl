// The gated delta rule of a value head of a sequence, a token after the other. A thread has columns
// of the state, [key_dim, value_dim].
struct Args {
    first: u32, end: u32, qkv_stride: u32, gates_stride: u32,
    out_stride: u32, key_heads: u32, value_heads: u32, key_dim: u32,
    value_dim: u32, sequences: u32, slot_numbers: u32, state_first: u32,
    // Value heads that follow each other and share a key head.
    run: u32,
    // Added to the sums of squares of queries and keys.
    unit_eps: f32,
}
var<immediate> args: Args;
@group(0) @binding(0) var<storage, read> sequences: array<u32>;
@group(0) @binding(1) var<storage, read> decay: array<f32>;
@group(0) @binding(2) var<storage, read> decay_bias: array<f32>;
@group(0) @binding(3) var<storage, read> qkv: array<f32>;
@group(0) @binding(4) var<storage, read> gates: array<f32>;
@group(0) @binding(5) var<storage, read_write> state: array<f32>;
@group(0) @binding(6) var<storage, read_write> out: array<f32>;
var<workgroup> query: array<f32, 512>;
var<workgroup> key: array<f32, 512>;
var<workgroup> sums: array<vec2<f32>, 64>;
@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) id: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let head = id.x;
    let at = args.sequences + id.y * 4u;
    let begin = sequences[at];
    let start = max(begin, args.first);
    let end = min(sequences[at + 1u], args.end);
    let key_head = head / args.run % args.key_heads;
    let states = sequences[at + 3u] * args.slot_numbers + args.state_first + head * args.key_dim * args.value_dim;
    for (var row = start; row < end; row++) {
        let fresh = sequences[at + 2u] + row - begin == 0u;
        let source = row * args.qkv_stride;
        let query_at = source + key_head * args.key_dim;
        let key_at = source + (args.key_heads + key_head) * args.key_dim;
        var lengths = vec2<f32>(0.0);
        for (var k = thread; k < args.key_dim; k += 64u) {
            let both = vec2<f32>(qkv[query_at + k], qkv[key_at + k]);
            query[k] = both.x;
            key[k] = both.y;
            lengths = fma(both, both, lengths);
        }
        sums[thread] = lengths;
        workgroupBarrier();
        for (var half = 32u; half > 0u; half /= 2u) {
            if (thread < half) { sums[thread] += sums[thread + half]; }
            workgroupBarrier();
        }
        let unit = sqrt(sums[0] + vec2<f32>(args.unit_eps));
        let gate = row * args.gates_stride + head;
        let beta = 1.0 / (1.0 + exp(-gates[gate]));
        let z = gates[gate + args.value_heads] + decay_bias[head];
        // ln(1 + e^z), which is z where e^z would be infinite.
        let softplus = select(log(1.0 + exp(z)), z, z > 20.0);
        let keep = exp(-exp(decay[head]) * softplus);
        let value_at = source + 2u * args.key_heads * args.key_dim + head * args.value_dim;
        for (var v = thread; v < args.value_dim; v += 64u) {
            var known = 0.0;
            for (var k = 0u; k < args.key_dim; k++) {
                let s = states + k * args.value_dim + v;
                let kept = select(state[s] * keep, 0.0, fresh);
                state[s] = kept;
                known = fma(kept, key[k] / unit.y, known);
            }
            let delta = (qkv[value_at + v] - known) * beta;
            var sum = 0.0;
            for (var k = 0u; k < args.key_dim; k++) {
                let s = states + k * args.value_dim + v;
                let next = fma(key[k] / unit.y, delta, state[s]);
                state[s] = next;
                sum = fma(next, query[k] / unit.x, sum);
            }
            out[row * args.out_stride + head * args.value_dim + v] = sum / sqrt(f32(args.key_dim));
        }
        workgroupBarrier();
    }
}
