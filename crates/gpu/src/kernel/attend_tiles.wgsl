// Attention of a query head of up to 64 consecutive rows of a prompt: each block of 32 tokens is read
// once for all of them. Blocks are visited by their position, and what a row does not attend to
// changes none of its numbers, so its result does not depend on the other rows.
//
// A thread has the rows r, r + 16, r + 32, r + 48 of the tile, r = thread / 8; of their scores those
// of 4 consecutive tokens, and of each 32 columns of values 4 consecutive ones.
$PROMPTS
const NONE = -3.0e38;
// Quads from a line to the next: odd, so that threads read different banks.
const PITCH = 9u;
// 32 columns of 64 queries and of 32 keys, or 64 columns of 32 values: lines of 8 quads.
var<workgroup> tile: array<vec4<f32>, 864>;
// Scores of 64 rows and 32 tokens, then weights.
var<workgroup> scores: array<vec4<f32>, 576>;
// Of each row: what earlier sums shrink by. At the end: a factor and a divisor.
var<workgroup> factors: array<vec2<f32>, 64>;

fn dots(a: vec4<f32>, b: vec4<f32>, sum: f32) -> f32 {
    return fma(a.w, b.w, fma(a.z, b.z, fma(a.y, b.y, fma(a.x, b.x, sum))));
}

@compute @workgroup_size(128)
fn main(@builtin(workgroup_id) id: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
$TILE    let line = thread / 8u;
    let column = thread % 8u;
    let quads = args.key_units * 2u;
    let my_position = start + thread;
    let my_start = first_visible(my_position);
    let my_last = min(my_position + args.after, newest);
    var most = NONE;
    var total = 0.0;
    $STATE
    for (var block = visible / 32u; block * 32u <= last; block++) {
        let vector = (tables[blocks + block] * args.kv_heads + kv_head) * 32u;
        $ZERO
        for (var slab = 0u; slab * 4u < args.key_units; slab++) {
            for (var i = 0u; i < 4u; i++) {
                let row = min(first + line + i * 16u, end - 1u);
                let quad = slab * 8u + column;
                let place = row * args.q_stride + head * quads + min(quad, quads - 1u);
                tile[(line + i * 16u) * PITCH + column] =
                    select(vec4<f32>(0.0), queries[place], quad < quads);
            }
            {
                // Token 4c + j of the block is line 8j + c: threads read different banks.
                let token = thread / 4u;
                let unit = slab * 4u + thread % 4u;
                let key = keys[(vector + token) * args.key_units + min(unit, args.key_units - 1u)];
                let at = (64u + token % 4u * 8u + token / 4u) * PITCH + thread % 4u * 2u;
                tile[at] = select(vec4<f32>(0.0), $KEY_LOW, unit < args.key_units);
                tile[at + 1u] = select(vec4<f32>(0.0), $KEY_HIGH, unit < args.key_units);
            }
            workgroupBarrier();
            for (var q = 0u; q < 8u; q++) {
                $DOTS
            }
            workgroupBarrier();
        }
        $KEEP
        $LOAD0
        workgroupBarrier();
        if (thread < 64u) {
            var best = most;
            for (var q = 0u; q < 8u; q++) {
                let token = vec4<u32>(block * 32u + q * 4u) + vec4<u32>(0u, 1u, 2u, 3u);
                let is_seen = (token >= vec4<u32>(my_start)) & (token <= vec4<u32>(my_last));
                let four = select(vec4<f32>(NONE), scores[thread * PITCH + q], is_seen);
                scores[thread * PITCH + q] = four;
                best = max(best, max(max(four.x, four.y), max(four.z, four.w)));
            }
            let shrink = select(exp(most - best), 1.0, most == best);
            most = best;
            var sum = 0.0;
            for (var q = 0u; q < 8u; q++) {
                let four = scores[thread * PITCH + q];
                let weights = select(vec4<f32>(0.0), exp(four - best), four > vec4<f32>(NONE));
                scores[thread * PITCH + q] = weights;
                sum += (weights.x + weights.y) + (weights.z + weights.w);
            }
            total = fma(total, shrink, sum);
            factors[thread] = vec2<f32>(shrink, 0.0);
        }
        workgroupBarrier();
        $ADD
    }
    if (thread < 64u) {
        var largest = most;
        if (args.sinks == 1u) { largest = max(most, sinks[head]); }
        let factor = exp(most - largest);
        var sum = fma(total, factor, 0.0);
        if (args.sinks == 1u) { sum += exp(sinks[head] - largest); }
        factors[thread] = vec2<f32>(factor, sum);
    }
    workgroupBarrier();
    for (var i = 0u; i < 4u; i++) {
        let row = first + line + i * 16u;
        if (row < source || row >= end) { continue; }
        let factor = factors[line + i * 16u];
        let to = row * args.out_stride + args.out_first + head * args.out_dim;
        $STORE
    }
}
