// Rows as levels with a scale for each block of 32 columns, times a norm's weights if args.norm is
// 1. For each block the scale, and the scale times the sum of the levels; then the same sums of its
// first and its second half. With a norm, also the sum of the squares of a block: products divide
// by the root of the row's mean square. A workgroup takes 64 blocks of a row.
struct Args { row: u32, x_stride: u32, x_blocks: u32, norm: u32 }
var<immediate> args: Args;
@group(0) @binding(0) var<storage, read> weight: array<vec4<f32>>;
@group(0) @binding(1) var<storage, read> x: array<vec4<f32>>;
@group(0) @binding(2) var<storage, read_write> levels_out: array<u32>;
@group(0) @binding(3) var<storage, read_write> scales_out: array<vec2<f32>>;
@group(0) @binding(4) var<storage, read_write> squares_out: array<f32>;
const THREADS = 512u;
var<workgroup> squares: array<f32, 512>;
// Of a block: the bits of the largest magnitude, and the sums of levels of both halves.
var<workgroup> largest: array<atomic<u32>, 64>;
var<workgroup> totals: array<atomic<i32>, 128>;

$LEVELS

@compute @workgroup_size(512)
fn main(@builtin(workgroup_id) id: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let row = args.row + id.x;
    let quads = args.x_blocks * 8u;
    let quad = id.y * THREADS + thread;
    if (thread < 64u) { atomicStore(&largest[thread], 0u); }
    if (thread < 128u) { atomicStore(&totals[thread], 0); }
    var value = vec4<f32>(0.0);
    if (quad < quads) { value = x[row * args.x_stride + quad]; }
    if (args.norm == 1u) {
        squares[thread] = square_of(value);
        if (quad < quads) { value = value * weight[quad]; }
    }
    workgroupBarrier();
    let block = thread / 8u;
    let half = thread / 4u;
    // As bits a NaN is larger than all numbers.
    let bits = bitcast<vec4<u32>>(value) & vec4<u32>(0x7fffffffu);
    atomicMax(&largest[block], max(max(bits.x, bits.y), max(bits.z, bits.w)));
    workgroupBarrier();
    // What is not finite stays in the scale, and so in every product.
    let most_bits = atomicLoad(&largest[block]);
    let most = bitcast<f32>(most_bits);
    let inverse = select(0.0, MOST / most, most_bits > 0u);
    let rounded = vec4<i32>(round(value * inverse));
    atomicAdd(&totals[half], rounded.x + rounded.y + rounded.z + rounded.w);
    if (quad < quads) { store(row, quad, rounded); }
    workgroupBarrier();
    if (quad < quads && thread % 8u == 0u) {
        let scale = most / MOST;
        let low = atomicLoad(&totals[half]);
        let high = atomicLoad(&totals[half + 1u]);
        let at = row * args.x_blocks * 2u + quad / 8u;
        scales_out[at] = vec2<f32>(scale, scale * f32(low + high));
        scales_out[at + args.x_blocks] = vec2<f32>(scale * f32(low), scale * f32(high));
        if (args.norm == 1u) {
            var square = squares[thread];
            for (var i = 1u; i < 8u; i++) { square += squares[thread + i]; }
            squares_out[row * args.x_blocks + quad / 8u] = square;
        }
    }
}
