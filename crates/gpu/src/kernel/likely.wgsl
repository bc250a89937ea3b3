// How likely a row's chosen token is, and its likeliest tokens, as the choice module of thunder-compute
// describes. A workgroup has a row.
struct Args { width: u32, stride: u32, rows: u32, count: u32, cap: f32 }
var<immediate> args: Args;
@group(0) @binding(0) var<storage, read> x: array<f32>;
// Chosen columns and their values, for each row. After them, for each row: the largest logit, the
// logarithm of the sum of all exponentials relative to its own, the chosen logit, then `count` times an
// id and its logit.
@group(0) @binding(1) var<storage, read_write> out: array<u32>;
const THREADS = 256u;
const NONE = 0xffffffffu;
const NO_LOGIT = 0xff800000u;
var<workgroup> keys: array<u32, THREADS>;
var<workgroup> columns: array<u32, THREADS>;
var<workgroup> sums: array<f32, THREADS>;

$KEY
$LIMIT

fn key_at(at: u32) -> u32 { return key(bitcast<u32>(limited(x[at]))); }

// The largest key of all threads; of equal ones, that of the lowest column.
fn largest(thread: u32, k: u32, column: u32) -> vec2<u32> {
    keys[thread] = k;
    columns[thread] = column;
    workgroupBarrier();
    for (var half = THREADS / 2u; half > 0u; half /= 2u) {
        if (thread < half) {
            let other = keys[thread + half];
            let c = columns[thread + half];
            if (other > keys[thread] || (other == keys[thread] && c < columns[thread])) {
                keys[thread] = other;
                columns[thread] = c;
            }
        }
        workgroupBarrier();
    }
    let found = vec2<u32>(keys[0], columns[0]);
    workgroupBarrier();
    return found;
}

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) id: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let row = id.x * args.stride;
    let to = 2u * args.rows + id.x * (3u + 2u * args.count);
    // The thread's own columns are those that have its number modulo THREADS.
    var best = 0u;
    var column = NONE;
    for (var i = thread; i < args.width; i += THREADS) {
        let k = key_at(row + i);
        if (k > best) { best = k; column = i; }
    }
    let first = largest(thread, best, column);
    let most = limited(x[row + min(first.y, args.width - 1u)]);
    var sum = 0.0;
    for (var i = thread; i < args.width; i += THREADS) { sum += exp(limited(x[row + i]) - most); }
    sums[thread] = sum;
    workgroupBarrier();
    for (var half = THREADS / 2u; half > 0u; half /= 2u) {
        if (thread < half) { sums[thread] += sums[thread + half]; }
        workgroupBarrier();
    }
    if (thread == 0u) {
        out[to] = bitcast<u32>(most);
        out[to + 1u] = bitcast<u32>(log(sums[0]));
        let chosen = min(out[2u * id.x], args.width - 1u);
        out[to + 2u] = bitcast<u32>(limited(x[row + chosen]));
    }
    for (var n = 0u; n < args.count; n++) {
        let next = largest(thread, best, column);
        if (thread == 0u) {
            let at = to + 3u + 2u * n;
            out[at] = next.y;
            out[at + 1u] = select(NO_LOGIT, bitcast<u32>(limited(x[row + min(next.y, args.width - 1u)])), next.y != NONE);
        }
        // All threads look for the next of the columns from which this one is.
        let owner = next.y % THREADS;
        var k = 0u;
        var c = NONE;
        for (var i = owner + thread * THREADS; i < args.width; i += THREADS * THREADS) {
            let other = key_at(row + i);
            let is_later = other < next.x || (other == next.x && i > next.y);
            if (is_later && other > k) { k = other; c = i; }
        }
        let following = largest(thread, k, c);
        if (thread == owner) { best = following.x; column = following.y; }
    }
}
