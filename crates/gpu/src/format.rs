//! How packed matrices store their elements in the device's memory.
//!
//! A row consists of blocks of 32 columns. A block of `n`-bit levels has `n` words, in planes of 8,
//! 4, 2 and 1 bits whose widths add up to `n`; each plane has its own buffer. In a plane of `p`
//! bits, a word holds `8 / p` quads of neighbouring columns. Quad `s` has its bits at `p * s` of
//! each byte of the word, so a shift and a mask give four levels as four bytes.

use thunder_compute::Float;

/// How a block's elements are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Elements {
    /// Plain numbers, in the order of the columns.
    Float(Float),
    /// Levels of this many bits. 8-bit levels are stored as signed bytes, minus 128.
    Levels(u32),
}

/// How a group's scale and offset are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Scales {
    /// The format has no scales.
    None,
    /// Two f32.
    F32,
    /// Two f16 in a word, the scale in the lower half.
    F16,
    /// Two bf16 in a word, the scale in the lower half.
    BF16,
}

/// What a kernel must know about a matrix when it is compiled.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Format {
    pub elements: Elements,
    pub scales: Scales,
    /// Groups have 16 columns, so a block has two.
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

    /// Words of a block in each element buffer.
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

    /// Bytes of a block at most: a group may be larger than a block.
    pub fn block_bytes(self) -> usize {
        let scales = self.scale_words() * if self.halves { 2 } else { 1 };
        4 * (self.words().iter().sum::<usize>() + scales)
    }

    /// Every format that packing can produce.
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
