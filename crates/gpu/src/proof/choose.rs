//! A norm, a router's product and its choice in one kernel: the same bits as from three kernels.

use thunder_compute::{ComputeError, Device as _, LinearInput, Norm};

use super::Numbers;
use super::levels::same;
use crate::backend::GpuBackend;
use crate::buffer::BLOCK_COLUMNS;
use crate::kernel::{Choose, Input, Kernel};
use crate::operations::choose::Routed;

impl GpuBackend {
    /// Whether a form is correct for this router. Proved now, if it was not before.
    pub(crate) fn proves_choose(&mut self, form: Choose, routed: &Routed<'_>) -> Result<bool, ComputeError> {
        let kernel = Kernel::Choose(form);
        if self.proofs.is_proved(&[kernel]) {
            return Ok(true);
        }
        match self.outside_step(|backend| backend.compare_choose(form, routed))? {
            Ok(()) => {
                self.proofs.note(&[kernel]);
                Ok(true)
            }
            Err(reason) => {
                self.refuse(&format!("{form:?}"), &reason);
                Ok(false)
            }
        }
    }

    fn compare_choose(
        &mut self,
        form: Choose,
        routed: &Routed<'_>,
    ) -> Result<Result<(), String>, ComputeError> {
        const ROWS: usize = 3;
        let Routed { x, router, spec, .. } = *routed;
        let (width, blocks, mut numbers) = (x.width, router.blocks, Numbers(16));
        let mut x = self.buffer(ROWS, width)?;
        self.write(&numbers.take(ROWS * width), &mut x)?;
        let norm = Norm { weight: self.vector(&numbers.take(width))?, eps: 1e-5 };
        let [mut usual, mut normed] = [self.buffer(ROWS, width)?, self.buffer(ROWS, width)?];
        let mut logits = self.buffer(ROWS, router.rows)?;
        let [mut of_usual, mut choices] =
            [self.buffer(ROWS, 2 * spec.choices())?, self.buffer(ROWS, 2 * spec.choices())?];
        [&mut usual, &mut normed, &mut of_usual, &mut choices].into_iter().try_for_each(|x| x.shape(ROWS))?;
        let rows = 1..ROWS;
        let routed = Routed { x: &x, norm: &norm, router, spec };
        // Twice, because the first run must leave the counters unchanged.
        for _ in 0..2 {
            self.record_choose(form, &routed, rows.clone(), (&normed, &choices))?;
        }
        let left = self.levels_at(0, &normed, blocks, Input::Bytes)?;
        let of_rows = |words: usize| words..ROWS * words;
        let levels = self.kept(&left.levels, ROWS * blocks * 8)?;
        let scales = self.kept(&left.scales, ROWS * blocks * 4)?;
        self.record_norm(&x, rows.clone(), (&norm.weight, norm.eps), &usual, false)?;
        self.multiply(LinearInput::Precise(&usual), rows.clone(), router, &mut logits, false)?;
        self.route_rows(spec, &logits, rows.clone(), &mut of_usual)?;
        let operand = self.quantized(&usual, rows, blocks, Input::Bytes, None)?;
        debug_assert_eq!(blocks * BLOCK_COLUMNS, usual.stride());
        let pairs = [
            (&usual.memory, &normed.memory, of_rows(usual.stride())),
            (&operand.buffers[0], &levels, of_rows(blocks * 8)),
            (&operand.buffers[1], &scales, of_rows(blocks * 4)),
            (&of_usual.memory, &choices.memory, of_rows(of_usual.stride())),
        ];
        same(self, &pairs)
    }
}
