//! The lanes' loops over blocks of weights.

use std::fmt::Write;
use std::ops::Range;

use super::{Input, Leaves, Product, Shape};
use crate::kernel::decode::{bytes, copy, fetch, group, load, quad, variables};

impl Product {
    /// The lanes' loop over blocks. All weights of a turn are loaded before the first use.
    pub(super) fn accumulate(self) -> String {
        let Shape { per, unroll, lanes, .. } = self.shape;
        let mut text = String::new();
        let lines = if self.is_gated() { 2 * per } else { per };
        for line in 0..lines {
            // Outputs after the last one are computed like the last one, and not stored.
            let output = format!("min(first + {}u, max(outputs, 1u) - 1u)", line % per);
            let up = if line < per { "" } else { " + outputs" };
            text += &format!("let row{line} = base + ({output}{up}) * blocks;\n");
        }
        // Experts without channels on this rank have no weights to read.
        let blocks =
            if self.role.is_of_each_expert() { "select(0u, blocks, outputs > 0u)" } else { "blocks" };
        text += &format!("let end = {blocks};\n");
        if self.shape.ahead {
            text += &self.declare_next(lines);
            text += &format!("if (lane < end) {{\n{}}}\n", self.fetch_next("lane", lines));
        }
        text += &format!("for (var turn = lane; turn < end; turn += {}u) {{\n", self.shape.blocks_of_turn());
        for u in 0..unroll {
            text += &self.block_of_turn("b", "turn", u);
            for line in 0..lines {
                text += &match self.shape.ahead {
                    true => self.take_next(line, u),
                    false => {
                        format!("let block{line}_{u} = row{line} + b{u};\n{}", self.load_block(line, u))
                    }
                };
            }
        }
        if self.shape.ahead {
            let after = format!("turn + {}u", self.shape.blocks_of_turn());
            text += &format!("if ({after} < end) {{\n{}}}\n", self.fetch_next(&after, lines));
        }
        let add = |is_whole: bool| {
            let mut text = String::new();
            for u in 0..unroll {
                text += &match u {
                    _ if u == 0 || is_whole => "{\n".to_owned(),
                    _ => format!("if (turn + {}u < end) {{\n", lanes * u),
                };
                text += &self.unpack(u, lines);
                for b in 0..self.batch {
                    // Tiles of pairs are not all full.
                    text += &match b {
                        1.. if self.shares_experts() => format!("if ({b}u < count) {{\n"),
                        _ => "{\n".to_owned(),
                    };
                    text += &self.multiply(u, b, lines);
                    text += "}\n";
                }
                text += "}\n";
            }
            text
        };
        if unroll == 1 {
            return text + &add(true) + "}\n";
        }
        if self.leaves == Leaves::Nothing || unroll > 2 {
            return text + &add(false) + "}\n";
        }
        // Two blocks without a branch, so that compilers load the input of both early. More blocks
        // were slower on an H100.
        text + &format!(
            "if (turn - lane + {}u <= end) {{\n{}}} else {{\n{}}}\n}}\n",
            self.shape.blocks_of_turn(),
            add(true),
            add(false)
        )
    }

    /// Variables for a turn's blocks.
    fn declare_next(self, lines: usize) -> String {
        let each = (0..self.shape.unroll).flat_map(|u| (0..lines).map(move |line| (line, u)));
        each.map(|(line, u)| variables(self.format, &format!("next{line}_{u}"))).collect()
    }

    /// Loads the blocks of the turn that begins at block `first` into these variables.
    fn fetch_next(self, first: &str, lines: usize) -> String {
        let mut text = String::new();
        for u in 0..self.shape.unroll {
            text += &self.block_of_turn("n", first, u);
            for line in 0..lines {
                text += &fetch(self.format, &format!("next{line}_{u}"), &format!("(row{line} + n{u})"));
            }
        }
        text
    }

    /// Loads a block's weights and scales.
    pub(super) fn load_block(self, line: usize, u: usize) -> String {
        let block = format!("block{line}_{u}");
        let scale = |half| format!("scale_of({})", group(self.format, &block, half));
        load(self.format, &format!("w{line}_{u}"), &block) + &self.name_scales(line, u, scale)
    }

    /// Names what [`Self::fetch_next`] has loaded as [`Self::load_block`] names it.
    fn take_next(self, line: usize, u: usize) -> String {
        let next = format!("next{line}_{u}");
        let scale = |half| format!("scale_from({next}_stored{half})");
        copy(self.format, &format!("w{line}_{u}"), &next) + &self.name_scales(line, u, scale)
    }

    /// Names the scales of a block's groups, if the format has any.
    fn name_scales(self, line: usize, u: usize, scale: impl Fn(usize) -> String) -> String {
        let halves = if self.format.has_scales() { self.halves() } else { 0 };
        (0..halves).map(|half| format!("let s{line}_{u}_{half} = {};\n", scale(half))).collect()
    }

    /// Groups of weights in a block.
    fn halves(self) -> usize {
        if self.format.halves { 2 } else { 1 }
    }

    /// The quads of one of these groups.
    fn quads(self, half: usize) -> Range<usize> {
        half * 8 / self.halves()..(half + 1) * 8 / self.halves()
    }

    /// Multiplies a turn's block with that of row `b`, and adds the products.
    pub(super) fn multiply(self, u: usize, b: usize, lines: usize) -> String {
        match self.input {
            Input::Floats => self.floats(u, b, lines),
            Input::Bytes | Input::Pairs => self.levels(u, b, lines),
        }
    }

    fn floats(self, u: usize, b: usize, lines: usize) -> String {
        let mut text = String::new();
        for q in 0..8 {
            text += &format!("let v{q} = x[x{b} + b{u} * 8u + {q}u];\n");
        }
        if self.format.has_scales() {
            for half in 0..self.halves() {
                let all: Vec<_> = self.quads(half).map(|q| format!("v{q}")).collect();
                text += &format!("let t{half} = dot({}, vec4<f32>(1.0));\n", all.join(" + "));
            }
        }
        for line in 0..lines {
            for half in 0..self.halves() {
                let products: Vec<_> = self
                    .quads(half)
                    .map(|q| format!("dot({}, v{q})", quad(self.format, &format!("w{line}_{u}"), q)))
                    .collect();
                let sum = products.join(" + ");
                let s = format!("s{line}_{u}_{half}");
                let value = if self.format.has_scales() {
                    format!("fma({s}.x, {sum}, {s}.y * t{half})")
                } else {
                    sum
                };
                text += &add(&self.accumulator(line, b), &value);
            }
        }
        text
    }

    /// Unpacks the levels of a turn's blocks once for all rows.
    pub(super) fn unpack(self, u: usize, lines: usize) -> String {
        let mut text = String::new();
        for line in (0..lines).filter(|_| self.input.has_levels()) {
            for q in 0..8 {
                let levels = bytes(self.format, &format!("w{line}_{u}"), q);
                let _ = writeln!(text, "let q{line}_{u}_{q} = {levels};");
            }
        }
        text
    }

    fn levels(self, u: usize, b: usize, lines: usize) -> String {
        let planes = self.input.planes();
        let mut text = format!("let xs = x_scales[x{b} * 2u + b{u}];\n");
        if self.format.halves {
            text += &format!("let xh = x_scales[x{b} * 2u + args.x_stride + b{u}];\n");
        }
        for plane in 0..planes {
            text += &format!("let v{plane} = x[x{b} * {planes}u + {plane}u * args.x_stride + b{u}];\n");
        }
        for line in 0..lines {
            for half in 0..self.halves() {
                // The planes of low bytes follow those of high bytes.
                let dots = |first: usize| {
                    let of = |q: usize| {
                        let component = ["x", "y", "z", "w"][q % 4];
                        format!("dot4I8Packed(q{line}_{u}_{q}, v{}.{component})", first + q / 4)
                    };
                    self.quads(half).map(of).collect::<Vec<_>>().join(" + ")
                };
                let sum = match self.input {
                    Input::Pairs => format!("({}) * 256 + {}", dots(0), dots(2)),
                    _ => dots(0),
                };
                let s = format!("s{line}_{u}_{half}");
                // The scale times the sum of the levels, of the half or of the block.
                let t = if self.format.halves { ["xh.x", "xh.y"][half] } else { "xs.y" };
                let value = format!("fma({s}.x * xs.x, f32({sum}), {s}.y * {t})");
                text += &add(&self.accumulator(line, b), &value);
            }
        }
        text
    }

    fn accumulator(self, line: usize, b: usize) -> String {
        format!("acc{}", line * self.batch + b)
    }

    /// Names block `u` of the turn that begins at `first`. Blocks after the last one are read like
    /// the last one, and not added.
    fn block_of_turn(self, name: &str, first: &str, u: usize) -> String {
        match u {
            0 => format!("let {name}0 = {first};\n"),
            _ => format!("let {name}{u} = min({first} + {}u, end - 1u);\n", self.shape.lanes * u),
        }
    }
}

/// Adds a value to a sum. Compilers do not merge this with the value's last multiplication.
fn add(sum: &str, value: &str) -> String {
    format!("{sum} = fma(1.0, {value}, {sum});\n")
}
