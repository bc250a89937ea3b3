//! What every backend must compute: each operation on shapes odd and even, against the plain
//! [`Reference`].
//!
//! ```
//! use thunder_collectives::Group;
//! use thunder_compute::{Reference, conformance};
//!
//! let report = conformance::run(&mut Reference::new(Group::solo()), &conformance::Limits::EXACT);
//! assert!(report.failures.is_empty(), "{report}");
//! ```
//!
//! The suite calls plain and fused operations with the same inputs, whole prompts and prompts cut
//! in pieces, several sequences in one step, and every kind of cache. Sums over ranks are tested by
//! [`run_on_rank`] on each rank of a group.

mod attention;
mod changes;
mod compressed;
pub(crate) mod data;
mod drafts;
mod experts;
mod extra;
mod pooled;
pub(crate) mod products;
mod recurrence;

use std::fmt;

use thunder_collectives::Group;

use crate::backend::{Backend, ComputeError};
use crate::reference::Reference;
use crate::source::Encoding;
use data::Random;
pub use products::{chosen_outputs, likely_outputs};

/// Allowed difference of a backend's results from the reference's: the norm of the difference over
/// the norm of the reference's.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Products with f32, f16 and bf16 weights.
    pub float_products: f32,
    /// Products with quantized weights.
    pub quantized_products: f32,
    /// Attention with an f16 cache, and what follows it.
    pub attention: f32,
    /// Attention with an int8 cache.
    pub attention_int8: f32,
    /// Operations on rows: norms, gates, sums, recurrences.
    pub rows: f32,
}

impl Limits {
    /// Only rounding of f32 in another order of additions.
    pub const EXACT: Self = Self {
        float_products: 1e-5,
        quantized_products: 1e-5,
        attention: 1e-5,
        attention_int8: 1e-5,
        rows: 1e-5,
    };

    fn product(&self, encoding: Encoding) -> f32 {
        match encoding {
            Encoding::Float(_) => self.float_products,
            _ => self.quantized_products,
        }
    }
}

/// A result that is too far off, or an operation that failed.
#[derive(Debug, Clone)]
pub struct Failure {
    /// The operation and its shape.
    pub case: String,
    /// What was wrong.
    pub reason: String,
}

/// The outcome of a run.
#[derive(Debug, Default)]
pub struct Report {
    /// Results that were compared.
    pub compared: usize,
    /// Those that were wrong.
    pub failures: Vec<Failure>,
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{} of {} results are wrong", self.failures.len(), self.compared)?;
        for Failure { case, reason } in &self.failures {
            writeln!(f, "  {case}: {reason}")?;
        }
        Ok(())
    }
}

/// A backend and the reference, given the same work.
struct Suite<'a, B: Backend> {
    backend: &'a mut B,
    reference: Reference,
    limits: &'a Limits,
    random: Random,
    report: Report,
}

/// Runs all cases that need no other rank.
pub fn run<B: Backend>(backend: &mut B, limits: &Limits) -> Report {
    let mut suite = Suite {
        backend,
        reference: Reference::new(Group::solo()),
        limits,
        random: Random(1),
        report: Report::default(),
    };
    suite.products();
    suite.experts();
    suite.attention();
    suite.latent_attention();
    suite.recurrence();
    suite.drafts();
    suite.changes();
    suite.extras();
    suite.streams();
    suite.compressed();
    suite.pooled();
    suite.report
}

/// Runs the cases that sum over ranks, on this rank of the backend's group. `group` is another
/// group of the same ranks, for the reference.
pub fn run_on_rank<B: Backend>(backend: &mut B, group: Group, limits: &Limits) -> Report {
    let random = Random(1 + group.rank() as u64);
    let mut suite =
        Suite { backend, reference: Reference::new(group), limits, random, report: Report::default() };
    suite.reductions();
    suite.expert_reductions();
    suite.report
}

impl<B: Backend> Suite<'_, B> {
    /// Runs `work` on both backends and compares the rows of f32 that it returns.
    fn compare(&mut self, case: impl Into<String>, limit: f32, work: impl Work) {
        let case = case.into();
        self.report.compared += 1;
        let expected = match work.run(&mut self.reference) {
            Ok(expected) => expected,
            Err(error) => panic!("{case}: the reference failed: {error}"),
        };
        let reason = match work.run(self.backend) {
            Err(error) => error.to_string(),
            Ok(found) => match difference(&found, &expected) {
                Ok(distance) if distance <= limit => return,
                Ok(distance) => format!("it is off by {distance:.2e}, the limit is {limit:.0e}"),
                Err(reason) => reason,
            },
        };
        self.report.failures.push(Failure { case, reason });
    }
}

/// Operations on either backend: a closure cannot be generic.
trait Work {
    fn run<B: Backend>(&self, backend: &mut B) -> Result<Vec<f32>, ComputeError>;
}

/// `‖found − expected‖ / ‖expected‖`.
fn difference(found: &[f32], expected: &[f32]) -> Result<f32, String> {
    if found.len() != expected.len() {
        return Err(format!("it has {} numbers, not {}", found.len(), expected.len()));
    }
    if let Some(at) = found.iter().position(|x| !x.is_finite()) {
        return Err(format!("number {at} is {}", found[at]));
    }
    let norm = |numbers: &mut dyn Iterator<Item = f32>| numbers.map(|x| f64::from(x * x)).sum::<f64>().sqrt();
    let distance = norm(&mut found.iter().zip(expected).map(|(a, b)| a - b));
    Ok((distance / norm(&mut expected.iter().copied()).max(1e-30)) as f32)
}
