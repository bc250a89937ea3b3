// Attention of a query head of up to 32 consecutive rows of a prompt to compressed vectors, which are
// keys and values: each block of 32 tokens is read once for all of them. Blocks are visited by their
// position, and what a row does not attend to changes none of its numbers, so its result does not
// depend on the other rows.
//
// Four groups of 64 threads each have a quarter of the columns of all scores: a thread the rows r,
// r + 8, r + 16, r + 24 and 4 consecutive tokens. Then 8 threads have a row's scores. Of the sums, a
// thread has 4 rows and, of each 128 columns, 4 consecutive ones.
$PROMPTS
@group(0) @binding($TURNED) var<storage, read> turned: array<vec4<f32>>;
const NONE = -3.0e38;
// Quads from a line to the next: odd, so that threads read different banks.
const PITCH = 17u;
// Quads from a row's weights to the next row's.
const WEIGHTS = 9u;
// 64 columns of 32 queries and of 32 keys: lines of 16 quads. Or four parts of each score, or the
// vectors of 8 tokens.
var<workgroup> tile: array<vec4<f32>, 1088>;
var<workgroup> weights: array<vec4<f32>, 288>;
// Of each thread's four tokens: the largest score, and the sum of the weights.
var<workgroup> maxima: array<f32, 256>;
var<workgroup> sums: array<f32, 256>;
// Of each row: what earlier sums shrink by. At the end: a divisor.
var<workgroup> factors: array<f32, 32>;

fn dots(a: vec4<f32>, b: vec4<f32>, sum: f32) -> f32 {
    return fma(a.w, b.w, fma(a.z, b.z, fma(a.y, b.y, fma(a.x, b.x, sum))));
}

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) id: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
$TILE    let group = thread / 64u;
    let line = thread % 64u / 8u;
    let column = thread % 8u;
    let my_row = thread / 8u;
    let my_position = start + my_row;
    let my_start = first_visible(my_position);
    let my_last = min(my_position + args.after, newest);
    let summed = thread / 32u;
    let quad_of_sums = thread % 32u;
    var most = NONE;
    var total = 0.0;
    $STATE
    for (var block = visible / 32u; block * 32u <= last; block++) {
        let vector = (tables[blocks + block] * args.kv_heads + kv_head) * 32u;
        $ZERO
        $SCORES
        $PARTS
        workgroupBarrier();
        var four = vec4<f32>(0.0);
        for (var part = 0u; part < 4u; part++) { four += tile[(part * 32u + my_row) * 8u + column]; }
        if (args.cap > 0.0) { four = capped(four); }
        let token = vec4<u32>(block * 32u + column * 4u) + vec4<u32>(0u, 1u, 2u, 3u);
        four = select(vec4<f32>(NONE), four, (token >= vec4<u32>(my_start)) & (token <= vec4<u32>(my_last)));
        maxima[thread] = max(max(four.x, four.y), max(four.z, four.w));
        workgroupBarrier();
        var best = most;
        for (var i = 0u; i < 8u; i++) { best = max(best, maxima[my_row * 8u + i]); }
        let shrink = select(exp(most - best), 1.0, most == best);
        most = best;
        let mine = select(vec4<f32>(0.0), exp(four - best), four > vec4<f32>(NONE));
        weights[my_row * WEIGHTS + column] = mine;
        sums[thread] = (mine.x + mine.y) + (mine.z + mine.w);
        if (column == 0u) { factors[my_row] = shrink; }
        $SHARE
        workgroupBarrier();
        var sum = 0.0;
        for (var i = 0u; i < 8u; i++) { sum += sums[my_row * 8u + i]; }
        total = fma(total, shrink, sum);
        $ADD
    }
    if (column == 0u) { factors[my_row] = total; }
    workgroupBarrier();
    $STORE
}
