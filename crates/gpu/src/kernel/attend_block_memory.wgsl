const NONE = -3.0e38;
// Quads from a line to the next: odd, so that threads read different banks.
const PITCH = 17u;
// Quads from a query's weights to the next query's.
const WEIGHTS = 9u;
// 64 columns of 32 queries and of 32 keys: lines of 16 quads. Or four parts of each score, or the
// vectors of 8 tokens.
var<workgroup> tile: array<vec4<f32>, 1088>;
var<workgroup> weights: array<vec4<f32>, 288>;
// Of each thread's four tokens: the largest score, and the sum of the weights.
var<workgroup> maxima: array<f32, 256>;
var<workgroup> sums: array<f32, 256>;
// Of each query: what earlier sums shrink by. At the end: a divisor.
var<workgroup> factors: array<f32, 32>;

fn dots(a: vec4<f32>, b: vec4<f32>, sum: f32) -> f32 {
    return fma(a.w, b.w, fma(a.z, b.z, fma(a.y, b.y, fma(a.x, b.x, sum))));
}
