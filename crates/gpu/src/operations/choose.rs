//! A norm, its product with a router's matrix, and the choice of experts. For generated tokens this
//! is one kernel, if it is correct.

use std::ops::Range;

use thunder_compute::{ComputeError, LinearInput, Norm, RouterSpec};

use super::Outcome;
use super::experts::router_words;
use super::leaving::Levels;
use crate::backend::GpuBackend;
use crate::buffer::{BLOCK_COLUMNS, Buffer, Vector};
use crate::kernel::{CHOOSE_OUTPUTS, CHOOSE_ROWS, Choose, Input, Kernel};
use crate::matrix::Matrix;
use crate::proof::Weights;
use crate::without::{Way, without};

/// Maximum rows for this kernel: for each row, workgroups read the router's matrix again.
const MOST_ROWS: usize = 8;
/// Threads of a workgroup.
const THREADS: u32 = 512;

/// A router and its input.
pub(crate) struct Routed<'a> {
    pub x: &'a Buffer,
    pub norm: &'a Norm<Vector>,
    pub router: &'a Matrix,
    pub spec: &'a RouterSpec<Vector>,
}

impl GpuBackend {
    /// Computes the norm of rows and chooses their experts.
    pub(super) fn norm_and_route(
        &mut self,
        routed: &Routed<'_>,
        rows: Range<usize>,
        [normed, logits, choices]: [&mut Buffer; 3],
    ) -> Outcome {
        let Routed { x, norm, router, spec } = *routed;
        let is_generated = self.step.as_ref().is_some_and(|step| step.generated == step.all);
        if is_generated
            && rows.len() <= MOST_ROWS
            && let Some(form) = self.choose_form(routed, normed)?
        {
            normed.shape(x.rows)?;
            choices.shape(x.rows)?;
            self.record_choose(form, routed, rows.clone(), (normed, choices))?;
            self.note_levels(normed, rows, (router.blocks, Input::Bytes, None), 0);
            return Ok(());
        }
        self.norm_rows(x, rows.clone(), (&norm.weight, norm.eps), normed)?;
        self.multiply(LinearInput::Precise(normed), rows.clone(), router, logits, false)?;
        self.route_rows(spec, logits, rows, choices)
    }

    /// The form that does all of this in one kernel. Proved now, if it was not before.
    fn choose_form(&mut self, routed: &Routed<'_>, normed: &Buffer) -> Result<Option<Choose>, ComputeError> {
        let Routed { x, router, .. } = *routed;
        let [chunk] = router.chunks.as_slice() else { return Ok(None) };
        let fits = self.has_shared_results
            && self.wants_levels()
            && !without(Way::Choose)
            && (1..=CHOOSE_OUTPUTS).contains(&router.rows)
            && chunk.rows == (0..router.rows)
            && x.width == normed.width
            && router.blocks * BLOCK_COLUMNS == x.stride()
            && self.device.max_threads() >= THREADS;
        if !fits {
            return Ok(None);
        }
        let sum = self.plain(Weights { chunk, blocks: router.blocks })?.sum;
        let Some(form) = Choose::of(chunk.format, sum, router.blocks) else { return Ok(None) };
        if let Some(right) = self.choosing.get(&form) {
            return Ok(right.then_some(form));
        }
        let right = self.proves_choose(form, routed)?;
        self.choosing.insert(form, right);
        Ok(right.then_some(form))
    }

    /// Records the form, which stores levels in the first place of `GpuBackend::levels`.
    pub(crate) fn record_choose(
        &mut self,
        form: Choose,
        Routed { x, norm, router, spec }: &Routed<'_>,
        rows: Range<usize>,
        (normed, choices): (&Buffer, &Buffer),
    ) -> Outcome {
        let chunk = &router.chunks[0];
        let Levels { levels, scales, .. } = self.levels_at(0, normed, router.blocks, Input::Bytes)?;
        let bytes = 4 * (CHOOSE_ROWS + MOST_ROWS * CHOOSE_OUTPUTS);
        let logits = Self::grown(&mut self.device, &mut self.chosen_logits, bytes, "logits of experts")?;
        let groups = Choose::groups(router.rows);
        let mut arguments = [
            router.blocks,
            chunk.shift as usize,
            router.rows,
            usize::from(router.bias.is_some()),
            rows.start,
            x.stride(),
            x.width,
            norm.eps.to_bits() as usize,
            groups,
            CHOOSE_OUTPUTS,
            choices.stride(),
        ]
        .map(|number| number as u32)
        .to_vec();
        arguments.extend(router_words(spec)?);
        let mut buffers: Vec<_> = chunk.buffers.iter().collect();
        buffers.push(router.bias.as_ref().unwrap_or(&self.nothing));
        buffers.extend([&x.memory, &norm.weight.memory, &normed.memory, &levels, &scales, &logits]);
        buffers.push(spec.correction.as_ref().map_or(&self.nothing, |correction| &correction.memory));
        buffers.push(&choices.memory);
        let groups = [groups as u32 + 1, rows.len() as u32, 1];
        self.device.dispatch(&Kernel::Choose(form), &buffers, &arguments, groups)
    }
}
