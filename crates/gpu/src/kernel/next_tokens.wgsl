// Each row's largest number, of those of its parts: to where the next step's embedding looks for
// tokens, or to where the other ranks look for it. Numbers are ordered as by the kernel that found
// them. A workgroup has a row.
// `floats`: columns are stored as f32, because they were summed over ranks. `ranks`: parts of a row
// of the result, `rank` the one to fill in. `first`: the first column's token.
struct Args { parts: u32, to: u32, floats: u32, ranks: u32, rank: u32, first: u32 }
var<immediate> args: Args;
@group(0) @binding(0) var<storage, read> parts: array<vec2<u32>>;
@group(0) @binding(1) var<storage, read_write> out: array<u32>;
var<workgroup> keys: array<u32, 64>;
var<workgroup> columns: array<u32, 64>;
var<workgroup> values: array<u32, 64>;

$KEY
$END
@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) id: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    keys[thread] = 0u;
    columns[thread] = 0xffffffffu;
    values[thread] = 0xff800000u;
    if (thread < args.parts) {
        let part = parts[id.x * args.parts + thread];
        keys[thread] = key(part.y);
        columns[thread] = select(part.x, u32(bitcast<f32>(part.x)), args.floats != 0u);
        values[thread] = part.y;
    }
    workgroupBarrier();
    for (var half = 32u; half > 0u; half /= 2u) {
        if (thread < half) {
            let k = keys[thread + half];
            let c = columns[thread + half];
            if (k > keys[thread] || (k == keys[thread] && c < columns[thread])) {
                keys[thread] = k;
                columns[thread] = c;
                values[thread] = values[thread + half];
            }
        }
        workgroupBarrier();
    }
    end(id.x, thread);
}
