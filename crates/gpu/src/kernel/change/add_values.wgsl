// Adds a value to a residual stream of a row: the value that follows the streams' keys, multiplied
// with the sigmoid of the signed root of the product of the stream's norm with its key's. A
// workgroup has a stream of a row.
struct Args { row: u32, made_stride: u32, stride: u32, width: u32, streams: u32, table: u32, eps: f32 }
var<immediate> args: Args;
@group(0) @binding(0) var<storage, read> weights: array<u32>;
@group(0) @binding(1) var<storage, read> made: array<f32>;
@group(0) @binding(2) var<storage, read_write> streams: array<f32>;
// Products, squares of the stream and of its key.
var<workgroup> sums: array<vec4<f32>, 256>;
@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) id: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let row = args.row + id.y;
    let first = id.x * args.width;
    let at = row * args.stride + first;
    let key_at = row * args.made_stride + first;
    let value_at = row * args.made_stride + args.streams * args.width;
    var sum = vec4<f32>(0.0);
    for (var i = thread; i < args.width; i += 256u) {
        let own = streams[at + i];
        let key = made[key_at + i];
        let weight = bitcast<f32>(weights[args.table + first + i]);
        sum = fma(vec4<f32>(own * weight, own, key, 0.0), vec4<f32>(key, own, key, 0.0), sum);
    }
    sums[thread] = sum;
    workgroupBarrier();
    for (var half = 128u; half > 0u; half /= 2u) {
        if (thread < half) { sums[thread] += sums[thread + half]; }
        workgroupBarrier();
    }
    let width = f32(args.width);
    let norms = sqrt((sums[0].y / width + args.eps) * (sums[0].z / width + args.eps));
    let product = sums[0].x / norms / sqrt(width);
    let root = sqrt(max(abs(product), 1e-6));
    let gate = 1.0 / (1.0 + exp(-select(-root, root, product >= 0.0)));
    for (var i = thread; i < args.width; i += 256u) {
        streams[at + i] = fma(gate, made[value_at + i], streams[at + i]);
    }
}
