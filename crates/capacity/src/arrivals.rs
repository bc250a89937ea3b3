//! Arrival times of requests, and their lengths.

/// A request of a workload.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Arrival {
    /// Seconds from the start.
    pub at_s: f64,
    /// The request's user. Prompts of one user have the same beginning.
    pub user: u32,
    /// Tokens of the prompt.
    pub prompt: usize,
    /// Of these, tokens at the beginning that the user's other prompts share.
    pub shared: usize,
    /// Tokens of the answer.
    pub answer: usize,
}

/// A random number generator (SplitMix64), so that an answer can be repeated.
#[derive(Debug, Clone)]
pub struct Random(u64);

impl Random {
    /// The same seed gives the same numbers.
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// A number from 0 up to 1.
    pub fn unit(&mut self) -> f64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        ((mixed ^ (mixed >> 31)) >> 11) as f64 / (1u64 << 53) as f64
    }

    /// Time to the next event of a Poisson process.
    pub fn wait_s(&mut self, rate_s: f64) -> f64 {
        -(1.0 - self.unit()).ln() / rate_s
    }

    /// A length around `mean`: from half to one and a half, at least 1.
    pub fn length(&mut self, mean: usize) -> usize {
        ((mean as f64 * (0.5 + self.unit())).round() as usize).max(1)
    }
}

/// What users ask for.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Habit {
    /// Users.
    pub users: u32,
    /// Mean tokens of a prompt, and of an answer.
    pub prompt: usize,
    /// Mean tokens of an answer.
    pub answer: usize,
    /// Share of a prompt with which the user's earlier prompts began.
    pub shared: f64,
}

impl Habit {
    /// A request at a time.
    pub fn draw(&self, at_s: f64, random: &mut Random) -> Arrival {
        let user = (random.unit() * f64::from(self.users)) as u32;
        let prompt = random.length(self.prompt);
        let shared = (self.prompt as f64 * self.shared) as usize;
        Arrival { at_s, user, prompt, shared: shared.min(prompt), answer: random.length(self.answer) }
    }

    /// Requests at random times, `rate_s` a second.
    pub fn open(&self, rate_s: f64, requests: usize, seed: u64) -> Vec<Arrival> {
        let (mut random, mut at_s) = (Random::new(seed), 0.0);
        (0..requests)
            .map(|_| {
                at_s += random.wait_s(rate_s);
                self.draw(at_s, &mut random)
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arrivals_have_the_rate_and_the_lengths_that_were_asked_for() {
        let habit = Habit { users: 10, prompt: 200, answer: 50, shared: 0.5 };
        let arrivals = habit.open(4.0, 4000, 1);
        let mean = |of: fn(&Arrival) -> f64| arrivals.iter().map(of).sum::<f64>() / 4000.0;
        assert!((arrivals[3999].at_s - 1000.0).abs() < 50.0, "{}", arrivals[3999].at_s);
        assert!((mean(|arrival| arrival.prompt as f64) - 200.0).abs() < 5.0);
        assert!((mean(|arrival| arrival.answer as f64) - 50.0).abs() < 2.0);
        assert!((0..10).all(|user| arrivals.iter().any(|arrival| arrival.user == user)));
        assert!(arrivals.iter().all(|arrival| arrival.shared <= arrival.prompt && arrival.user < 10));
        assert_eq!(arrivals, habit.open(4.0, 4000, 1), "the same seed, the same requests");
    }
}
