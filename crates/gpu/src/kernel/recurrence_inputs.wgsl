// A recurrence of a head of a sequence, a token after the other. Its state S is a matrix, [key_dim,
// value_dim]: S[k] *= decay[k], S += key ⊗ written, out = Sᵀ query. A workgroup has 32 columns of
// the matrix; of each, 8 threads have every eighth row.
struct Args {
    first: u32, end: u32, x_stride: u32, gates_stride: u32,
    out_stride: u32, query_first: u32, key_first: u32, value_first: u32,
    key_heads: u32, key_dim: u32, value_dim: u32, heads: u32,
    sequences: u32, slot_numbers: u32, state_first: u32,
    // Heads that follow each other and share a key.
    run: u32,
    decays_stride: u32,
    // Added to the sums of squares of queries and keys.
    unit_eps: f32,
    // Limits of a time step. Of delta rules: the first is the lowest logarithm of a decay, or 0.
    low: f32, high: f32,
    // Of drafts: numbers that are kept for a row, as inputs and as gates.
    channels: u32, kept_gates: u32,
    // Columns of `sequences`: where states are read and written.
    read_at: u32, write_at: u32,
}
var<immediate> args: Args;
// Of each sequence: first row, end, first position, slot, rows of its draft, right rows of its last
// draft, where its state is read, and where it is written.
@group(0) @binding(0) var<storage, read> sequences: array<u32>;
@group(0) @binding(1) var<storage, read> rates: array<f32>;
@group(0) @binding(2) var<storage, read> biases: array<f32>;
// Queries, keys and values of rows.
@group(0) @binding(3) var<storage, read> x: array<f32>;
@group(0) @binding(4) var<storage, read> gates: array<f32>;
@group(0) @binding(5) var<storage, read_write> state: array<f32>;
@group(0) @binding(6) var<storage, read_write> out: array<f32>;
// ln(1 + e^x), which is x where e^x would be infinite.
fn softplus(x: f32) -> f32 {
    if (x > 20.0) { return x; }
    let e = exp(x);
    // Logarithms of numbers near 1 have few correct digits.
    if (e < 0.05) { return e * (1.0 - e * (0.5 - e * (0.33333334 - e * (0.25 - e * 0.2)))); }
    return log(1.0 + e);
}

fn decay_of(rate: f32, time: f32) -> f32 {
    if (args.low < 0.0) { return exp(args.low / (1.0 + exp(-rate * time))); }
    return exp(-rate * softplus(time));
}
