// The column of each row's largest number, of those of its parts, to where the next step's
// embedding looks for tokens. Numbers are ordered as by the kernel that found them. A workgroup has
// a row.
struct Args { parts: u32, to: u32 }
var<immediate> args: Args;
@group(0) @binding(0) var<storage, read> parts: array<vec2<u32>>;
@group(0) @binding(1) var<storage, read_write> tokens: array<u32>;
var<workgroup> keys: array<u32, 64>;
var<workgroup> columns: array<u32, 64>;

$KEY

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) id: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    keys[thread] = 0u;
    columns[thread] = 0xffffffffu;
    if (thread < args.parts) {
        let part = parts[id.x * args.parts + thread];
        keys[thread] = key(part.y);
        columns[thread] = part.x;
    }
    workgroupBarrier();
    for (var half = 32u; half > 0u; half /= 2u) {
        if (thread < half) {
            let k = keys[thread + half];
            let c = columns[thread + half];
            if (k > keys[thread] || (k == keys[thread] && c < columns[thread])) {
                keys[thread] = k;
                columns[thread] = c;
            }
        }
        workgroupBarrier();
    }
    if (thread == 0u) { tokens[args.to + id.x] = columns[0]; }
}
