// Leaves results where the host sees them: three words and a check word to a vector. The first word
// says whether a sum over ranks was lost. device/report.rs says why it is right.
struct Args { first: u32, words: u32, to: u32, number: u32 }
var<immediate> args: Args;
@group(0) @binding(0) var<storage, read> results: array<u32>;
@group(0) @binding(1) var<storage, read> lost: array<u32>;
@group(0) @binding(2) var<storage, read_write> report: array<vec4<u32>>;

$CHECK
fn word(at: u32) -> u32 {
    if (at == 0u) { return lost[0]; }
    if (at > args.words) { return 0u; }
    return results[args.first + at - 1u];
}

@compute @workgroup_size(64)
fn main(@builtin(global_invocation_id) id: vec3<u32>) {
    let at = 3u * id.x;
    if (at <= args.words) {
        let words = vec3<u32>(word(at), word(at + 1u), word(at + 2u));
        report[args.to + id.x] = vec4<u32>(words, check(words));
    }
}
