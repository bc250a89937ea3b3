//! Attention residuals (Kimi K3): readers of the residual stream read a mix of its sums.

use std::ops::Range;

use thunder_compute::{Backend, ComputeError};

use super::Pass;

/// How the sums of the residual stream are mixed for one reader.
pub(super) struct Mix {
    /// The vector whose products with the sums' norms are the scores.
    pub weight: Vec<f32>,
    /// Of these norms.
    pub eps: f32,
    /// Sums that have been put aside before.
    pub sums: usize,
}

impl Mix {
    /// Leaves the mix of these rows in [`Pass::normed`].
    pub fn apply<B: Backend>(&self, rows: Range<usize>, pass: &mut Pass<'_, B>) -> Result<(), ComputeError> {
        let Pass { backend, residual, normed, sums, .. } = pass;
        backend.mix(&sums[..self.sums], residual, rows, (&self.weight, self.eps), normed)
    }

    /// Puts the residual stream's rows aside as the next sum, and restarts it with zeros.
    pub fn put_aside<B: Backend>(
        &self,
        rows: Range<usize>,
        pass: &mut Pass<'_, B>,
    ) -> Result<(), ComputeError> {
        let Pass { backend, residual, sums, .. } = pass;
        let (_, width) = backend.extent(residual);
        backend.copy_columns((residual, 0), rows.clone(), (&mut sums[self.sums], 0..width))?;
        backend.scale(0..width, &vec![0.0; rows.len()], rows, residual)
    }
}
