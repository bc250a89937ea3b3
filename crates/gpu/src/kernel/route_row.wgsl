// The experts of a row whose logits begin at `source`. All threads of the workgroup call it; those
// from ROUTE_THREADS on have numbers that are larger than all places.
const NONE = -3.0e38;
const ROUTE_THREADS = 256u;
var<workgroup> scores: array<f32, $EXPERTS>;
var<workgroup> ranked: array<f32, $EXPERTS>;
// The order of `ranked`, four experts a vector; those behind the last one come last.
var<workgroup> keys: array<vec4<u32>, $QUADS>;
var<workgroup> of_groups: array<f32, 256>;
var<workgroup> allowed: array<u32, 256>;
// Threads' maxima, then sums; and those of 16 threads.
// Not vectors: a write of one component may touch the others, which are other threads'.
var<workgroup> values: array<f32, 256>;
var<workgroup> best: array<f32, 16>;
// A bit for each expert that is chosen.
var<workgroup> marks: array<atomic<u32>, 32>;
var<workgroup> chosen: array<u32, 64>;

fn four_values(n: u32) -> vec4<f32> {
    return vec4<f32>(values[4u * n], values[4u * n + 1u], values[4u * n + 2u], values[4u * n + 3u]);
}
fn four_best(n: u32) -> vec4<f32> {
    return vec4<f32>(best[4u * n], best[4u * n + 1u], best[4u * n + 2u], best[4u * n + 3u]);
}
fn sigmoid(x: f32) -> f32 { return 1.0 / (1.0 + exp(-x)); }
fn root_softplus(x: f32) -> f32 { return sqrt(max(x, 0.0) + log(1.0 + exp(-abs(x)))); }

// The best of numbers that come after (value, place): smaller, or equal and later.
fn after(value: f32, place: u32, last: f32, last_place: u32) -> bool {
    return value < last || (value == last && place > last_place);
}

// Ordered as numbers are. What is not a number comes last: any expert will do, its weight is none
// too.
fn key(value: f32) -> u32 {
    let bits = bitcast<u32>(value);
    if ((bits & 0x7fffffffu) > 0x7f800000u) { return 0u; }
    let b = select(bits, 0u, bits == 0x80000000u);
    return select(b | 0x80000000u, ~b, (b & 0x80000000u) != 0u);
}

fn route(row: u32, source: u32, thread: u32) {
    // Scores.
    var most = NONE;
    for (var e = thread; e < args.experts; e += ROUTE_THREADS) { most = max(most, logit(source + e)); }
    if (thread < 32u) { atomicStore(&marks[thread], 0u); }
    if (thread < ROUTE_THREADS) { values[thread] = most; }
    workgroupBarrier();
    if (thread < 16u) {
        let first = 4u * thread;
        let four = max(max(four_values(first), four_values(first + 1u)), max(four_values(first + 2u), four_values(first + 3u)));
        best[thread] = max(max(four.x, four.y), max(four.z, four.w));
    }
    workgroupBarrier();
    let tops = max(max(four_best(0u), four_best(1u)), max(four_best(2u), four_best(3u)));
    most = max(max(tops.x, tops.y), max(tops.z, tops.w));
    var sum = 0.0;
    for (var e = thread; e < args.experts; e += ROUTE_THREADS) {
        let power = exp(logit(source + e) - most);
        scores[e] = power;
        if (args.scores == 1u) { scores[e] = sigmoid(logit(source + e)); }
        if (args.scores == 2u) { scores[e] = root_softplus(logit(source + e)); }
        sum += power;
    }
    if (thread < ROUTE_THREADS) { values[thread] = sum; }
    workgroupBarrier();
    if (thread < 16u) {
        let first = 4u * thread;
        let four = (four_values(first) + four_values(first + 1u)) + (four_values(first + 2u) + four_values(first + 3u));
        best[thread] = (four.x + four.y) + (four.z + four.w);
    }
    workgroupBarrier();
    let shares = (four_best(0u) + four_best(1u)) + (four_best(2u) + four_best(3u));
    sum = (shares.x + shares.y) + (shares.z + shares.w);
    for (var e = thread; e < args.experts; e += ROUTE_THREADS) {
        if (args.scores == 0u) { scores[e] = scores[e] / sum; }
        ranked[e] = rank_of(row, e, scores[e]);
    }
    workgroupBarrier();
    // The best groups.
    if (args.group_count > 0u) {
        let size = args.experts / args.group_count;
        for (var g = thread; g < args.group_count; g += ROUTE_THREADS) {
            var total = 0.0;
            var last = 3.0e38;
            var last_place = 0u;
            for (var n = 0u; n < min(args.group_best, size); n++) {
                var best = NONE;
                var place = 0u;
                for (var e = g * size; e < (g + 1u) * size; e++) {
                    if (after(ranked[e], e, last, last_place) && (ranked[e] > best)) { best = ranked[e]; place = e; }
                }
                total += best;
                last = best;
                last_place = place;
            }
            of_groups[g] = total;
        }
        workgroupBarrier();
        for (var g = thread; g < args.group_count; g += ROUTE_THREADS) {
            var before = 0u;
            for (var other = 0u; other < args.group_count; other++) {
                if (other != g && after(of_groups[g], g, of_groups[other], other)) { before++; }
            }
            allowed[g] = select(0u, 1u, before < args.group_chosen);
        }
        workgroupBarrier();
        for (var e = thread; e < args.experts; e += ROUTE_THREADS) {
            if (allowed[e / size] == 0u) { ranked[e] = NONE; }
        }
        workgroupBarrier();
    }
    let quads = (args.experts + 3u) / 4u;
    for (var quad = thread; quad < quads; quad += ROUTE_THREADS) {
        var four = vec4<u32>(0u);
        for (var i = 0u; i < 4u; i++) {
            if (4u * quad + i < args.experts) { four[i] = key(ranked[4u * quad + i]); }
        }
        keys[quad] = four;
    }
    workgroupBarrier();
    // An expert is chosen if fewer than that come before it.
    for (var e = thread; e < args.experts; e += ROUTE_THREADS) {
        let own = vec4<u32>(key(ranked[e]));
        var before = vec4<u32>(0u);
        for (var quad = 0u; quad < quads; quad++) {
            let four = keys[quad];
            let is_earlier = vec4<u32>(4u * quad) + vec4<u32>(0u, 1u, 2u, 3u) < vec4<u32>(e);
            before += select(vec4<u32>(0u), vec4<u32>(1u), (four > own) | ((four == own) & is_earlier));
        }
        if (before.x + before.y + before.z + before.w < args.chosen) {
            atomicOr(&marks[e / 32u], 1u << (e % 32u));
        }
    }
    workgroupBarrier();
    // In the order of the experts.
    for (var e = thread; e < args.experts; e += ROUTE_THREADS) {
        let word = atomicLoad(&marks[e / 32u]);
        if (((word >> (e % 32u)) & 1u) == 1u) {
            var place = countOneBits(word & ((1u << (e % 32u)) - 1u));
            for (var i = 0u; i < e / 32u; i++) { place += countOneBits(atomicLoad(&marks[i])); }
            chosen[place] = e;
        }
    }
    workgroupBarrier();
    var divisor = 1.0;
    if (args.renormalise == 1u) {
        divisor = 0.0;
        for (var i = 0u; i < args.chosen; i++) { divisor += scores[chosen[i]]; }
        divisor += 1e-20;
    }
    let to = row * args.out_stride;
    let count = args.chosen + select(0u, 1u, args.shared_expert > 0u);
    if (thread < args.chosen) {
        choices[to + thread] = f32(chosen[thread]);
        choices[to + count + thread] = scores[chosen[thread]] / divisor * args.scale;
    }
    if (thread == 0u && args.shared_expert > 0u) {
        choices[to + args.chosen] = f32(args.experts);
        var weight = 1.0;
        if (args.shared_expert == 2u) { weight = sigmoid(logit(source + args.experts)); }
        choices[to + count + args.chosen] = weight;
    }
}
