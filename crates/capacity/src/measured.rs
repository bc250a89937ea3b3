//! Step times that were measured on real machines (`thunder bench report`), for simulations of the
//! same machines.

use serde::{Deserialize, Serialize};
use thunder_cost::StepRows;
use thunder_engine::{Limits, RoutedExperts};

use crate::PlanError;
use crate::simulate::StepCost;

mod fit;

/// Step times of one model on one set of machines. They are times of whole steps, so they hold for
/// any layout.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Measured {
    /// The model.
    pub model: String,
    /// Its ranks.
    pub ranks: usize,
    /// Seconds of a step that only decodes, by its rows, in ascending order, with short contexts.
    pub decode: Vec<Point>,
    /// Seconds of a step that only reads a prompt to its end, by its rows, in ascending order.
    pub prompt: Vec<Point>,
    /// Seconds that such a step saves if its prompt does not end, because no row gives a token.
    #[serde(default)]
    pub piece_saves_s: f64,
    /// Seconds that a step with both kinds of rows saves compared with one step of each kind, if no
    /// prompt ends in it. Negative if it takes longer.
    #[serde(default)]
    pub mixed_saves_s: f64,
    /// Additional seconds of such a step for each prompt that ends in it.
    #[serde(default)]
    pub mixed_end_s: f64,
    /// Seconds from a request to an idle engine until its first step begins.
    #[serde(default)]
    pub wake_s: f64,
    /// Additional seconds for each token that a decoding row attends to.
    pub decode_pair_s: f64,
    /// Additional seconds for each token that a prompt row attends to.
    pub prompt_pair_s: f64,
    /// Joules of the processors for each token of full batches; `None` if they cannot be measured.
    #[serde(default)]
    pub joules_token: Option<f64>,
    /// Requests that decode together.
    pub sequences: usize,
    /// Rows of a step.
    pub rows: usize,
    /// Tokens that the KV cache holds.
    pub kv_tokens: usize,
    /// Most tokens of prompt and answer together.
    pub context: usize,
    /// The step time while answers are running (`--step-time`), in seconds.
    #[serde(default = "usual_step_time_s")]
    pub step_time_s: f64,
    /// The model's routed experts, which determine the size of prompt pieces.
    #[serde(default)]
    pub routed: Option<RoutedExperts>,
}

fn usual_step_time_s() -> f64 {
    thunder_engine::STEP_TIME.as_secs_f64()
}

/// A step's rows and its time.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Point {
    /// Rows.
    pub rows: usize,
    /// Seconds.
    pub seconds: f64,
}

impl Measured {
    /// Reads the output of `thunder bench report`.
    ///
    /// # Errors
    /// When a field is missing or makes no sense.
    pub fn read(json: &[u8]) -> Result<Self, PlanError> {
        let measured: Self = serde_json::from_slice(json)?;
        measured.check()?;
        Ok(measured)
    }

    /// Checks the numbers.
    ///
    /// # Errors
    /// Names the first that makes no sense.
    pub fn check(&self) -> Result<(), PlanError> {
        let times = self.decode.iter().chain(&self.prompt).map(|point| point.seconds);
        let &Self { decode_pair_s, prompt_pair_s, piece_saves_s, mixed_saves_s, mixed_end_s, .. } = self;
        let joules = self.joules_token.unwrap_or(0.0);
        let more = [decode_pair_s, prompt_pair_s, piece_saves_s, mixed_saves_s.abs(), mixed_end_s, joules];
        let also = [self.wake_s, self.step_time_s];
        let bad = times.chain(more).chain(also).find(|seconds| !(0.0..=1e6).contains(seconds));
        if let Some(bad) = bad {
            return Err(field("seconds", bad, "must be a time in seconds"));
        }
        let rises = |points: &[Point]| {
            !points.is_empty()
                && points[0].rows > 0
                && points.windows(2).all(|pair| pair[0].rows < pair[1].rows)
        };
        if !rises(&self.decode) || !rises(&self.prompt) {
            return Err(field("rows", self.decode.len(), "at least one point, each with more rows"));
        }
        for (name, value) in [("sequences", self.sequences), ("rows", self.rows)] {
            if !(1..=4096).contains(&value) {
                return Err(field(name, value, "must be between 1 and 4096"));
            }
        }
        if self.kv_tokens > 1 << 30 || self.context > 1 << 30 {
            return Err(field("kv_tokens", self.kv_tokens, "must be below 2^30"));
        }
        Ok(())
    }

    /// The scheduler's limits on these machines.
    pub fn limits(&self) -> Limits {
        Limits {
            sequences: self.sequences,
            rows: self.rows,
            kv_blocks: self.kv_tokens / thunder_compute::step::KV_BLOCK_TOKENS,
            whole_prompts: None,
            prefix_cache: true,
            snapshots: None,
            draft_rows: 0,
            ahead: false,
            draft_states: false,
            step_time: std::time::Duration::from_secs_f64(self.step_time_s),
            routed: self.routed,
        }
    }
}

fn field(field: &'static str, value: impl ToString, must_be: &str) -> PlanError {
    PlanError::Field { field, value: value.to_string(), must_be: must_be.to_owned() }
}

impl StepCost for Measured {
    fn stages(&self) -> usize {
        1
    }

    fn seconds(&self, _stage: usize, rows: &StepRows) -> f64 {
        let decode = between(&self.decode, rows.decode) + self.decode_pair_s * rows.context;
        let prompt = between(&self.prompt, rows.prompt) + self.prompt_pair_s * rows.prompt_pairs;
        match (rows.decode, rows.prompt, rows.prompt_ends) {
            (0, 0, _) => 0.0,
            (_, 0, _) => decode,
            (0, _, 0) => (prompt - self.piece_saves_s).max(0.0),
            (0, ..) => prompt,
            // Both kinds read the weights of the layers separately, but share the rest of the step.
            (_, _, ends) => {
                (decode + prompt - self.mixed_saves_s + self.mixed_end_s * ends as f64).max(decode)
            }
        }
    }

    fn wake_s(&self) -> f64 {
        self.wake_s
    }
}

/// The time at `rows`, on the line between the neighbouring points, or through the nearest two; 0
/// for no rows.
fn between(points: &[Point], rows: usize) -> f64 {
    if rows == 0 {
        return 0.0;
    }
    let [first, .., last] = points else { return points.first().map_or(0.0, |point| point.seconds) };
    if rows <= first.rows {
        return first.seconds;
    }
    let next = points.iter().position(|point| point.rows >= rows).unwrap_or(points.len() - 1).max(1);
    let (a, b) = (points[next - 1], points[next]);
    let slope = (b.seconds - a.seconds) / (b.rows - a.rows) as f64;
    let line = a.seconds + slope * (rows as f64 - a.rows as f64);
    // Noise must not make additional rows free.
    if rows > last.rows { line.max(last.seconds) } else { line }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn measured() -> Measured {
        let point = |rows, seconds| Point { rows, seconds };
        Measured {
            model: "m".into(),
            ranks: 1,
            decode: vec![point(1, 0.010), point(4, 0.016), point(8, 0.032)],
            prompt: vec![point(64, 0.050), point(256, 0.200)],
            piece_saves_s: 0.004,
            mixed_saves_s: 0.005,
            mixed_end_s: 0.001,
            wake_s: 0.0001,
            decode_pair_s: 1e-6,
            prompt_pair_s: 1e-7,
            joules_token: Some(0.5),
            sequences: 8,
            rows: 256,
            kv_tokens: 4096,
            context: 1024,
            step_time_s: 0.05,
            routed: None,
        }
    }

    #[test]
    fn times_between_the_points_are_on_their_line() {
        let measured = measured();
        let decode = |decode| measured.seconds(0, &StepRows { decode, ..StepRows::default() });
        assert!((decode(2) - 0.012).abs() < 1e-12 && (decode(6) - 0.024).abs() < 1e-12);
        assert!((decode(16) - 0.064).abs() < 1e-12, "beyond the last point");
        let prompt = StepRows { prompt: 32, prompt_pairs: 1e4, ..StepRows::default() };
        let mixed = StepRows { decode: 1, context: 1000.0, ..prompt };
        let ends = |prompt_ends, rows| measured.seconds(0, &StepRows { prompt_ends, ..rows });
        let (reads, both) = (0.050 + 0.001, 0.010 + 0.001 + 0.050 + 0.001);
        assert!((ends(1, prompt) - reads).abs() < 1e-12 && (ends(0, prompt) - (reads - 0.004)).abs() < 1e-12);
        assert!((ends(0, mixed) - (both - 0.005)).abs() < 1e-12);
        assert!((ends(2, mixed) - (both - 0.003)).abs() < 1e-12);
        assert_eq!(measured.seconds(0, &StepRows::default()), 0.0);
    }

    #[test]
    fn a_file_is_read_back_and_a_damaged_one_is_refused() {
        let json = serde_json::to_vec(&measured()).expect("JSON");
        assert_eq!(Measured::read(&json).expect("it is whole"), measured());
        let wrong = |change: fn(&mut Measured)| {
            let mut measured = measured();
            change(&mut measured);
            Measured::read(&serde_json::to_vec(&measured).expect("JSON")).expect_err("refused").to_string()
        };
        assert!(wrong(|measured| measured.decode.clear()).contains("rows"));
        assert!(wrong(|measured| measured.prompt[1].rows = 64).contains("rows"));
        assert!(wrong(|measured| measured.decode[0].seconds = -1.0).contains("seconds is -1"));
        assert!(wrong(|measured| measured.sequences = 0).contains("sequences"));
        assert!(Measured::read(b"{}").is_err() && Measured::read(b"\xff").is_err());
    }
}
