//! Proofs: each kernel form is run on small data and compared with the CPU before it is used.
//!
//! If a form of a product is wrong, it is refused by name and the next form is used ([`products`]).
//! Other kernels have one form; if it is wrong, the device is refused ([`families`]). Proofs are
//! kept by adapter, driver and the kernels' text ([`memory`]).

mod attend;
mod batch;
mod change;
mod choose;
mod compress;
mod families;
mod latent;
mod levels;
mod matrices;
pub(crate) mod memory;
mod pairs;
mod products;
mod select;
mod share;
mod state;

use thunder_compute::{CacheKind, CacheShape, ComputeError, KvFormat};

use crate::backend::GpuBackend;
use crate::kernel::{
    Attend, AttendLatent, AttendLatentMatrices, AttendMany, AttendMatrices, AttendShared, AttendTiles,
    Change, Compress, Conv, Draw, HeldRecurrence, Kernel, Recurrence, Select,
};
pub(crate) use products::Weights;
#[cfg(test)]
pub(crate) use state::recurrence;

/// Kernels that are proved together, when a model first needs one of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Family {
    /// Norms, sums, gates, curves, picked rows and columns, the largest output.
    Rows,
    /// Attention over keys and values, or over compressed vectors.
    Tokens { latent: bool, int8: bool },
    /// Attention of all query heads of a KV head.
    Many(AttendMany),
    /// Attention of prompts' rows.
    Tiles(AttendTiles),
    /// Attention of prompts' rows by cooperative matrices.
    Matrices(AttendMatrices),
    /// Attention of prompts' rows to compressed vectors.
    LatentTiles(AttendLatent),
    /// Attention of prompts' rows to compressed vectors by cooperative matrices.
    LatentMatrices(AttendLatentMatrices),
    /// Attention of all query heads of a row to compressed vectors.
    Shared(AttendShared),
    /// Levels that the kernel that adds attention's splits stores.
    CombinedLevels,
    /// Levels that a norm stores.
    NormedLevels,
    /// The choice of tokens.
    Draws(Draw),
    /// How likely chosen tokens are.
    Likely,
    /// The router.
    Experts,
    /// Delta rules, state spaces and gated convolutions.
    State,
    /// Recurrences whose state stays in registers.
    HeldState(HeldRecurrence),
    /// The selection of tokens, and attention to selected ones.
    Selection { int8: bool },
    /// Changes of rows that few families need, and weights of given experts.
    Changes,
    /// Compressed tokens, and attention to them.
    Compression { int8: bool },
    /// Compressed tokens that layers share, and choices among blocks of keys.
    Pooling { int8: bool },
}

impl Family {
    /// What is proved; a form of which others are substitutes comes first.
    pub(crate) fn kernels(self) -> Vec<Kernel> {
        match self {
            Self::Rows => vec![
                Kernel::Norm { levels: false },
                Kernel::SquareSums,
                Kernel::NormBySums,
                Kernel::Add,
                Kernel::TakeRows,
                Kernel::Gate,
                Kernel::CopyColumns,
                Kernel::Scale,
                Kernel::WeighInput,
                Kernel::Bend,
                Kernel::Largest,
                Kernel::NextTokens,
                Kernel::ShareLargest,
            ],
            Self::Tokens { latent, int8 } => {
                let attend = Kernel::Attend(Attend { latent, int8 });
                let mut all =
                    vec![Kernel::Prepare, Kernel::Append { int8 }, attend, Kernel::Combine { levels: false }];
                all.push(match latent {
                    true => Kernel::PrepareLatent { int8 },
                    false => Kernel::PrepareAppend { int8 },
                });
                all
            }
            Self::Many(form) => vec![Kernel::AttendMany(form)],
            Self::Tiles(form) => vec![Kernel::AttendTiles(form)],
            Self::Matrices(form) => vec![Kernel::AttendMatrices(form)],
            Self::LatentTiles(form) => vec![Kernel::AttendLatent(form)],
            Self::LatentMatrices(form) => vec![Kernel::AttendLatentMatrices(form)],
            Self::Shared(form) => vec![Kernel::AttendShared(form)],
            Self::CombinedLevels => vec![Kernel::Combine { levels: true }],
            Self::NormedLevels => vec![Kernel::Norm { levels: true }],
            Self::Draws(form) => vec![Kernel::Draw(form), Kernel::Edit],
            Self::Likely => vec![Kernel::Likely],
            Self::Experts => vec![Kernel::Route],
            Self::State => {
                let mut all = vec![Kernel::NormGated, Kernel::KeepDrafts];
                all.extend(Conv::all().map(Kernel::Conv));
                all.extend(Recurrence::all().map(Kernel::Recurrence));
                all
            }
            Self::HeldState(form) => vec![Kernel::HeldRecurrence(form)],
            Self::Compression { int8 } => {
                let mut all = Compress::ALL.map(Kernel::Compress).to_vec();
                all.extend([Select::AttendBoth { int8 }, Select::Combine].map(Kernel::Select));
                all.push(Kernel::Append { int8 });
                all
            }
            Self::Pooling { int8 } => {
                let mut all = Compress::ALL.map(Kernel::Compress).to_vec();
                let selects = [Select::Scores { int8 }, Select::Blocks, Select::Within, Select::Best];
                all.extend(selects.map(Kernel::Select));
                all
            }
            Self::Changes => {
                let mut all = Change::ALL.map(Kernel::Change).to_vec();
                all.push(Kernel::RouteAssigned);
                all
            }
            Self::Selection { int8 } => {
                let all = [Select::Scores { int8 }, Select::Best, Select::Attend { int8 }, Select::Combine];
                all.map(Kernel::Select).to_vec()
            }
        }
    }
}

impl GpuBackend {
    /// Proves a family of kernels, if it was not proved before. Call it between steps only.
    pub(crate) fn prove(&mut self, family: Family) -> Result<(), ComputeError> {
        let kernels = family.kernels();
        if self.proving.is_some() || self.proofs.is_proved(&kernels) {
            return Ok(());
        }
        self.device.prepare_together(&kernels);
        self.proving = Some(family);
        let outcome = families::check(self, family);
        self.proving = None;
        self.step = None;
        match outcome? {
            Ok(()) => {
                self.proofs.note(&kernels);
                Ok(())
            }
            Err(reason) => Err(self.refused(&format!("{family:?}"), &reason)),
        }
    }

    /// Runs a check without the rows and tables of the current step.
    fn outside_step<T>(
        &mut self,
        check: impl FnOnce(&mut Self) -> Result<T, ComputeError>,
    ) -> Result<T, ComputeError> {
        let (step, tables) = (self.step.take(), self.device.take_tables()?);
        let outcome = check(self);
        self.device.return_tables(tables)?;
        self.step = step;
        outcome
    }

    /// Whether a family that has a substitute is correct. Proved now, if it was not before. May be
    /// called within a step.
    pub(crate) fn takes(&mut self, family: Family) -> Result<bool, ComputeError> {
        // Other families that have a form for the proof's data must not be used.
        if let Some(proving) = self.proving {
            return Ok(proving == family);
        }
        if let Some(right) = self.taken.get(&family) {
            return Ok(*right);
        }
        let kernels = family.kernels();
        let right = self.proofs.is_proved(&kernels) || {
            let (step, tables) = (self.step.take(), self.device.take_tables()?);
            let (next, tokens) = (self.next.take(), std::mem::take(&mut self.tokens));
            self.proving = Some(family);
            self.device.prepare_together(&kernels);
            let outcome = match kernels.iter().try_for_each(|kernel| self.device.prepare(kernel)) {
                Ok(()) => families::check(self, family),
                Err(error) => Ok(Err(error.to_string())),
            };
            self.proving = None;
            self.device.return_tables(tables)?;
            self.step = step;
            (self.next, self.tokens) = (next, tokens);
            match outcome? {
                Ok(()) => {
                    self.proofs.note(&kernels);
                    true
                }
                Err(reason) => {
                    self.refuse(&format!("{family:?}"), &reason);
                    false
                }
            }
        };
        self.taken.insert(family, right);
        Ok(right)
    }

    /// Proves a family that has no substitute, if it was not proved before. May be called within a
    /// step.
    pub(crate) fn require(&mut self, family: Family) -> Result<(), ComputeError> {
        if self.proving.is_some() || self.takes(family)? {
            return Ok(());
        }
        Err(self.refused(&format!("{family:?}"), "its proof has failed"))
    }

    /// Records a wrong form.
    pub(crate) fn refuse(&mut self, kernel: &str, reason: &str) {
        let device = &self.device.name;
        tracing::warn!(device, kernel, reason, "refused: it is wrong on this device");
        self.refusals.push(format!("{kernel}: {reason}"));
    }

    /// Proves the operations on a cache.
    pub(crate) fn prove_caches(&mut self, shape: &CacheShape) -> Result<(), ComputeError> {
        let int8 = shape.format == KvFormat::Int8;
        for kind in &shape.caches {
            // Those of an indexer's keys, and of compressed tokens.
            if let CacheKind::Latent { rank, rotated, every } = kind {
                if rank == rotated {
                    self.prove(Family::Selection { int8 })?;
                }
                if *every > 1 {
                    self.prove(Family::Compression { int8 })?;
                }
            }
            self.prove(match kind {
                CacheKind::Heads { .. } => Family::Tokens { latent: false, int8 },
                CacheKind::Latent { .. } => Family::Tokens { latent: true, int8 },
                CacheKind::State { .. } => Family::State,
            })?;
        }
        Ok(())
    }

    fn refused(&self, what: &str, reason: &str) -> ComputeError {
        let reason =
            format!("its driver computes {what} wrongly ({reason}): use --device cpu, or another driver");
        ComputeError::Device { device: self.device.name.clone(), reason }
    }
}

/// A repeatable sequence of numbers in −1..1.
pub(crate) struct Numbers(pub u64);

impl Numbers {
    pub fn take(&mut self, count: usize) -> Vec<f32> {
        let next = |_| {
            self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (self.0 >> 33) as f32 / (1u32 << 30) as f32 - 1.0
        };
        (0..count).map(next).collect()
    }
}

/// `‖found − expected‖ / ‖expected‖` within the limit, and all numbers finite.
pub(crate) fn compare(found: &[f32], expected: &[f32], limit: f32) -> Result<(), String> {
    if found.len() != expected.len() {
        return Err(format!("{} numbers, not {}", found.len(), expected.len()));
    }
    if let Some(wrong) = found.iter().find(|x| !x.is_finite()) {
        return Err(format!("a result is {wrong}"));
    }
    let norm = |numbers: &mut dyn Iterator<Item = f32>| numbers.map(|x| f64::from(x * x)).sum::<f64>().sqrt();
    let distance = norm(&mut found.iter().zip(expected).map(|(a, b)| a - b));
    let off = (distance / norm(&mut expected.iter().copied()).max(1e-30)) as f32;
    if off <= limit { Ok(()) } else { Err(format!("off by {off:.1e}, the limit is {limit:.0e}")) }
}
