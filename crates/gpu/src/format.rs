//! How packed matrices keep their elements in the device's memory.
//!
//! A row is blocks of 32 columns. A block of levels with `n` bits is `n` words: planes of 8, 4, 2
//! and 1 bits that add up to `n`, each in a buffer of its own. In a plane of `p` bits, a word holds
//! `8 / p` quads of neighbouring columns; the quad `s` of them has its bits at `p * s` of each of
//! the word's bytes, so that a shift and a mask give four levels as four bytes.

use thunder_compute::Float;

/// How the elements of a block are kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Elements {
    /// Plain numbers, in columns' order.
    Float(Float),
    /// Levels of this many bits. Levels of 8 bits are kept less 128, as signed bytes.
    Levels(u32),
}

/// How the scale and the offset of a group are kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Scales {
    /// The format has none.
    None,
    /// Two f32.
    F32,
    /// Two f16 in a word, the scale in the lower half.
    F16,
    /// Two bf16 in a word, the scale in the lower half.
    BF16,
}

/// What a kernel must know of a matrix when it is compiled.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Format {
    pub elements: Elements,
    pub scales: Scales,
    /// Groups are 16 columns: a block has two.
    pub halves: bool,
}

impl Format {
    /// Bits of the planes, for levels.
    pub const fn planes(self) -> &'static [u32] {
        match self.elements {
            Elements::Float(_) => &[],
            Elements::Levels(bits) => match bits {
                2 => &[2],
                3 => &[2, 1],
                4 => &[4],
                5 => &[4, 1],
                6 => &[4, 2],
                _ => &[8],
            },
        }
    }

    /// Words of a block in each buffer of elements.
    pub fn words(self) -> Vec<usize> {
        match self.elements {
            Elements::Float(float) => vec![8 * float.bytes()],
            Elements::Levels(_) => self.planes().iter().map(|bits| *bits as usize).collect(),
        }
    }

    pub fn has_scales(self) -> bool {
        self.scales != Scales::None
    }

    /// Words of one group's scale and offset.
    pub fn scale_words(self) -> usize {
        match self.scales {
            Scales::None => 0,
            Scales::F32 => 2,
            Scales::F16 | Scales::BF16 => 1,
        }
    }

    /// Every format that packing can give.
    #[cfg(test)]
    pub fn all() -> Vec<Self> {
        let floats = [Float::F32, Float::F16, Float::BF16].map(|float| Self {
            elements: Elements::Float(float),
            scales: Scales::None,
            halves: false,
        });
        let mut all = floats.to_vec();
        for bits in [2, 3, 4, 5, 6, 8] {
            for scales in [Scales::F32, Scales::F16, Scales::BF16] {
                for halves in [false, true] {
                    all.push(Self { elements: Elements::Levels(bits), scales, halves });
                }
            }
        }
        all
    }
}
