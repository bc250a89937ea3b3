//! WGSL of kernels that only multiply and add, to measure a device's arithmetic rate.

/// Threads of a workgroup.
pub(crate) const PEAK_THREADS: usize = 256;
const LANES: usize = 32;
/// Independent sums of matrices.
const SUMS: usize = 8;
/// Independent sums of byte products.
const DOTS: usize = 16;
/// How often each sum is added to in a round.
const TURNS: usize = 8;

/// Multiplications and additions of f32 that a thread does in a round.
pub(crate) const FLOATS_OF_ROUND: usize = 2 * 4 * 4 * TURNS;

/// Multiplications and additions that a workgroup does in a round, with matrices of this side.
pub(crate) const fn matrices_of_round(side: usize) -> usize {
    2 * side * side * side * SUMS * TURNS * (PEAK_THREADS / LANES)
}

pub(super) fn floats() -> String {
    let turn = ["a", "b", "c", "d"].map(|sum| format!("{sum} = fma({sum}, factor, factor);\n")).concat();
    include_str!("peak_floats.wgsl").replace("$ROUND", &turn.repeat(TURNS))
}

/// Multiplications and additions of bytes that a thread does in a round.
pub(crate) const BYTES_OF_ROUND: usize = 2 * 4 * DOTS * TURNS;

pub(super) fn bytes() -> String {
    let each = |line: &dyn Fn(usize) -> String| (0..DOTS).map(line).collect::<String>();
    // Operands that change, so that no compiler makes a product of the whole loop.
    let turn = each(&|i| format!("s{i} += dot4I8Packed(bitcast<u32>(s{i}), args.factor);\n"));
    let start = each(&|i| format!("var s{i} = i32(id.x + {i}u);\n"));
    let total = (0..DOTS).map(|i| format!("s{i}")).collect::<Vec<_>>().join(" ^ ");
    include_str!("peak_bytes.wgsl")
        .replace("$START", &start)
        .replace("$ROUND", &turn.repeat(TURNS))
        .replace("$TOTAL", &total)
}

pub(super) fn matrices(side: usize) -> String {
    let each = |line: &dyn Fn(usize) -> String| (0..SUMS).map(line).collect::<String>();
    let state = each(&|i| format!("var sum{i} = coop_mat{side}x{side}<f32, C>();\n"));
    let turn = each(&|i| format!("sum{i} = coopMultiplyAdd(a, b, sum{i});\n"));
    let store = each(&|i| {
        format!(
            "coopStoreT(sum{i}, &sums[thread / {LANES}u * $SIZEu], {side}u);
workgroupBarrier();
sum += sums[thread / {LANES}u * $SIZEu + thread % {LANES}u];
workgroupBarrier();
"
        )
    });
    include_str!("peak_matrices.wgsl")
        .replace("$STATE", &state)
        .replace("$ROUND", &turn.repeat(TURNS))
        .replace("$STORE", &store)
        .replace("$SIZE", &(side * side).to_string())
        .replace("$SIDE", &side.to_string())
}
