//! WGSL of prompts' attention to compressed vectors, which all query heads share.

use super::Access;
use super::attend_block::{Block, Part, columns_for};
use super::attend_many::unit_type;
use super::attend_tiles::{self, of_prompts};

/// One compiled form of [`super::Kernel::AttendLatent`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct AttendLatent {
    /// Maximum columns of a compressed vector.
    pub columns: usize,
    /// The cache has bytes with scales, otherwise f16.
    pub int8: bool,
}

/// Rows of a workgroup: half a tile's. The sums of more do not fit into registers.
pub(crate) const LATENT_ROWS: usize = 32;

/// Arguments after those of other kernels of prompts' attention, in quads: of the rotated parts of
/// queries.
pub(super) const MORE: &str = "turned_stride: u32, turned_first: u32, turned_of_head: u32,";

impl AttendLatent {
    /// The form for compressed vectors and rotated parts of these widths, if there is one.
    pub fn of(widths: [usize; 2], int8: bool) -> Option<Self> {
        let columns = columns_for(widths[0], widths).filter(|_| widths[1] > 0)?;
        Some(Self { columns, int8 })
    }

    /// Every form.
    #[cfg(test)]
    pub fn all() -> impl Iterator<Item = Self> {
        super::attend_block::COLUMNS
            .into_iter()
            .flat_map(|columns| [false, true].map(|int8| Self { columns, int8 }))
    }

    pub fn bindings(self) -> Vec<Access> {
        let mut all = attend_tiles::bindings(self.int8);
        all.push(Access::Read);
        all
    }

    pub fn source(self) -> String {
        let read = |vectors: &str| {
            let units = format!("args.{vectors}_units");
            let scale = format!("let scale = {vectors}_scales[vector + token];");
            let of_token = format!("let stored = {vectors}s[(vector + token) * {units} + unit];");
            if self.int8 { of_token + &scale } else { of_token }
        };
        let block = Block {
            queries: LATENT_ROWS,
            columns: self.columns,
            int8: self.int8,
            parts: [
                Part {
                    query: "queries[min(first + query, end - 1u) * args.q_stride + head * quads + quad]",
                    units: "args.key_units",
                    read: read("key"),
                },
                Part {
                    query: "turned[min(first + query, end - 1u) * args.turned_stride + args.turned_first \
                            + head * args.turned_of_head + quad]",
                    units: "args.value_units",
                    read: read("value"),
                },
            ],
            value: read("key"),
            value_units: "args.key_units",
            is_used: "block * 32u + token <= last",
            mask: MASK,
        };
        let text = block.insert(include_str!("attend_latent.wgsl"), STORE);
        of_prompts(&text, unit_type(self.int8), self.int8, "vec4<f32>", (LATENT_ROWS, MORE))
            .replace("$TURNED", if self.int8 { "9" } else { "7" })
    }
}

/// What a row does not attend to.
const MASK: &str = "if (args.cap > 0.0) { four = capped(four); }
        let token = vec4<u32>(block * 32u + column * 4u) + vec4<u32>(0u, 1u, 2u, 3u);
        four = select(vec4<f32>(NONE), four, (token >= vec4<u32>(my_start)) & (token <= vec4<u32>(my_last)));";

const STORE: &str = "let row = first + query;
    if (row >= source && row < end && d < args.out_dim) {
        out[row * args.out_stride + args.out_first + head * args.out_dim + d] = value / factors[query];
    }";
