//! Kernels that a model will need: threads compile them while its weights are read.

use thunder_compute::CacheKind;

use super::Outcome;
use super::matrices::forms_of_prompts;
use crate::backend::GpuBackend;
use crate::format::Format;
use crate::kernel::{AttendShared, Attended, BATCHES, Kernel, Leaves, Product, Role, Sum};
use crate::matrix::{Chunk, Matrix};
use crate::proof::Weights;
use crate::without::{Way, without};

/// A part of a matrix whose products by matrices are to be proved.
#[derive(Debug)]
pub(crate) struct Expected {
    chunk: Chunk,
    blocks: usize,
    gated: bool,
}

impl GpuBackend {
    /// The kernels of attention that are used if they are right.
    pub(super) fn kernels_of_attention(&self, cache: CacheKind, queries: usize, int8: bool) -> Vec<Kernel> {
        let (latent, widths) = match cache {
            CacheKind::Heads { key_dim, value_dim, .. } => (false, [key_dim, value_dim]),
            CacheKind::Latent { rank, rotated, .. } => (true, [rank, rotated]),
            CacheKind::State { .. } => return Vec::new(),
        };
        // Those of prompts take the longest.
        let of_prompts = self.prompt_families(latent, widths, int8).into_iter().next();
        let mut all: Vec<_> = of_prompts.map(|family| family.kernels()[0]).into_iter().collect();
        if !latent {
            all.extend(self.many_forms(queries, widths, int8).next().map(Kernel::AttendMany));
        } else if let Some(few) = AttendShared::of(Attended::All, widths, int8)
            && !without(Way::Shared)
        {
            all.push(Kernel::AttendShared(few));
            all.extend((queries > few.heads).then(|| Kernel::AttendShared(few.with_most_heads())));
        }
        all
    }

    /// Lets threads compile the kernels that products with a matrix will need, if the device
    /// multiplies prompts by cooperative matrices: those take long. `halves_alike`: the matrix may
    /// consist of gates and ups.
    pub(super) fn expect_products(&mut self, w: &Matrix, halves_alike: bool) {
        let Some(side) = self.device.matrix_side else { return };
        if w.blocks == 0 || self.proving.is_some() {
            return;
        }
        let gated: &[bool] = if halves_alike && w.chunks.len() == 1 { &[false, true] } else { &[false] };
        for chunk in &w.chunks {
            for &gated in gated {
                self.expect_product(side, chunk, w.blocks, gated);
            }
        }
    }

    fn expect_product(&mut self, side: usize, chunk: &Chunk, blocks: usize, gated: bool) {
        let by_matrices = chunk.begins_a_quad() && self.config.activations.allows_bf16();
        if !self.expected_forms.insert((chunk.format, gated, by_matrices)) {
            return;
        }
        if by_matrices {
            let forms = forms_of_prompts(side, chunk.format, gated).map(Kernel::Matrices);
            self.device.prepare_soon(forms.into_iter().chain([Kernel::Halve]));
            self.expected.push(Expected { chunk: chunk.clone(), blocks, gated });
        }
        let kernels = self.products_of_a_row(chunk.format, gated);
        self.device.prepare_soon(kernels);
    }

    /// Lets threads compile kernels that steps with more rows need. Asked in each step, so each is
    /// passed on once.
    pub(super) fn prepare_larger(&mut self, kernels: impl IntoIterator<Item = Kernel>) {
        for kernel in kernels {
            if self.coming.insert(kernel) {
                self.device.prepare_soon([kernel]);
            }
        }
    }

    /// The products of a generated token's row.
    fn products_of_a_row(&self, format: Format, gated: bool) -> Vec<Kernel> {
        let (plain, of_gated) = (self.plain_input(), self.gated_input());
        let roles = match gated {
            true => vec![(Role::Gated, plain, Leaves::of(of_gated))],
            false => vec![(Role::Plain, plain, Leaves::Normed), (Role::Plain, of_gated, Leaves::Normed)],
        };
        let mut all = Vec::new();
        for (role, input, leaves) in roles {
            if !input.has_levels() || !format.has_scales() {
                continue;
            }
            let sum = if self.has_subgroups { Sum::Subgroup } else { Sum::Shared };
            let product = Product::new(format, input, role, sum, BATCHES[0]);
            all.push(product);
            all.push(product.leaving(leaves));
        }
        all.retain(|product| product.can_bind());
        all.into_iter().map(Kernel::Product).collect()
    }

    /// Proves the products by matrices that were expected while weights were read.
    pub(super) fn prove_expected(&mut self) -> Outcome {
        for Expected { chunk, blocks, gated } in std::mem::take(&mut self.expected) {
            // As for one row, so that both shapes are proved.
            self.matrices_for(Weights { chunk: &chunk, blocks }, gated, 1)?;
        }
        Ok(())
    }
}
