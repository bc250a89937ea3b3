/// A seeded generator (SplitMix64): the same seed gives the same numbers in every run.
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// A generator that starts from `seed`.
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// 64 random bits.
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// A number in `0..limit`; `limit` is above 0.
    pub fn below(&mut self, limit: u64) -> u64 {
        self.bits() % limit
    }

    /// A number in −1..1.
    pub fn float(&mut self) -> f32 {
        (self.bits() >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    }

    /// `count` numbers in −1..1.
    pub fn floats(&mut self, count: usize) -> Vec<f32> {
        (0..count).map(|_| self.float()).collect()
    }

    /// `count` random bytes.
    pub fn bytes(&mut self, count: usize) -> Vec<u8> {
        let mut bytes = vec![0; count];
        for chunk in bytes.chunks_mut(8) {
            chunk.copy_from_slice(&self.bits().to_le_bytes()[..chunk.len()]);
        }
        bytes
    }
}

#[cfg(test)]
mod tests {
    use super::Random;

    #[test]
    fn a_seed_repeats_and_two_seeds_differ() {
        assert_eq!(Random::new(1).bytes(21), Random::new(1).bytes(21));
        assert_ne!(Random::new(1).bytes(21), Random::new(2).bytes(21));
        // The first value of SplitMix64's reference implementation for the seed 1234567.
        assert_eq!(Random::new(1_234_567).bits(), 6_457_827_717_110_365_317);
    }

    #[test]
    fn floats_fill_the_range_evenly() {
        let floats = Random::new(3).floats(10_000);
        assert!(floats.iter().all(|x| (-1.0..1.0).contains(x)));
        for quarter in [-1.0, -0.5, 0.0, 0.5] {
            let inside = floats.iter().filter(|x| (quarter..quarter + 0.5).contains(*x)).count();
            assert!((2300..2700).contains(&inside), "{inside} of 10,000 from {quarter}");
        }
    }
}
