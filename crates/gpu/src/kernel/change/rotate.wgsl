// Rotates parts of rows: pairs of columns from each of some first columns on.
struct Args { row: u32, stride: u32, firsts: u32, count: u32, turns: u32, pairs: u32, interleaved: u32, back: u32 }
var<immediate> args: Args;
// The first columns; then cosine and sine of each pair, for each row.
@group(0) @binding(0) var<storage, read> table: array<u32>;
@group(0) @binding(1) var<storage, read_write> x: array<f32>;
@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) id: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let i = id.x * 256u + thread;
    if (i < args.count * args.pairs) {
        let pair = i % args.pairs;
        let at = (args.row + id.y) * args.stride + table[args.firsts + i / args.pairs];
        let turn = args.turns + (id.y * args.pairs + pair) * 2u;
        let cosine = bitcast<f32>(table[turn]);
        var sine = bitcast<f32>(table[turn + 1u]);
        if (args.back == 1u) { sine = -sine; }
        let a_at = at + select(pair, 2u * pair, args.interleaved == 1u);
        let b_at = at + select(pair + args.pairs, 2u * pair + 1u, args.interleaved == 1u);
        let a = x[a_at];
        let b = x[b_at];
        x[a_at] = fma(a, cosine, -(b * sine));
        x[b_at] = fma(b, cosine, a * sine);
    }
}
