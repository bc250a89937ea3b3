// Compressed tokens: for each column, the mean of the values of `every` tokens, and of those before
// them if they overlap, weighted by the softmax of their gates; then a norm and a rotation, if
// there are any. A workgroup has a row, and writes zeros if no compressed token ends there. Tokens
// before this call's rows are in the sequence's state.
struct Args {
    row: u32, values_stride: u32, gates_stride: u32, out_stride: u32,
    table: u32, dim: u32, width: u32, every: u32,
    slots: u32, numbers: u32, normed: u32, eps: f32,
    pairs: u32, interleaved: u32, rotations: u32,
}
var<immediate> args: Args;
// Of each row: position, first block of its sequence in the table of blocks, slot, its sequence's
// first row.
@group(0) @binding(0) var<storage, read> tables: array<u32>;
@group(0) @binding(1) var<storage, read> values: array<f32>;
@group(0) @binding(2) var<storage, read> gates: array<f32>;
@group(0) @binding(3) var<storage, read> place_bias: array<f32>;
@group(0) @binding(4) var<storage, read> state: array<f32>;
@group(0) @binding(5) var<storage, read> weight: array<f32>;
// Cosine and sine of each pair of columns, for each row.
@group(0) @binding(6) var<storage, read> rotations: array<u32>;
@group(0) @binding(7) var<storage, read_write> out: array<f32>;
const NONE = -3.0e38;
var<workgroup> entry: array<f32, $COLUMNS>;
var<workgroup> sums: array<f32, 128>;
@compute @workgroup_size(128)
fn main(@builtin(workgroup_id) id: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let row = args.row + id.x;
    let position = tables[args.table + row * 4u];
    let to = row * args.out_stride;
    if ((position + 1u) % args.every != 0u) {
        for (var c = thread; c < args.dim; c += 128u) { out[to + c] = 0.0; }
        return;
    }
    let slot = tables[args.table + row * 4u + 2u];
    // The first of the sequence's rows in this call has this position.
    let given = position - (row - max(tables[args.table + row * 4u + 3u], args.row));
    let overlaps = args.width > args.dim;
    let own = position + 1u - args.every;
    var begin = own;
    if (overlaps && position + 1u >= 2u * args.every) { begin = own - args.every; }
    for (var c = thread; c < args.dim; c += 128u) {
        var most = NONE;
        var total = 0.0;
        var sum = 0.0;
        for (var at = begin; at <= position; at++) {
            let column = c + select(0u, args.dim, overlaps && at >= own);
            var value = 0.0;
            var gate = 0.0;
            if (at >= given) {
                let source = row - (position - at);
                value = values[source * args.values_stride + column];
                gate = gates[source * args.gates_stride + column] + place_bias[at % args.every * args.width + column];
            } else {
                let source = slot * args.numbers + at % args.slots * 2u * args.width + column;
                value = state[source];
                gate = state[source + args.width];
            }
            let best = max(most, gate);
            let shrink = exp(most - best);
            let share = exp(gate - best);
            most = best;
            total = fma(total, shrink, share);
            sum = fma(sum, shrink, share * value);
        }
        entry[c] = sum / total;
    }
    workgroupBarrier();
    if (args.normed == 1u) {
        var sum = 0.0;
        for (var c = thread; c < args.dim; c += 128u) { sum = fma(entry[c], entry[c], sum); }
        sums[thread] = sum;
        workgroupBarrier();
        for (var half = 64u; half > 0u; half /= 2u) {
            if (thread < half) { sums[thread] += sums[thread + half]; }
            workgroupBarrier();
        }
        let root = sqrt(sums[0] / f32(args.dim) + args.eps);
        for (var c = thread; c < args.dim; c += 128u) { entry[c] = entry[c] / root * weight[c]; }
        workgroupBarrier();
    }
    let rotated = args.dim - 2u * args.pairs;
    for (var pair = thread; pair < args.pairs; pair += 128u) {
        let turn = args.rotations + (id.x * args.pairs + pair) * 2u;
        let cosine = bitcast<f32>(rotations[turn]);
        let sine = bitcast<f32>(rotations[turn + 1u]);
        let a_at = rotated + select(pair, 2u * pair, args.interleaved == 1u);
        let b_at = rotated + select(pair + args.pairs, 2u * pair + 1u, args.interleaved == 1u);
        let a = entry[a_at];
        let b = entry[b_at];
        entry[a_at] = fma(a, cosine, -(b * sine));
        entry[b_at] = fma(b, cosine, a * sine);
    }
    workgroupBarrier();
    for (var c = thread; c < args.dim; c += 128u) { out[to + c] = entry[c]; }
}
