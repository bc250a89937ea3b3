// The weights of each row's given experts. A workgroup has a row.
struct Args {
    row: u32, logits_stride: u32, out_stride: u32, experts: u32,
    chosen: u32, scores: u32, correction: u32, group_count: u32,
    group_chosen: u32, group_best: u32, renormalise: u32, shared_expert: u32,
    scale: f32, table: u32,
}
var<immediate> args: Args;
@group(0) @binding(0) var<storage, read> assigned: array<u32>;
@group(0) @binding(1) var<storage, read> logits: array<f32>;
@group(0) @binding(2) var<storage, read_write> choices: array<f32>;
fn logit(at: u32) -> f32 { return logits[at]; }
// Given experts are the best ones.
fn rank_of(row: u32, expert: u32, score: f32) -> f32 {
    let first = args.table + (row - args.row) * args.chosen;
    for (var i = 0u; i < args.chosen; i++) {
        if (assigned[first + i] == expert) { return 1.0; }
    }
    return 0.0;
}
$ROUTE
@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) id: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let row = args.row + id.x;
    route(row, row * args.logits_stride, thread);
}
