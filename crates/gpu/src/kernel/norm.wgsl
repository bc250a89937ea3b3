// out[r] = x[r] / sqrt(mean(x[r]^2) + eps) * weight. A workgroup has a row. Up to 4 quads of it stay
// with a thread, so that everything is asked for at once.
struct Args { width: u32, row: u32, x_stride: u32, out_stride: u32, eps: f32 }
var<immediate> args: Args;
@group(0) @binding(0) var<storage, read> weight: array<vec4<f32>>;
@group(0) @binding(1) var<storage, read> x: array<vec4<f32>>;
@group(0) @binding(2) var<storage, read_write> out: array<vec4<f32>>;
$ROOT$LEAVING
@compute @workgroup_size(512)
fn main(@builtin(workgroup_id) id: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let source = (args.row + id.x) * args.x_stride / 4u;
    let to = (args.row + id.x) * args.out_stride / 4u;
    let quads = (args.width + 3u) / 4u;
    var sum = 0.0;
    $READ
    $SQUARES
    for (var quad = thread + 4u * THREADS; quad < quads; quad += THREADS) {
        sum += squares_of(x[source + quad]);
    }
    let rms = root_of(sum, thread);
    $WRITE
    for (var quad = thread + 4u * THREADS; quad < quads; quad += THREADS) {
        out[to + quad] = x[source + quad] / rms * weight[quad];
    }
    $LEAVE
}
