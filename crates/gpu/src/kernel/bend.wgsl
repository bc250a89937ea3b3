// x[i] = curve(x[i]), in place. Columns after a row's last are zero, as the curve of zero is.
struct Args { first: u32, count: u32, groups: u32, curve: u32 }
var<immediate> args: Args;
@group(0) @binding(0) var<storage, read_write> x: array<f32>;

// tanh(x) = 1 - 2 / (e^2x + 1), which is right where e^2x is infinite; a series near 0.
fn tanh_of(x: f32) -> f32 {
    let square = x * x;
    if (square < 0.04) {
        return x * (1.0 - square * (0.33333334 - square * (0.13333334 - square * 0.053968254)));
    }
    return 1.0 - 2.0 / (exp(2.0 * x) + 1.0);
}

$GELU
fn curve_of(x: f32) -> f32 {
    switch (args.curve) {
        case 0u: { let positive = max(x, 0.0); return positive * positive; }
        case 1u: { return max(x, 0.0); }
        case 2u: { return gelu_of(x); }
        case 3u: { return 0.5 * x * (1.0 + tanh_of(0.79788456 * fma(0.044715 * x, x * x, x))); }
        case 4u: { return x / (1.0 + exp(-x)); }
        default: { return tanh_of(x); }
    }
}

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) id: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    for (var i = id.x * 256u + thread; i < args.count; i += args.groups * 256u) {
        x[args.first + i] = curve_of(x[args.first + i]);
    }
}
