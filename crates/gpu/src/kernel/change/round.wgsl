// Rounds groups of columns to few bits, in place, as `Rounding::apply` does. Scales and ties are
// found by comparing exact products, because devices may round quotients otherwise than CPUs.
struct Args { row: u32, stride: u32, count: u32, kind: u32 }
var<immediate> args: Args;
@group(0) @binding(0) var<storage, read_write> x: array<f32>;
// The columns' magnitudes as words, which have the same order.
var<workgroup> sizes: array<u32, 256>;
const INFINITE = 0x7f800000u;
fn exponent_of(bits: u32) -> i32 { return i32(bits >> 23u) - 127; }
fn power_of_two(exponent: i32) -> f32 { return bitcast<f32>(u32(exponent + 127) << 23u); }
// The nearest E2M1 float of a magnitude in units of `scale`; of two, the even one.
fn level(size: f32, scale: f32) -> f32 {
    var found = 0.0;
    if (size > 0.25 * scale) { found = 0.5; }
    if (size >= 0.75 * scale) { found = 1.0; }
    if (size > 1.25 * scale) { found = 1.5; }
    if (size >= 1.75 * scale) { found = 2.0; }
    if (size > 2.5 * scale) { found = 3.0; }
    if (size >= 3.5 * scale) { found = 4.0; }
    if (size > 5.0 * scale) { found = 6.0; }
    return found * scale;
}
// The E4M3 float that is nearest to a sixth of `size`.
fn sixth(size: f32) -> f32 {
    let step = max(exponent_of(bitcast<u32>(size / 6.0)), -6) - 3;
    let sixths = size * power_of_two(-step);
    // May be one too few; then the rest is 6 or more.
    var count = floor(sixths / 6.0);
    let rest = fma(-6.0, count, sixths);
    if (rest > 3.0 || (rest == 3.0 && (i32(count) & 1) == 1)) { count += 1.0; }
    return min(count * power_of_two(step), 448.0);
}
@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) id: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let column = id.x * 256u + thread;
    let at = (args.row + id.y) * args.stride + column;
    var bits = 0u;
    if (column < args.count) { bits = bitcast<u32>(x[at]); }
    let own = bits & 0x7fffffffu;
    // What is no number does not count.
    sizes[thread] = select(own, 0u, own > INFINITE);
    workgroupBarrier();
    let group = select(32u, 16u, args.kind == 2u);
    var largest = 0u;
    for (var i = thread / group * group; i < (thread / group + 1u) * group; i++) { largest = max(largest, sizes[i]); }
    // What is not finite stays as it is.
    if (column >= args.count || own >= INFINITE || largest == INFINITE) { return; }
    let size = bitcast<f32>(own);
    var rounded = 0.0;
    if (args.kind == 0u) {
        // The largest number is at most 448 = 1.75 * 2^8 times the scale.
        largest = max(largest, bitcast<u32>(1e-4f));
        let power = exponent_of(largest) - select(8, 7, (largest & 0x7fffffu) > 0x600000u);
        let scaled = size * power_of_two(-power);
        let step = max(exponent_of(bitcast<u32>(scaled)), -6) - 3;
        rounded = min(round(scaled * power_of_two(-step)) * power_of_two(step), 448.0) * power_of_two(power);
    } else if (args.kind == 1u) {
        // At most 6 = 1.5 * 2^2 times the scale, which is at least the least normal number.
        largest = max(largest, 0x01c00000u);
        let power = exponent_of(largest) - select(2, 1, (largest & 0x7fffffu) > 0x400000u);
        rounded = level(size, power_of_two(power));
    } else {
        rounded = level(size, sixth(max(bitcast<f32>(largest), 6.0 / 512.0)));
    }
    x[at] = bitcast<f32>(bitcast<u32>(rounded) | (bits & 0x80000000u));
}
