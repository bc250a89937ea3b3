// Rows as f16, after an RMS norm if args.norm is 1. A row is multiplied with a power of two, so
// that its largest magnitude is between 2^14 and 2^15; scales has the power's inverse.
enable f16;
struct Args { width: u32, row: u32, x_stride: u32, quads: u32, eps: f32, norm: u32, stride: u32 }
var<immediate> args: Args;
@group(0) @binding(0) var<storage, read> weight: array<vec4<f32>>;
@group(0) @binding(1) var<storage, read> x: array<vec4<f32>>;
@group(0) @binding(2) var<storage, read_write> halves: array<vec4<f16>>;
@group(0) @binding(3) var<storage, read_write> scales: array<f32>;
var<workgroup> sums: array<f32, 256>;
var<workgroup> most: array<u32, 256>;

fn value(source: u32, i: u32, factor: f32) -> vec4<f32> {
    if (args.norm == 1u) { return x[source + i] * factor * weight[i]; }
    return x[source + i];
}

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) id: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let row = args.row + id.x;
    let source = row * args.x_stride;
    var factor = 1.0;
    if (args.norm == 1u) {
        var sum = 0.0;
        for (var i = thread; i < args.quads; i += 256u) { sum += dot(x[source + i], x[source + i]); }
        sums[thread] = sum;
        workgroupBarrier();
        for (var half = 128u; half > 0u; half /= 2u) {
            if (thread < half) { sums[thread] += sums[thread + half]; }
            workgroupBarrier();
        }
        factor = 1.0 / sqrt(sums[0] / f32(args.width) + args.eps);
    }
    // The bits of the largest magnitude: a NaN is larger than all numbers.
    var mine = 0u;
    for (var i = thread; i < args.quads; i += 256u) {
        let bits = bitcast<vec4<u32>>(value(source, i, factor)) & vec4<u32>(0x7fffffffu);
        mine = max(mine, max(max(bits.x, bits.y), max(bits.z, bits.w)));
    }
    most[thread] = mine;
    workgroupBarrier();
    for (var half = 128u; half > 0u; half /= 2u) {
        if (thread < half) { most[thread] = max(most[thread], most[thread + half]); }
        workgroupBarrier();
    }
    let power = clamp(141 - i32(most[0] >> 23u), -120, 120);
    let scale = bitcast<f32>(u32(127 + power) << 23u);
    for (var i = thread; i < args.stride; i += 256u) {
        var scaled = vec4<f32>(0.0);
        if (i < args.quads) { scaled = value(source, i, factor) * scale; }
        halves[row * args.stride + i] = vec4<f16>(scaled);
    }
    if (thread == 0u) { scales[row] = bitcast<f32>(u32(127 - power) << 23u); }
}
