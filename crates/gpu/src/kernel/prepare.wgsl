// Heads of rows in place: norm of the first columns, rotation of some, and a scale. A workgroup has
// a head of a row.
struct Args {
    row: u32, stride: u32, first: u32, head_stride: u32,
    width: u32, norm_width: u32, eps: f32, rotate_from: u32,
    pairs: u32, interleaved: u32, rotations: u32, table: u32,
    scale: f32, beta: f32, original: u32,
}
var<immediate> args: Args;
// Of each row: position, first block of its sequence in the table of blocks, slot, its sequence's first row.
@group(0) @binding(0) var<storage, read> tables: array<u32>;
@group(0) @binding(1) var<storage, read> rotations: array<vec2<f32>>;
@group(0) @binding(2) var<storage, read> weight: array<f32>;
@group(0) @binding(3) var<storage, read_write> x: array<f32>;
var<workgroup> head: array<f32, 1024>;
var<workgroup> sums: array<f32, 64>;
@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) id: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let row = args.row + id.x;
    let source = row * args.stride + args.first + id.y * args.head_stride;
    var sum = 0.0;
    for (var i = thread; i < args.width; i += 64u) {
        let value = x[source + i];
        head[i] = value;
        if (i < args.norm_width) { sum = fma(value, value, sum); }
    }
    sums[thread] = sum;
    workgroupBarrier();
    for (var half = 32u; half > 0u; half /= 2u) {
        if (thread < half) { sums[thread] += sums[thread + half]; }
        workgroupBarrier();
    }
    if (args.norm_width > 0u) {
        let rms = sqrt(sums[0] / f32(args.norm_width) + args.eps);
        for (var i = thread; i < args.norm_width; i += 64u) { head[i] = head[i] / rms * weight[i]; }
    }
    workgroupBarrier();
    let rotate_from = args.rotate_from;
    $ROTATE
    workgroupBarrier();
    var scale = args.scale;
    if (args.original > 0u) {
        let position = tables[args.table + row * 4u];
        scale *= 1.0 + args.beta * log(1.0 + f32(position / args.original));
    }
    for (var i = thread; i < args.width; i += 64u) { x[source + i] = head[i] * scale; }
}
