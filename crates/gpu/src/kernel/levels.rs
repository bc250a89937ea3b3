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

impl Leaving<'_> {
    /// The declaration of a function `leave_levels`.
    pub fn source(&self) -> String {
        let (text, squares, ask, square_of_quad) = match self.subgroups {
            false => (
                include_str!("leave_levels.wgsl"),
                "var<workgroup> left_squares: array<f32, LEFT_QUADS>;\n",
                "if (has_quad) { left_squares[quad] = square_of(value); }",
                "left_squares[quad + $i]",
            ),
            true => (
                include_str!("leave_levels_of_subgroups.wgsl"),
                "",
                "let square = square_of(value);",
                "subgroupShuffleDown(square, $i)",
            ),
        };
        let weigh = format!("{ask}\n    value = value * {};", self.weight);
        let square_of = |i: u32| square_of_quad.replace("$i", &format!("{i}u"));
        let square = (1..8).fold(square_of(0), |sum, i| format!("({sum} + {})", square_of(i)));
        let [add, store] = match self.subgroups {
            false => [String::new(), format!("squares_out[row * args.x_blocks + block] = {square};")],
            true => [
                format!("let squares = {square};"),
                "squares_out[row * args.x_blocks + block] = squares;".to_owned(),
            ],
        };
        let left = "var<workgroup> left: array<f32, LEFT_QUADS * 4u>;\n";
        let of_left =
            "vec4<f32>(left[4u * quad], left[4u * quad + 1u], left[4u * quad + 2u], left[4u * quad + 3u])";
        let if_normed = |text: &str| if self.normed { text.to_owned() } else { String::new() };
        text.replace("$LEVELS", &store_levels(self.pairs))
            .replace("$LEFT", if self.value.is_none() { left } else { "" })
            .replace("$SQUARES", &if_normed(squares))
            .replace("$USED", self.used)
            .replace("$VALUE", self.value.unwrap_or(of_left))
            .replace("$QUADS", &self.quads.to_string())
            .replace("$WEIGH", &if_normed(&weigh))
            .replace("$ADD", &if_normed(&add))
            .replace("$STORE", &if_normed(&store))
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
