// Adds the splits of a query head of a row. A workgroup has 32 columns; of each, 8 threads read
// every eighth split, all at once.
struct Args {
    row: u32, heads: u32, splits: u32, part_stride: u32,
    out_stride: u32, out_first: u32, out_dim: u32, table: u32,
    window: u32, sinks: u32, x_blocks: u32, chunk: u32,
}
var<immediate> args: Args;
@group(0) @binding(0) var<storage, read> tables: array<u32>;
@group(0) @binding(1) var<storage, read> sinks: array<f32>;
@group(0) @binding(2) var<storage, read> parts: array<f32>;
@group(0) @binding(3) var<storage, read_write> out: array<f32>;
$LEAVE
const NONE = -3.0e38;
var<workgroup> most: array<f32, $READSu * 8u>;
// Values and sums of weights.
var<workgroup> sums: array<vec2<f32>, 256>;
$SPLIT
@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) id: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let head = id.x;
    let row = args.row + id.y;
    let d = id.z * 32u + thread % 32u;
    let first = thread / 32u;
    let end = tables[args.table + row * 4u] + 1u;
    let visible = first_visible(end - 1u);
    let size = tokens_of_split(visible, end);
    let count = (end - 1u) / size + 1u - visible / size;
    let source = (id.y * args.heads + head) * args.splits * args.part_stride;
    if (thread < $READSu * 8u) {
        most[thread] = select(NONE, parts[source + min(thread, count - 1u) * args.part_stride], thread < count);
    }
    let column = min(d, args.out_dim - 1u) + 2u;
    $READ
    workgroupBarrier();
    var largest = NONE;
    if (args.sinks == 1u) { largest = sinks[head]; }
    for (var i = 0u; i < $READSu * 8u; i++) { largest = max(largest, most[i]); }
    var sum = vec2<f32>(0.0);
    $ADD
    sums[thread] = sum;
    workgroupBarrier();
    if (thread < 32u && d < args.out_dim) {
        var all = vec2<f32>(0.0);
        for (var i = 0u; i < 8u; i++) { all += sums[i * 32u + thread]; }
        if (args.sinks == 1u) { all.y += exp(sinks[head] - largest); }
        let value = all.x / all.y;
        out[row * args.out_stride + args.out_first + head * args.out_dim + d] = value;
        $KEEP
    }
    $LEVELS
}
