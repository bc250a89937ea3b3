// Each row's experts and their weights. A workgroup has a row.
struct Args {
    row: u32, logits_stride: u32, out_stride: u32, experts: u32,
    chosen: u32, scores: u32, correction: u32, group_count: u32,
    group_chosen: u32, group_best: u32, renormalise: u32, shared_expert: u32,
    scale: f32,
}
var<immediate> args: Args;
@group(0) @binding(0) var<storage, read> correction: array<f32>;
@group(0) @binding(1) var<storage, read> logits: array<f32>;
@group(0) @binding(2) var<storage, read_write> out: array<f32>;
const NONE = -3.0e38;
var<workgroup> scores: array<f32, 1024>;
var<workgroup> ranked: array<f32, 1024>;
var<workgroup> of_groups: array<f32, 256>;
var<workgroup> allowed: array<u32, 256>;
var<workgroup> values: array<f32, 64>;
var<workgroup> places: array<u32, 64>;
var<workgroup> chosen: array<u32, 64>;

fn sigmoid(x: f32) -> f32 { return 1.0 / (1.0 + exp(-x)); }
fn root_softplus(x: f32) -> f32 { return sqrt(max(x, 0.0) + log(1.0 + exp(-abs(x)))); }

// The best of numbers that come after (value, place): smaller, or equal and later.
fn after(value: f32, place: u32, last: f32, last_place: u32) -> bool {
    return value < last || (value == last && place > last_place);
}

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) id: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let row = args.row + id.x;
    let source = row * args.logits_stride;
    // Scores.
    var most = NONE;
    for (var e = thread; e < args.experts; e += 64u) { most = max(most, logits[source + e]); }
    values[thread] = most;
    workgroupBarrier();
    for (var i = 0u; i < 64u; i++) { most = max(most, values[i]); }
    workgroupBarrier();
    var sum = 0.0;
    for (var e = thread; e < args.experts; e += 64u) {
        let power = exp(logits[source + e] - most);
        scores[e] = power;
        if (args.scores == 1u) { scores[e] = sigmoid(logits[source + e]); }
        if (args.scores == 2u) { scores[e] = root_softplus(logits[source + e]); }
        sum += power;
    }
    values[thread] = sum;
    workgroupBarrier();
    sum = 0.0;
    for (var i = 0u; i < 64u; i++) { sum += values[i]; }
    for (var e = thread; e < args.experts; e += 64u) {
        if (args.scores == 0u) { scores[e] = scores[e] / sum; }
        ranked[e] = scores[e];
        if (args.correction == 1u) { ranked[e] += correction[e]; }
    }
    workgroupBarrier();
    // The best groups.
    if (args.group_count > 0u) {
        let size = args.experts / args.group_count;
        for (var g = thread; g < args.group_count; g += 64u) {
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
        for (var g = thread; g < args.group_count; g += 64u) {
            var before = 0u;
            for (var other = 0u; other < args.group_count; other++) {
                if (other != g && after(of_groups[g], g, of_groups[other], other)) { before++; }
            }
            allowed[g] = select(0u, 1u, before < args.group_chosen);
        }
        workgroupBarrier();
        for (var e = thread; e < args.experts; e += 64u) {
            if (allowed[e / size] == 0u) { ranked[e] = NONE; }
        }
        workgroupBarrier();
    }
    // The best experts, one after the other.
    for (var n = 0u; n < args.chosen; n++) {
        var best = NONE;
        var place = 0xffffffffu;
        for (var e = thread; e < args.experts; e += 64u) {
            if (ranked[e] > best) { best = ranked[e]; place = e; }
        }
        values[thread] = best;
        places[thread] = place;
        workgroupBarrier();
        if (thread == 0u) {
            for (var i = 1u; i < 64u; i++) {
                if (values[i] > best || (values[i] == best && places[i] < place)) { best = values[i]; place = places[i]; }
            }
            // Scores that are not numbers compare as nothing: any expert will do, its weight is one too.
            place = min(place, args.experts - 1u);
            ranked[place] = NONE;
            chosen[n] = place;
        }
        workgroupBarrier();
    }
    if (thread > 0u) { return; }
    for (var i = 1u; i < args.chosen; i++) {
        let expert = chosen[i];
        var j = i;
        while (j > 0u && chosen[j - 1u] > expert) {
            chosen[j] = chosen[j - 1u];
            j--;
        }
        chosen[j] = expert;
    }
    var divisor = 1.0;
    if (args.renormalise == 1u) {
        divisor = 0.0;
        for (var i = 0u; i < args.chosen; i++) { divisor += scores[chosen[i]]; }
        divisor += 1e-20;
    }
    let to = row * args.out_stride;
    let count = args.chosen + select(0u, 1u, args.shared_expert > 0u);
    for (var i = 0u; i < args.chosen; i++) {
        out[to + i] = f32(chosen[i]);
        out[to + count + i] = scores[chosen[i]] / divisor * args.scale;
    }
    if (args.shared_expert > 0u) {
        out[to + args.chosen] = f32(args.experts);
        var weight = 1.0;
        if (args.shared_expert == 2u) { weight = sigmoid(logits[source + args.experts]); }
        out[to + count + args.chosen] = weight;
    }
}
