// Column and value of the largest number of each part of a row; the first of equal ones. A NaN counts
// as larger than all numbers: its bits are looked at, as compilers may take comparisons for those of
// numbers.
struct Args { width: u32, stride: u32, part: u32 }
var<immediate> args: Args;
@group(0) @binding(0) var<storage, read> x: array<u32>;
@group(0) @binding(1) var<storage, read_write> out: array<vec2<u32>>;
var<workgroup> keys: array<u32, 256>;
var<workgroup> columns: array<u32, 256>;

$KEY

@compute @workgroup_size(256)
fn main(
    @builtin(workgroup_id) id: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let source = id.x * args.stride;
    let end = min((id.y + 1u) * args.part, args.width);
    var best = 0u;
    var column = 0xffffffffu;
    for (var i = id.y * args.part + thread; i < end; i += 256u) {
        let k = key(x[source + i]);
        if (k > best) { best = k; column = i; }
    }
    keys[thread] = best;
    columns[thread] = column;
    workgroupBarrier();
    for (var half = 128u; half > 0u; half /= 2u) {
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
    if (thread == 0u) {
        let c = min(columns[0], args.width - 1u);
        out[id.x * groups.y + id.y] = vec2<u32>(c, x[source + c]);
    }
}
