//! WGSL that computes a norm, its product with a router's matrix and the choice of a row's experts
//! in one kernel. It uses the arithmetic of the three separate kernels, and the proof demands their
//! bits.

use super::{Input, MOST_BUFFERS, Product, Role, Shape, Sum};
use crate::format::Format;
use crate::kernel::{Access, decode, norm};

/// One compiled form.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Choose {
    pub format: Format,
    pub sum: Sum,
    /// Turns in which a workgroup's threads compute the norm of a row.
    pub turns: usize,
}

/// Maximum rows of a dispatch. Their counters come before the logits.
pub(crate) const CHOOSE_ROWS: usize = 64;
/// Maximum outputs of a router, including an expert that all tokens share.
pub(crate) const CHOOSE_OUTPUTS: usize = 256;
/// Outputs of a workgroup.
const OUTPUTS: usize = 16;

impl Choose {
    /// The form for rows with this many blocks, if there is one.
    pub fn of(format: Format, sum: Sum, blocks: usize) -> Option<Self> {
        let turns = [1, 2].into_iter().find(|turns| blocks * 8 <= turns * norm::QUADS)?;
        let form = Self { format, sum, turns };
        (form.bindings().len() <= MOST_BUFFERS).then_some(form)
    }

    #[cfg(test)]
    pub fn all() -> impl Iterator<Item = Self> {
        Format::all().into_iter().flat_map(|format| {
            let forms = [(Sum::Shared, 2), (Sum::Subgroup, 1), (Sum::Subgroup, 2)];
            forms.map(|(sum, turns)| Self { format, sum, turns })
        })
    }

    /// Workgroups that compute logits.
    pub fn groups(outputs: usize) -> usize {
        outputs.div_ceil(OUTPUTS)
    }

    /// Weights, their bias, the rows, the norm's weights, the normed rows, levels, scales, logits
    /// after counters, the correction, and the choices.
    pub fn bindings(self) -> Vec<Access> {
        use Access::{Read, Write};
        let mut all = vec![Read; decode::buffers(self.format) + 3];
        all.extend([Write, Write, Write, Write, Read, Write]);
        all
    }

    fn product(self) -> Product {
        let product = Product::new(self.format, Input::Floats, Role::Plain, self.sum, 1);
        let bits = self.format.words().iter().sum::<usize>();
        let unroll = if bits > 8 || self.sum == Sum::Shared { 1 } else { 2 };
        Product { shape: Shape::new(1, unroll, OUTPUTS), ..product }
    }

    fn declarations(self) -> String {
        let names = [
            ("bias", "read", "f32"),
            ("residual", "read", "vec4<f32>"),
            ("weight", "read", "vec4<f32>"),
            ("out", "read_write", "vec4<f32>"),
            ("levels_out", "read_write", "u32"),
            ("scales_out", "read_write", "vec2<f32>"),
            ("logits", "read_write", "atomic<u32>"),
            ("correction", "read", "f32"),
            ("choices", "read_write", "f32"),
        ];
        let mut text = decode::declare(self.format, 0);
        for (binding, (name, access, kind)) in (decode::buffers(self.format)..).zip(names) {
            text += &format!("@group(0) @binding({binding}) var<storage, {access}> {name}: array<{kind}>;\n");
        }
        text + &format!("const COUNTERS = {CHOOSE_ROWS}u;")
    }

    pub fn source(self) -> String {
        let product = self.product();
        let total = match self.sum {
            Sum::Subgroup => "all0",
            Sum::Shared => "totals[warp]",
        };
        let leaving = norm::leaving("args.blocks", "args.blocks * 8u", "row", self.turns);
        let keep: String = (0..self.turns)
            .map(|turn| format!("x[thread + {}u] = value{turn};\n", turn * norm::QUADS))
            .collect();
        include_str!("choose.wgsl")
            .replace("$DECLARE", &self.declarations())
            .replace("$QUADS", &(self.turns * norm::QUADS).to_string())
            .replace("$LOGITS", &(CHOOSE_OUTPUTS + 1).to_string())
            .replace("$ROOT", norm::ROOT)
            .replace("$LEAVING", &leaving.declared)
            .replace("$ENDS", &product.memory_of_ends())
            .replace("$RANK", crate::kernel::RANK)
            .replace("$ROUTE", &crate::kernel::route_row(CHOOSE_OUTPUTS))
            .replace("$READ", &norm::read("residual", self.turns))
            .replace("$SQUARES", &norm::squares(self.turns))
            .replace("$NORM", &(norm::norm(self.turns) + &keep))
            .replace("$WRITE", &norm::write(self.turns))
            .replace("$LEAVE", &leaving.end)
            .replace("$ACCUMULATE", &product.accumulate())
            .replace("$ADD_LANES", &product.add_lanes())
            .replace("$TOTAL", total)
    }
}
