// A chosen token for each row, as the choice module of thunder-compute describes. A workgroup has a
// row; `parts` are what the kernel that finds a row's largest number has left of it. Weights are
// added as whole numbers of 64 bits (low word, high word), in any order.
struct Args { width: u32, stride: u32, parts: u32, choices: u32, cap: f32 }
var<immediate> args: Args;
@group(0) @binding(0) var<storage, read> x: array<f32>;
@group(0) @binding(1) var<storage, read> parts: array<vec2<u32>>;
// For each row: 1 / (temperature ln 2), or 0 for the largest number; top-k; the share of top-p; the
// least weight that is kept; the draw.
@group(0) @binding(2) var<storage, read> tables: array<u32>;
@group(0) @binding(3) var<storage, read_write> out: array<vec2<u32>>;

const THREADS = $THREADSu;
const LANES = 32u;
const SEGMENTS = THREADS / LANES;
const ONE = 1073741824.0;
const ALL = 0xffffffffu;

var<workgroup> bin_counts: array<atomic<u32>, 256>;
var<workgroup> bin_lows: array<atomic<u32>, 256>;
var<workgroup> bin_highs: array<atomic<u32>, 256>;
var<workgroup> lane_sums: array<vec2<u32>, THREADS>;
var<workgroup> lane_ties: array<u32, THREADS>;
// Tokens are kept with more than this weight, and this many of those that have it.
var<workgroup> kept_weight: u32;
var<workgroup> kept_ties: u32;
// What is still to be reached.
var<workgroup> goal: vec2<u32>;
// The part of the row that has the token.
var<workgroup> place: vec2<u32>;

var<private> row: u32;
var<private> factor: f32;
var<private> best: f32;

fn add(a: vec2<u32>, b: vec2<u32>) -> vec2<u32> {
    let low = a.x + b.x;
    return vec2<u32>(low, a.y + b.y + select(0u, 1u, low < b.x));
}

fn sub(a: vec2<u32>, b: vec2<u32>) -> vec2<u32> {
    return vec2<u32>(a.x - b.x, a.y - b.y - select(0u, 1u, a.x < b.x));
}

fn is_less(a: vec2<u32>, b: vec2<u32>) -> bool {
    return a.y < b.y || (a.y == b.y && a.x < b.x);
}

fn times(a: u32, b: u32) -> vec2<u32> {
    let low = (a & 0xffffu) * (b & 0xffffu);
    let first = (a >> 16u) * (b & 0xffffu) + (low >> 16u);
    let second = (a & 0xffffu) * (b >> 16u) + (first & 0xffffu);
    return vec2<u32>(a * b, (a >> 16u) * (b >> 16u) + (first >> 16u) + (second >> 16u));
}

// a * share / 2^32, of less than 2^64.
fn share_of(a: vec2<u32>, share: u32) -> vec2<u32> {
    return add(vec2<u32>(times(a.x, share).y, 0u), times(a.y, share));
}

$LIMIT

// A token's weight, by the same steps as on the CPU.
fn weight_at(column: u32) -> u32 {
    let power = (limited(x[row + column]) - best) * factor;
    let bounded = max(power, -126.0);
    let whole = round(bounded);
    let f = bounded - whole;
    var series = 0.0001540353 * f + 0.0013333558;
    series = series * f + 0.009618129;
    series = series * f + 0.05550411;
    series = series * f + 0.2402265;
    series = series * f + 0.69314718;
    series = series * f + 1.0;
    // No weight is above 1, whatever the last bit of the series is.
    let weight = min(series * bitcast<f32>(u32(i32(whole) + 127) << 23u), 1.0);
    return select(0u, u32(weight * ONE), power >= -126.0);
}

// Sets `kept_weight` and `kept_ties` to the fewest first tokens that reach `goal`, by their number or
// by the sum of their weights. Tokens reach it.
fn keep_first(thread: u32, by_sum: bool) {
    if (thread == 0u) { kept_weight = 0u; }
    workgroupBarrier();
    for (var digit = 0u; digit < 4u; digit += 1u) {
        // Of 31 bits.
        let shift = u32(max(23i - 8i * i32(digit), 0i));
        let size = select(8u, 7u, digit == 3u);
        for (var i = thread; i < 256u; i += THREADS) {
            atomicStore(&bin_counts[i], 0u);
            atomicStore(&bin_lows[i], 0u);
            atomicStore(&bin_highs[i], 0u);
        }
        let prefix = workgroupUniformLoad(&kept_weight);
        for (var i = thread; i < args.width; i += THREADS) {
            let weight = weight_at(i);
            let bin = (weight >> shift) & ((1u << size) - 1u);
            // Most tokens have the lowest digits, which nobody looks at: what no other bin reaches,
            // this one does.
            if (bin > 0u && (weight >> (shift + size)) == prefix) {
                atomicAdd(&bin_counts[bin], 1u);
                if (atomicAdd(&bin_lows[bin], weight) > ALL - weight) {
                    atomicAdd(&bin_highs[bin], 1u);
                }
            }
        }
        workgroupBarrier();
        if (thread == 0u) {
            var bin = (1u << size) - 1u;
            for (; bin > 0u; bin -= 1u) {
                let sum = vec2<u32>(atomicLoad(&bin_lows[bin]), atomicLoad(&bin_highs[bin]));
                let part = select(vec2<u32>(atomicLoad(&bin_counts[bin]), 0u), sum, by_sum);
                if (!is_less(part, goal)) { break; }
                goal = sub(goal, part);
            }
            kept_weight = (prefix << size) | bin;
        }
        workgroupBarrier();
    }
    if (thread == 0u) {
        kept_ties = goal.x;
        if (by_sum) {
            // The fewest equal weights that reach the rest.
            var most = args.width;
            var least = 1u;
            while (least < most) {
                let middle = (least + most) / 2u;
                if (is_less(times(middle, kept_weight), goal)) { least = middle + 1u; } else { most = middle; }
            }
            kept_ties = least;
        }
    }
    workgroupBarrier();
}

// The sum of the kept tokens of a part of the row, from `first` on, and the number of those that
// have just the weight `least`, for each segment of `size` tokens: of each lane of the segment.
fn sum_segments(thread: u32, span: vec2<u32>, size: u32, least: u32) {
    var sum = vec2<u32>(0u);
    var ties = 0u;
    let first = span.x + thread / LANES * size;
    let end = min(first + size, span.x + span.y);
    for (var i = first + thread % LANES; i < end; i += LANES) {
        let weight = weight_at(i);
        if (weight > least) { sum = add(sum, vec2<u32>(weight, 0u)); }
        ties += select(0u, 1u, weight == least);
    }
    lane_sums[thread] = sum;
    lane_ties[thread] = ties;
    workgroupBarrier();
    if (thread % LANES == 0u) {
        for (var i = 1u; i < LANES; i += 1u) {
            sum = add(sum, lane_sums[thread + i]);
            ties += lane_ties[thread + i];
        }
        lane_sums[thread] = sum;
        lane_ties[thread] = ties;
    }
    workgroupBarrier();
}

$KEY

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) id: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let choice = args.choices + id.x * 5u;
    // The largest of the parts.
    if (thread == 0u) {
        place = parts[id.x * args.parts];
        for (var i = 1u; i < args.parts; i += 1u) {
            let part = parts[id.x * args.parts + i];
            if (key(part.y) > key(place.y)) { place = part; }
        }
    }
    workgroupBarrier();
    let largest = workgroupUniformLoad(&place);
    row = id.x * args.stride;
    factor = bitcast<f32>(tables[choice]);
    best = limited(bitcast<f32>(largest.y));
    let top_k = tables[choice + 1u];
    let share = tables[choice + 2u];
    let least = tables[choice + 3u];
    let is_finite = (largest.y & 0x7f800000u) != 0x7f800000u;
    if (factor == 0.0 || !is_finite) {
        if (thread == 0u) { out[id.x] = largest; }
        return;
    }
    if (thread == 0u) {
        kept_weight = 0u;
        kept_ties = 0u;
        place = vec2<u32>(0u, args.width);
    }
    workgroupBarrier();
    if (top_k > 0u && top_k < args.width) {
        if (thread == 0u) { goal = vec2<u32>(top_k, 0u); }
        keep_first(thread, false);
    }
    if (share != ALL) {
        sum_segments(thread, vec2<u32>(0u, args.width), (args.width + SEGMENTS - 1u) / SEGMENTS, kept_weight);
        if (thread == 0u) {
            var sum = times(kept_ties, kept_weight);
            for (var i = 0u; i < SEGMENTS; i += 1u) { sum = add(sum, lane_sums[i * LANES]); }
            goal = share_of(sum, share);
            if (goal.x == 0u && goal.y == 0u) { goal.x = 1u; }
        }
        workgroupBarrier();
        keep_first(thread, true);
    }
    if (thread == 0u && least > kept_weight) {
        kept_weight = least - 1u;
        kept_ties = 0u;
    }
    let weight = workgroupUniformLoad(&kept_weight);
    // Narrows the row to a segment, until a token is left. `goal` is how far the draw is from the
    // segment's beginning.
    var drawn = false;
    while (workgroupUniformLoad(&place).y > 1u) {
        let span = place;
        let size = (span.y + SEGMENTS - 1u) / SEGMENTS;
        sum_segments(thread, span, size, weight);
        if (thread == 0u) {
            if (!drawn) {
                goal = times(kept_ties, weight);
                for (var i = 0u; i < SEGMENTS; i += 1u) { goal = add(goal, lane_sums[i * LANES]); }
                goal = share_of(goal, tables[choice + 4u]);
            }
            var found = vec2<u32>(largest.x, 1u);
            for (var i = 0u; i * size < span.y; i += 1u) {
                let ties = min(lane_ties[i * LANES], kept_ties);
                let sum = add(lane_sums[i * LANES], times(ties, weight));
                if (is_less(goal, sum)) {
                    found = vec2<u32>(span.x + i * size, min(size, span.y - i * size));
                    break;
                }
                goal = sub(goal, sum);
                kept_ties -= ties;
            }
            place = found;
        }
        drawn = true;
        workgroupBarrier();
    }
    if (thread == 0u) {
        out[id.x] = vec2<u32>(place.x, bitcast<u32>(x[row + place.x]));
    }
}
