// Limits and changes the outputs of rows before a token is chosen, in place: tokens that a table
// names, then tokens that may not be chosen. A workgroup has a part of a row. Outputs that are not
// finite stay, to be found later.
struct Args { width: u32, stride: u32, tables: u32, cap: f32 }
var<immediate> args: Args;
// For each row: the first of its words, and their number; the first of its changed tokens, and their
// number. A changed token has three words. Places are counted from `args.tables`.
@group(0) @binding(0) var<storage, read> tables: array<u32>;
@group(0) @binding(1) var<storage, read_write> x: array<u32>;

const PART = $PARTu;
const EXCLUDED = $EXCLUDEDu;

fn is_finite(bits: u32) -> bool { return (bits & 0x7f800000u) != 0x7f800000u; }

$LIMIT

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) id: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let row = id.y * args.stride;
    let first = id.x * PART;
    let end = min(first + PART, args.width);
    let head = args.tables + 4u * id.y;
    if (args.cap != 0.0) {
        for (var i = first + thread; i < end; i += 256u) {
            let bits = x[row + i];
            if (is_finite(bits)) { x[row + i] = bitcast<u32>(limited(bitcast<f32>(bits))); }
        }
        storageBarrier();
    }
    let edits = args.tables + tables[head + 2u];
    for (var i = thread; i < tables[head + 3u]; i += 256u) {
        let edit = edits + 3u * i;
        let token = tables[edit];
        if (token >= first && token < end && is_finite(x[row + token])) {
            let value = bitcast<f32>(x[row + token]);
            let repetition = bitcast<f32>(tables[edit + 1u]);
            let repeated = select(value * repetition, value / repetition, value > 0.0);
            x[row + token] = bitcast<u32>(repeated + bitcast<f32>(tables[edit + 2u]));
        }
    }
    storageBarrier();
    let words = tables[head + 1u];
    if (words > 0u) {
        let allowed = args.tables + tables[head];
        for (var i = first + thread; i < end; i += 256u) {
            var word = 0u;
            if (i / 32u < words) { word = tables[allowed + i / 32u]; }
            if ((word & (1u << (i % 32u))) == 0u && is_finite(x[row + i])) { x[row + i] = EXCLUDED; }
        }
    }
}
