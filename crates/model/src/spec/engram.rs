//! Tables by the last tokens (engram, DeepSeek V4.1).

/// Tables of vectors that some layers look up by hashes of the last tokens. One product computes a
/// key for each residual stream, and a value; the value is added to each stream, multiplied with a
/// gate of the stream and its key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EngramShape {
    /// Tokens of the longest n-gram that is looked up; the shortest has 2.
    pub longest: usize,
    /// Tables for each length.
    pub heads: usize,
    /// Width of a vector.
    pub width: usize,
    /// How many numbers tokens have before they are hashed.
    pub numbers: usize,
    /// The token id used for positions before the first token.
    pub pad: u32,
    /// The layers that have tables.
    pub layers: Vec<EngramLayer>,
}

/// The tables of a layer, stacked in a matrix: by length of n-grams, then by head.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EngramLayer {
    /// Its number.
    pub layer: usize,
    /// Odd factors of an n-gram's numbers, that of the last token first.
    pub factors: Vec<u64>,
    /// Rows of each table, a prime.
    pub primes: Vec<u64>,
}

impl EngramShape {
    /// Columns of what a layer looks up for a token.
    pub const fn columns(&self) -> usize {
        (self.longest - 1) * self.heads * self.width
    }

    /// Number of weights in a layer's product, for this number of streams of this width.
    pub(super) const fn weights(&self, streams: usize, hidden: usize) -> usize {
        self.columns() * (streams + 1) * hidden
    }

    /// The tables of a layer.
    pub fn of(&self, layer: usize) -> Option<&EngramLayer> {
        self.layers.iter().find(|of| of.layer == layer)
    }
}

impl EngramLayer {
    /// Rows of all its tables.
    pub fn rows(&self) -> usize {
        self.primes.iter().sum::<u64>() as usize
    }

    /// The row of each table, given the numbers of the last tokens, the last one first: the xor of
    /// the numbers' products with the factors, modulo the table's rows.
    pub fn look_up(&self, heads: usize, numbers: impl IntoIterator<Item = u32>, out: &mut Vec<u32>) {
        let mut products =
            numbers.into_iter().zip(&self.factors).map(|(number, factor)| u64::from(number) * factor);
        let mut hash = products.next().unwrap_or(0);
        let mut first = 0;
        for (product, primes) in products.zip(self.primes.chunks(heads)) {
            hash ^= product;
            for prime in primes {
                out.push((first + hash % prime) as u32);
                first += prime;
            }
        }
    }
}
