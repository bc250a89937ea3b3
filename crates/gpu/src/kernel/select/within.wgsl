// Scores of keys outside of a row's blocks become lower than all others. The number of keys in
// these blocks follows the scores.
struct Args { table: u32, every: u32, keys: u32, score_stride: u32, first: u32, row: u32, chosen_stride: u32 }
var<immediate> args: Args;
@group(0) @binding(0) var<storage, read> tables: array<u32>;
@group(0) @binding(1) var<storage, read> chosen: array<f32>;
@group(0) @binding(2) var<storage, read_write> scores: array<u32>;
@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) id: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let row = args.row + id.y;
    let visible = (tables[args.table + row * 4u] + 1u) / args.every;
    let list = row * args.chosen_stride;
    let count = u32(chosen[list]);
    let source = id.y * args.score_stride;
    let key = id.x * 256u + thread;
    if (key < visible) {
        // The first chosen block that is not before the key's.
        let block = f32(key / args.keys);
        var low = 0u;
        var high = count;
        while (low < high) {
            let middle = (low + high) / 2u;
            if (chosen[list + 1u + middle] < block) { low = middle + 1u; } else { high = middle; }
        }
        if (low == count || chosen[list + 1u + min(low, count - 1u)] != block) { scores[source + key] = 0xffffffffu; }
    }
    if (key == 0u) {
        var keys = count * args.keys;
        // Only the last block may be incomplete.
        let all = (visible + args.keys - 1u) / args.keys;
        if (count > 0u && u32(chosen[list + count]) + 1u == all) { keys -= all * args.keys - visible; }
        scores[source + args.first] = keys;
    }
}
