//! WGSL for products that have a matrix for each head. The third dimension of the grid is that of
//! heads; other products have one.

/// The first block of a head's weights.
pub(super) const WEIGHTS: &str = "id.z * args.outputs * args.blocks";

/// What a head adds to the place of an input, in quads.
pub(super) const INPUT: &str = " + id.z * args.x_of_head";

/// What a head adds to the place of an output.
pub(super) const OUTPUT: &str = " + id.z * args.outputs";

/// A tile's first row, all rows, and the first block of the weights.
pub(super) fn begin(rows: usize) -> String {
    format!("let first_row = id.x * {rows}u;\nlet count = args.rows;\nlet base = {WEIGHTS};\n")
}
