$LEVELS
const LEFT_QUADS = $QUADSu;
// Blocks of 32 numbers of a row.
$LEFT$MEMORY
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
    let most_of_quad = max(max(bits.x, bits.y), max(bits.z, bits.w));
    $MOST
    let most = bitcast<f32>(most_bits);
    let inverse = select(0.0, MOST / most, most_bits > 0u);
    let rounded = vec4<i32>(round(value * inverse));
    let sum_of_quad = rounded.x + rounded.y + rounded.z + rounded.w;
    if (has_quad) { store(row, first * 8u + quad, rounded); }
    $SUMS
    if (has_quad && quad % 8u == 0u) {
        let scale = most / MOST;
        let low = $LOW;
        let high = $HIGH;
        let block = first + quad / 8u;
        let at = row * args.x_blocks * 2u + block;
        scales_out[at] = vec2<f32>(scale, scale * f32(low + high));
        scales_out[at + args.x_blocks] = vec2<f32>(scale * f32(low), scale * f32(high));
        $SQUARE
    }
}
