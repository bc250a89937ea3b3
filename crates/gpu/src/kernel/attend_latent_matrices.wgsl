// Attention of a query head of up to 32 consecutive rows of a prompt to compressed vectors, which are
// keys and values, by cooperative matrices of 16 columns. Blocks of 32 tokens are visited by their
// position, and what a row does not attend to changes none of its numbers, so its result does not
// depend on the other rows.
//
// Each of four matrices of scores is computed by two subgroups, half of the columns each. A subgroup
// has an eighth of the columns of all rows' sums. A row's weights are relative to a reference, which
// is raised only once a score is far above it: sums of matrices are scaled seldom.
enable f16;
enable wgpu_cooperative_matrix;
$PROMPTS
@group(0) @binding($TURNED) var<storage, read> turned: array<vec4<f32>>;
const NONE = -3.0e38;
// How far above its reference a row's scores may be: weights up to e^8 fit into f16.
const MORE = 8.0;
const LARGEST_F16 = vec4<f32>(65504.0);
// Quads of a compressed vector, and of it and its rotated part.
const QUADS = $QUADSu;
const ALL_QUADS = QUADS + $TURNED_QUADSu;
// Quads from a query or vector to the next: rows begin in different banks.
const PITCH = ALL_QUADS + 2u;
// From a row's scores to the next row's.
const ROW = 34u;
// From a row's weights to the next row's.
const WEIGHTS = 40u;
// The queries; then a block's 32 vectors.
var<workgroup> tile: array<vec4<f16>, 32u * PITCH>;
// Two parts of the scores of 32 rows and 32 tokens. Also a matrix of sums of each subgroup.
var<workgroup> scores: array<f32, 64u * ROW>;
var<workgroup> weights: array<f16, 32u * WEIGHTS>;
// Of each row: what its sums shrink by. At the end, a divisor.
var<workgroup> factors: array<f32, 32>;
// Whether sums must shrink, since a row's reference was raised: the first number. Drivers load
// matrices by 16 bytes, so every variable here takes a multiple of that.
var<workgroup> raised: vec4<u32>;

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) id: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
$TILE    let key_quads = args.key_units * 2u;
    let value_quads = args.value_units * 2u;
    let subgroup = thread / 32u;
    let lane = thread % 32u;
    // Of the subgroup's scores: first row, first token, first quad of its columns, where they go.
    let scored_row = subgroup % 2u * 16u;
    let scored_token = subgroup / 2u % 2u * 16u;
    let scored_quad = subgroup / 4u * (ALL_QUADS / 2u);
    let scores_at = (subgroup / 4u * 32u + scored_row) * ROW + scored_token;
    // The first quad of the subgroup's sums, and its own space in `scores`.
    let summed_quad = subgroup * (QUADS / 8u);
    let own = subgroup * 256u;
    let row = thread / 8u;
    let column = thread % 8u;
    let position = start + row;
    let my_start = first_visible(position);
    let my_last = min(position + args.after, newest);
    $QUERIES
    $STATE
    var reference = NONE;
    var total = 0.0;
    var block = visible / 32u;
    $VARIABLES
    $LOAD
    for (; block * 32u <= last; ) {
        if (thread == 0u) { raised.x = 0u; }
        $KEEP
        workgroupBarrier();
        $SCORES
        workgroupBarrier();
        let first_token = block * 32u + column * 4u;
        let at = row * ROW + column * 4u;
        let other = at + 32u * ROW;
        var four = vec4<f32>(
            scores[at] + scores[other],
            scores[at + 1u] + scores[other + 1u],
            scores[at + 2u] + scores[other + 2u],
            scores[at + 3u] + scores[other + 3u],
        );
        if (args.cap > 0.0) { four = capped(four); }
        let token = vec4<u32>(first_token) + vec4<u32>(0u, 1u, 2u, 3u);
        let is_seen = (token >= vec4<u32>(my_start)) & (token <= vec4<u32>(my_last));
        four = select(vec4<f32>(NONE), four, is_seen);
        // The next block's vectors arrive meanwhile. After the last one it is read again.
        block++;
        $LOAD
        var best = max(max(four.x, four.y), max(four.z, four.w));
        best = max(best, subgroupShuffleXor(best, 1u));
        best = max(best, subgroupShuffleXor(best, 2u));
        best = max(best, subgroupShuffleXor(best, 4u));
        var shrink = 1.0;
        if (best > reference + MORE) {
            // Before the first of a row's tokens its sums are zero.
            if (reference > NONE) {
                shrink = exp(reference - best);
                raised.x = 1u;
            }
            reference = best;
        }
        let weight = vec4<f16>(select(vec4<f32>(0.0), exp(four - reference), is_seen));
        for (var i = 0u; i < 4u; i++) { weights[row * WEIGHTS + column * 4u + i] = weight[i]; }
        let rounded = vec4<f32>(weight);
        var sum = (rounded.x + rounded.y) + (rounded.z + rounded.w);
        sum += subgroupShuffleXor(sum, 1u);
        sum += subgroupShuffleXor(sum, 2u);
        sum += subgroupShuffleXor(sum, 4u);
        total = fma(total, shrink, sum);
        if (column == 0u) { factors[row] = shrink; }
        if (workgroupUniformLoad(&raised).x == 1u) {
            $SHRINK
        }
        $ADD
        workgroupBarrier();
    }
    if (column == 0u) { factors[row] = total; }
    workgroupBarrier();
    $STORE
}
