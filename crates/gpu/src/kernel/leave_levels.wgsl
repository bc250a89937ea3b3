$LEVELS
const LEFT_QUADS = $QUADSu;
// Blocks of 32 numbers of a row.
$LEFTvar<workgroup> left_most: array<u32, LEFT_QUADS>;
var<workgroup> left_sums: array<i32, LEFT_QUADS>;
$SQUARES
// Leaves a workgroup's numbers as levels, from block `first` of a row on. All threads of the
// workgroup call it. The arithmetic is that of the kernel quantize: it must not matter which of
// them rounds a row.
fn leave_levels(row: u32, first: u32, thread: u32) {
    workgroupBarrier();
    let has_quad = thread < $USED;
    let quad = min(thread, LEFT_QUADS - 1u);
    var value = $VALUE;
    $WEIGH
    let bits = bitcast<vec4<u32>>(value) & vec4<u32>(0x7fffffffu);
    if (has_quad) { left_most[quad] = max(max(bits.x, bits.y), max(bits.z, bits.w)); }
    workgroupBarrier();
    // Loops are not unrolled by all compilers: each round would wait for the one before.
    let eighth = quad / 8u * 8u;
    let most_low = max(max(left_most[eighth], left_most[eighth + 1u]), max(left_most[eighth + 2u], left_most[eighth + 3u]));
    let most_high = max(max(left_most[eighth + 4u], left_most[eighth + 5u]), max(left_most[eighth + 6u], left_most[eighth + 7u]));
    let most_bits = max(most_low, most_high);
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
        $STORE
    }
}
