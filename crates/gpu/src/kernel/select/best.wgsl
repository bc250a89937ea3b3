// The places of the largest of a row's scores, in ascending order after their number; of equal
// scores, the first. A workgroup has a row. It finds the smallest chosen score 8 bits at a time,
// by counting the scores with each value of these bits.
struct Args {
    row: u32, score_stride: u32, chosen: u32, out_stride: u32, table: u32, every: u32,
    first: u32, keys: u32, limited: u32,
}
var<immediate> args: Args;
@group(0) @binding(0) var<storage, read> tables: array<u32>;
@group(0) @binding(1) var<storage, read> scores: array<u32>;
@group(0) @binding(2) var<storage, read_write> selection: array<f32>;
var<workgroup> counts: array<atomic<u32>, 256>;
var<workgroup> sums: array<vec2<u32>, 256>;
// The bits found so far, and the number of scores to choose among those that begin with them.
var<workgroup> found: vec2<u32>;
// A score's bits, which as a number have the order of the scores.
fn ordered(bits: u32) -> u32 {
    return select(bits | 0x80000000u, ~bits, (bits & 0x80000000u) != 0u);
}
@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) id: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let row = args.row + id.x;
    // Scores may be those of blocks of keys.
    let visible = ((tables[args.table + row * 4u] + 1u) / args.every + args.keys - 1u) / args.keys;
    let source = id.x * args.score_stride + args.first;
    var chosen = args.chosen;
    // The number of scores to choose from follows them.
    if (args.limited > 0u) { chosen = min(chosen, scores[source + args.limited]); }
    let to = row * args.out_stride;
    if (visible <= chosen) {
        if (thread == 0u) { selection[to] = f32(visible); }
        for (var i = thread; i < visible; i += 256u) { selection[to + 1u + i] = f32(i); }
        return;
    }
    if (thread == 0u) { found = vec2<u32>(0u, chosen); }
    for (var shift = 32u; shift > 0u; shift -= 8u) {
        atomicStore(&counts[thread], 0u);
        workgroupBarrier();
        let before = found;
        for (var i = thread; i < visible; i += 256u) {
            let bits = ordered(scores[source + i]);
            // A shift by 32 would be one by 0.
            let begins = shift == 32u || (bits ^ before.x) >> (shift % 32u) == 0u;
            if (begins) { atomicAdd(&counts[(bits >> (shift - 8u)) & 255u], 1u); }
        }
        workgroupBarrier();
        // The number of scores with at least a value.
        sums[thread] = vec2<u32>(atomicLoad(&counts[thread]), 0u);
        workgroupBarrier();
        for (var distance = 1u; distance < 256u; distance *= 2u) {
            var more = 0u;
            if (thread + distance < 256u) { more = sums[thread + distance].x; }
            workgroupBarrier();
            sums[thread].x += more;
            workgroupBarrier();
        }
        var larger = 0u;
        if (thread < 255u) { larger = sums[thread + 1u].x; }
        if (larger < before.y && sums[thread].x >= before.y) {
            found = vec2<u32>(before.x | (thread << (shift - 8u)), before.y - larger);
        }
        workgroupBarrier();
    }
    let least = found.x;
    let equal = found.y;
    // Each thread has consecutive scores. Numbers of larger and of equal scores before them:
    let share = (visible + 255u) / 256u;
    let start = min(thread * share, visible);
    let end = min(start + share, visible);
    var mine = vec2<u32>(0u);
    for (var i = start; i < end; i++) {
        let bits = ordered(scores[source + i]);
        mine += vec2<u32>(u32(bits > least), u32(bits == least));
    }
    sums[thread] = mine;
    workgroupBarrier();
    for (var distance = 1u; distance < 256u; distance *= 2u) {
        var more = vec2<u32>(0u);
        if (thread >= distance) { more = sums[thread - distance]; }
        workgroupBarrier();
        sums[thread] += more;
        workgroupBarrier();
    }
    let earlier = sums[thread] - mine;
    var equals = earlier.y;
    var at = to + 1u + earlier.x + min(equals, equal);
    for (var i = start; i < end; i++) {
        let bits = ordered(scores[source + i]);
        if (bits > least || (bits == least && equals < equal)) {
            selection[at] = f32(i);
            at++;
        }
        equals += u32(bits == least);
    }
    if (thread == 0u) { selection[to] = f32(chosen); }
}
