$LEVELS
const LEFT_QUADS = $QUADSu;
// Blocks of 32 numbers of a row.
var<workgroup> left: array<f32, LEFT_QUADS * 4u>;
var<workgroup> left_most: array<u32, LEFT_QUADS>;
var<workgroup> left_sums: array<i32, LEFT_QUADS>;
var<workgroup> left_squares: array<f32, LEFT_QUADS>;

// Leaves the numbers in `left` as levels, from block `first` of a row on. All threads of the
// workgroup call it. The arithmetic is that of the kernel quantize: it must not matter which of
// them rounds a row.
fn leave_levels(row: u32, first: u32, thread: u32) {
    workgroupBarrier();
    let has_quad = thread < LEFT_QUADS;
    let quad = min(thread, LEFT_QUADS - 1u);
    var value = vec4<f32>(left[4u * quad], left[4u * quad + 1u], left[4u * quad + 2u], left[4u * quad + 3u]);
    if (has_quad) { left_squares[quad] = square_of(value); }
    $WEIGH
    let bits = bitcast<vec4<u32>>(value) & vec4<u32>(0x7fffffffu);
    if (has_quad) { left_most[quad] = max(max(bits.x, bits.y), max(bits.z, bits.w)); }
    workgroupBarrier();
    var most_bits = 0u;
    for (var i = 0u; i < 8u; i++) { most_bits = max(most_bits, left_most[quad / 8u * 8u + i]); }
    let most = bitcast<f32>(most_bits);
    let inverse = select(0.0, MOST / most, most_bits > 0u);
    let rounded = vec4<i32>(round(value * inverse));
    if (has_quad) {
        left_sums[quad] = rounded.x + rounded.y + rounded.z + rounded.w;
        store(row, first * 8u + quad, rounded);
    }
    workgroupBarrier();
    if (has_quad && quad % 8u == 0u) {
        let scale = most / MOST;
        let low = left_sums[quad] + left_sums[quad + 1u] + left_sums[quad + 2u] + left_sums[quad + 3u];
        let high = left_sums[quad + 4u] + left_sums[quad + 5u] + left_sums[quad + 6u] + left_sums[quad + 7u];
        let block = first + quad / 8u;
        let at = row * args.x_blocks * 2u + block;
        scales_out[at] = vec2<f32>(scale, scale * f32(low + high));
        scales_out[at + args.x_blocks] = vec2<f32>(scale * f32(low), scale * f32(high));
        $SQUARE
    }
}
