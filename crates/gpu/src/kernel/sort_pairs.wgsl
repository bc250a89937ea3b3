// Pairs of a row and one of its experts, sorted by expert and divided into tiles of pairs that
// share an expert's weights. In which order an expert has its pairs does not matter. Experts
// without weights on this rank have none.
struct Args { rows: u32, row: u32, choices: u32, stride: u32, experts: u32, tile: u32, most: u32 }
var<immediate> args: Args;
@group(0) @binding(0) var<storage, read> choices: array<f32>;
// Of each expert: the first block, then 0 if it has no weights.
@group(0) @binding(1) var<storage, read> experts: array<vec4<u32>>;
// Of each of `most` tiles: expert, first place, pairs. Then the pair of each place.
@group(0) @binding(2) var<storage, read_write> sorted: array<u32>;
const THREADS = 256u;
var<workgroup> counts: array<atomic<u32>, $EXPERTS>;
// The next place and the first tile of each expert.
var<workgroup> next: array<atomic<u32>, $EXPERTS>;
var<workgroup> tiles: array<u32, $EXPERTS>;
// Pairs and tiles of the experts up to a thread's.
var<workgroup> until: array<vec2<u32>, THREADS>;

fn expert_of(pair: u32) -> u32 {
    return u32(choices[(args.row + pair / args.choices) * args.stride + pair % args.choices]);
}

fn tiles_of(count: u32) -> u32 {
    return (count + args.tile - 1u) / args.tile;
}

@compute @workgroup_size(256)
fn main(@builtin(local_invocation_index) thread: u32) {
    let pairs = args.rows * args.choices;
    for (var e = thread; e < args.experts; e += THREADS) { atomicStore(&counts[e], 0u); }
    workgroupBarrier();
    for (var pair = thread; pair < pairs; pair += THREADS) {
        let expert = expert_of(pair);
        if (experts[expert].y > 0u) { atomicAdd(&counts[expert], 1u); }
    }
    workgroupBarrier();
    // A thread has consecutive experts.
    let each = (args.experts + THREADS - 1u) / THREADS;
    let end = min((thread + 1u) * each, args.experts);
    var own = vec2<u32>();
    for (var e = thread * each; e < end; e++) {
        let count = atomicLoad(&counts[e]);
        own += vec2<u32>(count, tiles_of(count));
    }
    until[thread] = own;
    workgroupBarrier();
    for (var apart = 1u; apart < THREADS; apart *= 2u) {
        var before = vec2<u32>();
        if (thread >= apart) { before = until[thread - apart]; }
        workgroupBarrier();
        until[thread] += before;
        workgroupBarrier();
    }
    var place = until[thread] - own;
    for (var e = thread * each; e < end; e++) {
        let count = atomicLoad(&counts[e]);
        atomicStore(&next[e], place.x);
        tiles[e] = place.y;
        place += vec2<u32>(count, tiles_of(count));
    }
    let used = until[THREADS - 1u].y;
    workgroupBarrier();
    for (var e = thread; e < args.experts; e += THREADS) {
        let count = atomicLoad(&counts[e]);
        let first = atomicLoad(&next[e]);
        for (var i = 0u; i * args.tile < count; i++) {
            let to = (tiles[e] + i) * 3u;
            sorted[to] = e;
            sorted[to + 1u] = first + i * args.tile;
            sorted[to + 2u] = min(args.tile, count - i * args.tile);
        }
    }
    for (var tile = used + thread; tile < args.most; tile += THREADS) { sorted[tile * 3u + 2u] = 0u; }
    workgroupBarrier();
    for (var pair = thread; pair < pairs; pair += THREADS) {
        let expert = expert_of(pair);
        if (experts[expert].y > 0u) { sorted[args.most * 3u + atomicAdd(&next[expert], 1u)] = pair; }
    }
}
