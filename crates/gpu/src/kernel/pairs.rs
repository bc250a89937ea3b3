//! WGSL for products whose rows are pairs of a row and one of its experts. A tile has pairs of one
//! expert, which share its weights.

/// What the kernel `sort_pairs` stores, and each expert's first block, channels and first bias.
pub(super) fn declare(binding: usize) -> String {
    format!(
        "@group(0) @binding({binding}) var<storage, read> sorted: array<u32>;
@group(0) @binding({}) var<storage, read> experts: array<vec4<u32>>;
",
        binding + 1
    )
}

/// The tile's pairs: their expert, the place of the first one, and their count.
pub(super) const BEGIN: &str = "let expert = sorted[id.x * 3u];
let first_place = args.places + sorted[id.x * 3u + 1u];
let count = sorted[id.x * 3u + 2u];
if (count == 0u) { return; }
let first_row = 0u;
let base = experts[expert].x;
";

/// The row of input that the tile's row `row` is read from.
pub(super) fn source_row(row: &str) -> String {
    format!("sorted[first_place + {row}] / args.of_row")
}

/// The row of the output that the tile's row `row` is stored in.
pub(super) fn place(row: &str) -> String {
    format!("sorted[first_place + {row}]")
}

/// Where the biases of the tile's expert begin.
pub(super) const FIRST_BIAS: &str = "experts[expert].z";
