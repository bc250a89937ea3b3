// Attention of a query head of up to 32 consecutive rows of a prompt to compressed vectors, which are
// keys and values: each block of 32 tokens is read once for all of them. Blocks are visited by their
// position, and what a row does not attend to changes none of its numbers, so its result does not
// depend on the other rows.
$PROMPTS
@group(0) @binding($TURNED) var<storage, read> turned: array<vec4<f32>>;
$MEMORY
@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) id: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
$TILE$PLACES    let my_position = start + mine;
    let my_start = first_visible(my_position);
    let my_last = min(my_position + args.after, newest);
    $STATE
    for (var block = visible / 32u; block * 32u <= last; block++) {
        let vector = (tables[blocks + block] * args.kv_heads + kv_head) * 32u;
$BLOCK    }
    if (column == 0u) { factors[mine] = total; }
    workgroupBarrier();
    $SUMS
}
