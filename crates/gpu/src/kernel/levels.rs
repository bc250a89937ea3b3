//! Results that kernels store as levels.

pub(super) fn quantize(pairs: bool) -> String {
    include_str!("quantize.wgsl").replace("$LEVELS", &store_levels(pairs))
}

/// Results of a workgroup that are also stored as levels.
pub(super) struct Leaving<'a> {
    /// Levels have 16 bits, otherwise 8.
    pub pairs: bool,
    /// Number of quads that there is space for.
    pub quads: usize,
    /// Number of quads that are used, in WGSL.
    pub used: &'a str,
    /// A quad in WGSL; `None` if it is in the array `left`.
    pub value: Option<&'a str>,
    /// Blocks of a row, in WGSL.
    pub row_blocks: &'a str,
    /// Numbers are multiplied with a norm's weights, and the sum of their squares is stored too.
    pub normed: bool,
    /// A quad of these weights, in WGSL.
    pub weight: &'a str,
    /// 32 threads are a subgroup, so that they need no workgroup memory.
    pub subgroups: bool,
}

/// The block of 32 numbers that is in `left`.
impl Default for Leaving<'_> {
    fn default() -> Self {
        Self {
            pairs: false,
            quads: 8,
            used: "LEFT_QUADS",
            value: None,
            row_blocks: "args.x_blocks",
            normed: false,
            weight: "left_norm[first * 8u + quad]",
            subgroups: false,
        }
    }
}

/// How the eight threads of a block share what each has of its quad, in WGSL.
struct Sharing {
    memory: &'static str,
    memory_of_squares: &'static str,
    keep_square: &'static str,
    /// Defines `most_bits` from `most_of_quad`.
    most: &'static str,
    /// Shares `sum_of_quad`. Afterwards `low` and `high` are the sums of the block's halves.
    sums: &'static str,
    low: &'static str,
    high: &'static str,
    /// The square of the quad that is `$i` quads later.
    square: &'static str,
    /// Squares must be added before the branch for the block's first thread.
    adds_early: bool,
}

const BY_MEMORY: Sharing = Sharing {
    memory: "var<workgroup> left_most: array<u32, LEFT_QUADS>;
var<workgroup> left_sums: array<i32, LEFT_QUADS>;
",
    memory_of_squares: "var<workgroup> left_squares: array<f32, LEFT_QUADS>;\n",
    keep_square: "if (has_quad) { left_squares[quad] = square_of(value); }",
    most: "if (has_quad) { left_most[quad] = most_of_quad; }
    workgroupBarrier();
    // Loops are not unrolled by all compilers: each round would wait for the one before.
    let eighth = quad / 8u * 8u;
    let most_low = max(max(left_most[eighth], left_most[eighth + 1u]), max(left_most[eighth + 2u], left_most[eighth + 3u]));
    let most_high = max(max(left_most[eighth + 4u], left_most[eighth + 5u]), max(left_most[eighth + 6u], left_most[eighth + 7u]));
    let most_bits = max(most_low, most_high);",
    sums: "if (has_quad) { left_sums[quad] = sum_of_quad; }
    workgroupBarrier();",
    low: "left_sums[quad] + left_sums[quad + 1u] + left_sums[quad + 2u] + left_sums[quad + 3u]",
    high: "left_sums[quad + 4u] + left_sums[quad + 5u] + left_sums[quad + 6u] + left_sums[quad + 7u]",
    square: "left_squares[quad + $iu]",
    adds_early: false,
};

const BY_SUBGROUPS: Sharing = Sharing {
    memory: "",
    memory_of_squares: "",
    keep_square: "let square = square_of(value);",
    most: "var most_bits = max(most_of_quad, subgroupShuffleXor(most_of_quad, 1u));
    most_bits = max(most_bits, subgroupShuffleXor(most_bits, 2u));
    most_bits = max(most_bits, subgroupShuffleXor(most_bits, 4u));",
    sums: "var sum_of_half = sum_of_quad + subgroupShuffleXor(sum_of_quad, 1u);
    sum_of_half += subgroupShuffleXor(sum_of_half, 2u);
    let other_half = subgroupShuffleXor(sum_of_half, 4u);",
    low: "sum_of_half",
    high: "other_half",
    square: "subgroupShuffleDown(square, $iu)",
    adds_early: true,
};

impl Leaving<'_> {
    /// The declaration of a function `leave_levels`.
    pub fn source(&self) -> String {
        let by = if self.subgroups { BY_SUBGROUPS } else { BY_MEMORY };
        let left = "var<workgroup> left: array<f32, LEFT_QUADS * 4u>;\n";
        let of_left =
            "vec4<f32>(left[4u * quad], left[4u * quad + 1u], left[4u * quad + 2u], left[4u * quad + 3u])";
        let (mut memory, mut sums) = (by.memory.to_owned(), by.sums.to_owned());
        let (mut weigh, mut square) = (String::new(), String::new());
        if self.normed {
            memory += by.memory_of_squares;
            weigh = format!("{}\n    value = value * {};", by.keep_square, self.weight);
            let square_of = |i: u32| by.square.replace("$i", &i.to_string());
            let mut all = (1..8).fold(square_of(0), |sum, i| format!("({sum} + {})", square_of(i)));
            if by.adds_early {
                sums += &format!("\n    let squares = {all};");
                all = "squares".to_owned();
            }
            square = format!("squares_out[row * args.x_blocks + block] = {all};");
        }
        include_str!("leave_levels.wgsl")
            .replace("$LEVELS", &store_levels(self.pairs))
            .replace("$LEFT", if self.value.is_none() { left } else { "" })
            .replace("$MEMORY", &memory)
            .replace("$USED", self.used)
            .replace("$VALUE", self.value.unwrap_or(of_left))
            .replace("$QUADS", &self.quads.to_string())
            .replace("$WEIGH", &weigh)
            .replace("$MOST", by.most)
            .replace("$SUMS", &sums)
            .replace("$LOW", by.low)
            .replace("$HIGH", by.high)
            .replace("$SQUARE", &square)
            .replace("args.x_blocks", self.row_blocks)
    }
}

/// Stores levels.
fn store_levels(pairs: bool) -> String {
    // A 16-bit level is a signed high byte and a signed low byte, in planes of words as products
    // read them, in quads of half blocks.
    let levels = match pairs {
        false => {
            "const MOST = 127.0;
fn store(row: u32, quad: u32, level: vec4<i32>) {
    levels_out[place(row, quad, 0u, 2u)] = pack4xI8(level);
}"
        }
        true => {
            "const MOST = 32512.0;
fn store(row: u32, quad: u32, level: vec4<i32>) {
    let low = ((level + vec4<i32>(128)) & vec4<i32>(255)) - vec4<i32>(128);
    levels_out[place(row, quad, 0u, 4u)] = pack4xI8((level - low) / vec4<i32>(256));
    levels_out[place(row, quad, 2u, 4u)] = pack4xI8(low);
}"
        }
    };
    let place = "fn place(row: u32, quad: u32, plane: u32, planes: u32) -> u32 {
    let vector = (row * planes + plane + quad / 4u % 2u) * args.x_blocks + quad / 8u;
    return vector * 4u + quad % 4u;
}
// Each step is one rounding, whatever a compiler makes of sums of products.
fn square_of(v: vec4<f32>) -> f32 {
    return fma(v.w, v.w, fma(v.z, v.z, fma(v.y, v.y, v.x * v.x)));
}
";
    format!("{place}{levels}")
}
