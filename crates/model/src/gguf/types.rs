//! The types of tensors by their numbers.

use thunder_compute::{Block, Encoding, Float};

/// A tensor type.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct TensorType {
    pub name: &'static str,
    /// Columns of a block.
    pub columns: usize,
    /// Bytes of a block.
    pub bytes: usize,
    /// `None`: no weights can be read from it.
    pub encoding: Option<Encoding>,
}

const fn float(name: &'static str, float: Float) -> TensorType {
    TensorType { name, columns: 1, bytes: float.bytes(), encoding: Some(Encoding::Float(float)) }
}

const fn blocks(block: Block) -> TensorType {
    TensorType {
        name: block.name(),
        columns: block.columns(),
        bytes: block.bytes(),
        encoding: Some(Encoding::Blocks(block)),
    }
}

const fn refused(name: &'static str, columns: usize, bytes: usize) -> TensorType {
    TensorType { name, columns, bytes, encoding: None }
}

/// The types that `gguf` 0.19 lists.
const TYPES: [(u32, TensorType); 34] = [
    (0, float("F32", Float::F32)),
    (1, float("F16", Float::F16)),
    (30, float("BF16", Float::BF16)),
    (2, blocks(Block::Q4_0)),
    (3, blocks(Block::Q4_1)),
    (6, blocks(Block::Q5_0)),
    (7, blocks(Block::Q5_1)),
    (8, blocks(Block::Q8_0)),
    (10, blocks(Block::Q2K)),
    (11, blocks(Block::Q3K)),
    (12, blocks(Block::Q4K)),
    (13, blocks(Block::Q5K)),
    (14, blocks(Block::Q6K)),
    (20, blocks(Block::Iq4Nl)),
    (23, blocks(Block::Iq4Xs)),
    (39, blocks(Block::Mxfp4)),
    (9, refused("Q8_1", 32, 40)),
    (15, refused("Q8_K", 256, 292)),
    (16, refused("IQ2_XXS", 256, 66)),
    (17, refused("IQ2_XS", 256, 74)),
    (18, refused("IQ3_XXS", 256, 98)),
    (19, refused("IQ1_S", 256, 50)),
    (21, refused("IQ3_S", 256, 110)),
    (22, refused("IQ2_S", 256, 82)),
    (24, refused("I8", 1, 1)),
    (25, refused("I16", 1, 2)),
    (26, refused("I32", 1, 4)),
    (27, refused("I64", 1, 8)),
    (28, refused("F64", 1, 8)),
    (29, refused("IQ1_M", 256, 56)),
    (34, refused("TQ1_0", 256, 54)),
    (35, refused("TQ2_0", 256, 66)),
    (40, refused("NVFP4", 64, 36)),
    (41, refused("Q1_0", 128, 18)),
];

impl TensorType {
    /// The type with this number in a file.
    pub fn from_number(number: u32) -> Option<Self> {
        TYPES.iter().find(|(known, _)| *known == number).map(|(_, found)| *found)
    }

    /// The names of all types that weights can be read from.
    pub fn supported() -> String {
        let names = TYPES.iter().filter(|(_, found)| found.encoding.is_some());
        names.map(|(_, found)| found.name).collect::<Vec<_>>().join(", ")
    }
}
