// Attention of a query head of up to 64 consecutive rows of a prompt, by cooperative matrices of 16
// columns. Blocks of 32 tokens are visited by their position, and what a row does not attend to
// changes none of its numbers, so its result does not depend on the other rows.
//
// A subgroup has 16 rows; of their scores, two lanes have a row's. A row's weights are relative to a
// reference, which is raised only once a score is far above it: sums of matrices are scaled seldom.
enable f16;
enable wgpu_cooperative_matrix;
$PROMPTS
const NONE = -3.0e38;
// How far above its reference a row's scores may be: weights up to e^8 fit into f16.
const MORE = 8.0;
const LARGEST_F16 = vec4<f32>(65504.0);
// Quads of a query, key or value, at most.
const QUADS = $QUADSu;
// Quads from a query, key or value to the next: rows begin in different banks.
const PITCH = QUADS + 2u;
// From a row's scores to the next row's: two lanes of each of 16 rows read different banks.
const ROW = 34u;
// From a row's weights to the next row's, and from a column of values to the next.
const WEIGHTS = 40u;
// Quads of a part of 64 queries, and from a query's part to the next one's.
const PART = 16u;
const PART_PITCH = PART + 2u;
// A part of the queries; then a block's 32 keys$AND_VALUES. On NVIDIA's GPUs two workgroups of up
// to 24 KiB run on a multiprocessor at a time, of more only one.
var<workgroup> tile: array<vec4<f16>, max(32u * PITCH, 64u * PART_PITCH)>;
$VALUE_TILE
// Scores of 64 rows and 32 tokens. Also 32 columns of sums.
var<workgroup> scores: array<f32, 64u * ROW>;
var<workgroup> weights: array<f16, 64u * WEIGHTS>;
// Of each row: a factor and a divisor of its sums.
var<workgroup> factors: array<vec2<f32>, 64>;
// Whether sums must shrink, since a row's reference was raised: the first number. Drivers load
// matrices by 16 bytes, so every variable here takes a multiple of that.
var<workgroup> raised: vec4<u32>;

@compute @workgroup_size(128)
fn main(@builtin(workgroup_id) id: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
$TILE    let key_quads = args.key_units * 2u;
    let value_quads = args.value_units * 2u;
    // The first of the subgroup's rows.
    let mine = thread / 32u * 16u;
    let lane = thread % 32u;
    let row = thread / 2u;
    let half = thread % 2u;
    let position = start + row;
    let my_start = first_visible(position);
    let my_last = min(position + args.after, newest);
    $QUERIES
    $STATE
    var reference = NONE;
    var total = 0.0;
    for (var block = visible / 32u; block * 32u <= last; block++) {
        let vector = (tables[blocks + block] * args.kv_heads + kv_head) * 32u;
        if (thread == 0u) { raised.x = 0u; }
        $LOAD
        $KEYS
        workgroupBarrier();
        $SCORES
        workgroupBarrier();
        $VALUES
        if (args.cap > 0.0) {
            for (var i = 0u; i < 16u; i++) {
                let at = row * ROW + 2u * i + half;
                scores[at] = capped(scores[at]);
            }
        }
        var best = NONE;
        $MASK
        best = max(best, subgroupShuffleXor(best, 1u));
        var shrink = 1.0;
        if (best > reference + MORE) {
            // Before the first of a row's tokens its sums are zero.
            if (reference > NONE) {
                shrink = exp(reference - best);
                raised.x = 1u;
            }
            reference = best;
        }
        var sum = 0.0;
        $WEIGH
        sum += subgroupShuffleXor(sum, 1u);
        total = fma(total, shrink, sum);
        if (workgroupUniformLoad(&raised).x == 1u) {
            $SHRINK
        }
        $ADD
        workgroupBarrier();
    }
    if (half == 0u) {
        var largest = reference;
        if (args.sinks == 1u) { largest = max(reference, sinks[head]); }
        let factor = exp(reference - largest);
        var sum = fma(total, factor, 0.0);
        if (args.sinks == 1u) { sum += exp(sinks[head] - largest); }
        factors[row] = vec2<f32>(factor, sum);
    }
    $STORE
}
