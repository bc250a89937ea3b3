// Rows as bytes with a scale for each block of 32 columns, after an RMS norm if args.norm is 1. For
// each block the scale, and the scale times the sum of the bytes of the first and of the second half.
struct Args { width: u32, row: u32, x_stride: u32, blocks: u32, eps: f32, norm: u32 }
var<immediate> args: Args;
@group(0) @binding(0) var<storage, read> weight: array<vec4<f32>>;
@group(0) @binding(1) var<storage, read> x: array<vec4<f32>>;
@group(0) @binding(2) var<storage, read_write> bytes: array<vec4<u32>>;
@group(0) @binding(3) var<storage, read_write> scales: array<vec4<f32>>;
var<workgroup> sums: array<f32, 128>;

// The bits of the largest magnitude: a NaN is larger than all numbers.
fn largest(v: vec4<f32>) -> u32 {
    let bits = bitcast<vec4<u32>>(v) & vec4<u32>(0x7fffffffu);
    return max(max(bits.x, bits.y), max(bits.z, bits.w));
}

@compute @workgroup_size(128)
fn main(@builtin(workgroup_id) id: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let row = args.row + id.x;
    let source = row * args.x_stride;
    var factor = 1.0;
    if (args.norm == 1u) {
        var sum = 0.0;
        for (var i = thread; i < args.blocks * 8u; i += 128u) { sum += dot(x[source + i], x[source + i]); }
        sums[thread] = sum;
        workgroupBarrier();
        for (var half = 64u; half > 0u; half /= 2u) {
            if (thread < half) { sums[thread] += sums[thread + half]; }
            workgroupBarrier();
        }
        factor = 1.0 / sqrt(sums[0] / f32(args.width) + args.eps);
    }
    for (var block = thread; block < args.blocks; block += 128u) {
        var values: array<vec4<f32>, 8>;
        var most_bits = 0u;
        for (var q = 0u; q < 8u; q++) {
            var value = x[source + block * 8u + q];
            if (args.norm == 1u) { value = value * factor * weight[block * 8u + q]; }
            values[q] = value;
            most_bits = max(most_bits, largest(value));
        }
        // What is not finite stays in the scale, and so in every product.
        let most = bitcast<f32>(most_bits);
        let scale = most / 127.0;
        let inverse = select(0.0, 127.0 / most, most_bits > 0u);
        var words: array<u32, 8>;
        var halves = array<f32, 2>(0.0, 0.0);
        for (var q = 0u; q < 8u; q++) {
            let levels = round(values[q] * inverse);
            words[q] = pack4xI8(vec4<i32>(levels));
            halves[q / 4u] += dot(levels, vec4<f32>(1.0));
        }
        let at = row * args.blocks + block;
        bytes[at * 2u] = vec4<u32>(words[0], words[1], words[2], words[3]);
        bytes[at * 2u + 1u] = vec4<u32>(words[4], words[5], words[6], words[7]);
        scales[at] = vec4<f32>(scale, scale * halves[0], scale * halves[1], 0.0);
    }
}
