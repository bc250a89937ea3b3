// Weights of residual streams from the products of their norm, in place: `pre`, `post`, and a
// matrix whose rows and columns are divided by their sums in turn (StreamSpec). A thread has a row.
struct Args {
    row: u32, end: u32, stride: u32, streams: u32, columns: u32, table: u32, iterations: u32, eps: f32,
    pre: f32, post: f32, mix: f32,
}
var<immediate> args: Args;
@group(0) @binding(0) var<storage, read> base: array<u32>;
@group(0) @binding(1) var<storage, read_write> x: array<f32>;
fn base_of(column: u32) -> f32 { return bitcast<f32>(base[args.table + column]); }
@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) id: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let row = args.row + id.x * 64u + thread;
    if (row >= args.end) { return; }
    let n = args.streams;
    let at = row * args.stride;
    for (var c = 0u; c < n; c++) {
        x[at + c] = 1.0 / (1.0 + exp(-fma(x[at + c], args.pre, base_of(c)))) + args.eps;
    }
    if (args.columns == n) { return; }
    for (var c = n; c < 2u * n; c++) {
        x[at + c] = 2.0 / (1.0 + exp(-fma(x[at + c], args.post, base_of(c))));
    }
    var mixed: array<f32, $MIXEDu>;
    for (var i = 0u; i < n; i++) {
        var largest = -3.0e38;
        for (var j = 0u; j < n; j++) {
            let c = (2u + i) * n + j;
            let value = fma(x[at + c], args.mix, base_of(c));
            mixed[i * n + j] = value;
            largest = max(largest, value);
        }
        var sum = 0.0;
        for (var j = 0u; j < n; j++) {
            let value = exp(mixed[i * n + j] - largest);
            mixed[i * n + j] = value;
            sum += value;
        }
        for (var j = 0u; j < n; j++) { mixed[i * n + j] = mixed[i * n + j] / sum + args.eps; }
    }
    for (var iteration = 0u; iteration < args.iterations; iteration++) {
        if (iteration > 0u) {
            for (var i = 0u; i < n; i++) {
                var sum = args.eps;
                for (var j = 0u; j < n; j++) { sum += mixed[i * n + j]; }
                for (var j = 0u; j < n; j++) { mixed[i * n + j] /= sum; }
            }
        }
        for (var j = 0u; j < n; j++) {
            var sum = args.eps;
            for (var i = 0u; i < n; i++) { sum += mixed[i * n + j]; }
            for (var i = 0u; i < n; i++) { mixed[i * n + j] /= sum; }
        }
    }
    for (var i = 0u; i < n * n; i++) { x[at + 2u * n + i] = mixed[i]; }
}
