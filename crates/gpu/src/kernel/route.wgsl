// Each row's experts and their weights. A workgroup has a row; all places are found at once.
struct Args {
    row: u32, logits_stride: u32, out_stride: u32, experts: u32,
    chosen: u32, scores: u32, correction: u32, group_count: u32,
    group_chosen: u32, group_best: u32, renormalise: u32, shared_expert: u32,
    scale: f32,
}
var<immediate> args: Args;
@group(0) @binding(0) var<storage, read> correction: array<f32>;
@group(0) @binding(1) var<storage, read> logits: array<f32>;
@group(0) @binding(2) var<storage, read_write> choices: array<f32>;
fn logit(at: u32) -> f32 { return logits[at]; }
$RANK$ROUTE
@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) id: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let row = args.row + id.x;
    route(row, row * args.logits_stride, thread);
}
