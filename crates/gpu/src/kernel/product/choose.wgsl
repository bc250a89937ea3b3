// A norm, its product with a router's matrix, and a row's experts. Each workgroup norms the row for
// itself and computes some logits; the last one chooses. One more leaves the norm and its levels.
struct Args {
    blocks: u32, shift: u32, outputs: u32, flags: u32,
    row: u32, x_stride: u32, width: u32, eps: f32,
    groups: u32, logits_stride: u32, out_stride: u32, experts: u32,
    chosen: u32, scores: u32, correction: u32, group_count: u32,
    group_chosen: u32, group_best: u32, renormalise: u32, shared_expert: u32,
    scale: f32,
}
var<immediate> args: Args;
$DECLARE
// The normed row.
var<workgroup> x: array<vec4<f32>, $QUADS>;
var<workgroup> own_logits: array<f32, $LOGITS>;
// Workgroups of the row that were ready before.
var<workgroup> arrived: u32;
fn logit(at: u32) -> f32 { return own_logits[at]; }
$RANK$ROOT
$LEAVING
$ENDS
$ROUTE
@compute @workgroup_size(512)
fn main(@builtin(workgroup_id) id: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let lane = thread % 32u;
    let warp = thread / 32u;
    let row = args.row + id.y;
    let source = row * args.x_stride / 4u;
    let quads = (args.width + 3u) / 4u;
    var sum = 0.0;
    $READ
    $SQUARES
    let rms = root_of(sum, thread);
    $NORM
    if (id.x == args.groups) {
        let to = row * args.blocks * 8u;
        $WRITE
        $LEAVE
        return;
    }
    workgroupBarrier();
    let base = 0u;
    let blocks = args.blocks;
    let outputs = args.outputs;
    let first = id.x * 16u + warp;
    let x0 = 0u;
    var acc0 = 0.0;
    $ACCUMULATE
    $ADD_LANES
    if (lane == 0u && first < outputs) {
        var value = $TOTAL;
        if ((args.flags & 1u) != 0u) { value += bias[first]; }
        atomicStore(&logits[COUNTERS + id.y * args.logits_stride + first], bitcast<u32>(value));
    }
    // The logits must be there before the count says so.
    storageBarrier();
    if (thread == 0u) { arrived = atomicAdd(&logits[id.y], 1u); }
    if (workgroupUniformLoad(&arrived) + 1u < args.groups) { return; }
    storageBarrier();
    if (thread == 0u) { atomicStore(&logits[id.y], 0u); }
    for (var e = thread; e < outputs; e += 512u) {
        own_logits[e] = bitcast<f32>(atomicLoad(&logits[COUNTERS + id.y * args.logits_stride + e]));
    }
    workgroupBarrier();
    // Threads that the choice has no use for are beyond all experts.
    route(row, 0u, select(0x40000000u, thread, thread < ROUTE_THREADS));
}
