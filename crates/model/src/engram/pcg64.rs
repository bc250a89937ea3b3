//! NumPy's default generator. Its numbers are part of published models.

/// PCG XSL RR 128/64 (O'Neill, HMC-CS-2014-0905), seeded as `numpy.random.default_rng` is.
#[derive(Debug)]
pub(crate) struct Pcg64 {
    state: u128,
    increment: u128,
}

const MULTIPLIER: u128 = 0x2360_ED05_1FC6_5DA4_4385_DF64_9FCC_F645;

/// Words of the pool that a seed becomes (`SeedSequence`).
const POOL: usize = 4;

/// A constant that changes with each use.
struct Hash {
    constant: u32,
    factor: u32,
}

impl Hash {
    fn word(&mut self, word: u32) -> u32 {
        let word = word ^ self.constant;
        self.constant = self.constant.wrapping_mul(self.factor);
        let word = word.wrapping_mul(self.constant);
        word ^ (word >> 16)
    }
}

/// The four numbers that a seed becomes.
fn expand(seed: u32) -> [u64; 4] {
    let mut hash = Hash { constant: 0x43B0_D7E5, factor: 0x931E_8875 };
    let mut pool = [0; POOL];
    for (index, word) in pool.iter_mut().enumerate() {
        *word = hash.word(if index == 0 { seed } else { 0 });
    }
    for from in 0..POOL {
        for to in (0..POOL).filter(|to| *to != from) {
            let x = pool[to].wrapping_mul(0xCA01_F9DD);
            let mixed = x.wrapping_sub(hash.word(pool[from]).wrapping_mul(0x4973_F715));
            pool[to] = mixed ^ (mixed >> 16);
        }
    }
    let mut hash = Hash { constant: 0x8B51_F9DD, factor: 0x58F3_8DED };
    let mut word = |index: usize| u64::from(hash.word(pool[index % POOL]));
    std::array::from_fn(|index| word(2 * index) | word(2 * index + 1) << 32)
}

impl Pcg64 {
    pub fn new(seed: u32) -> Self {
        let [high, low, sequence_high, sequence_low] = expand(seed).map(u128::from);
        let increment = (sequence_high << 64 | sequence_low) << 1 | 1;
        let mut generator = Self { state: 0, increment };
        generator.step();
        generator.state = generator.state.wrapping_add(high << 64 | low);
        generator.step();
        generator
    }

    const fn step(&mut self) {
        self.state = self.state.wrapping_mul(MULTIPLIER).wrapping_add(self.increment);
    }

    fn word(&mut self) -> u64 {
        self.step();
        ((self.state >> 64) as u64 ^ self.state as u64).rotate_right((self.state >> 122) as u32)
    }

    /// A number below `bound`, like NumPy's `Generator.integers` for bounds above 2^32. For smaller
    /// bounds NumPy uses halves of words (Lemire, arXiv 1805.10941).
    pub fn below(&mut self, bound: u64) -> u64 {
        assert!(bound > 1 << 32, "NumPy gives smaller numbers in another way");
        loop {
            let product = u128::from(self.word()) * u128::from(bound);
            if product as u64 >= bound.wrapping_neg() % bound {
                return (product >> 64) as u64;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `numpy.random.default_rng(seed).integers(0, bound, 3, dtype=numpy.int64)` of NumPy 2.4.6.
    #[test]
    fn numbers_are_those_of_numpy() {
        for (seed, bound, expected) in [
            (0, 18085043209519168, [11519479638016739, 4879104375773776, 741007950832349]),
            (10007, 35672076256399, [29368918863762, 1854861547952, 13781388650482]),
            (140098, 46117321357487, [33551306561939, 25521799555577, 15320443889499]),
            (3, 6917529027641094201, [592480599909305662, 1638143553428912871, 5542839372172844855]),
        ] {
            let mut generator = Pcg64::new(seed);
            assert_eq!([0; 3].map(|_| generator.below(bound)), expected, "seed {seed} below {bound}");
        }
    }
}
