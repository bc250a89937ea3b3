//! Attention of all query heads of a row together to compressed vectors, which they share.

use std::ops::Range;

use thunder_compute::ComputeError;

use super::Outcome;
use super::attend::Attention;
use crate::backend::{GpuBackend, StepTables};
use crate::buffer::{Buffer, Memory};
use crate::caches::Vectors;
use crate::kernel::{AttendShared, Attended, Kernel, UNIT};
use crate::proof::Family;
use crate::without::{Way, without};

/// A workgroup does about this many times the work of one that [`GpuBackend::busy_groups`] counts.
const LARGER: usize = 4;

/// A part of the columns of queries: in which buffer, their first column, and columns from a head
/// to the next one.
pub(super) struct Queries<'a> {
    pub buffer: &'a Buffer,
    pub first: usize,
    pub of_head: usize,
}

/// Query heads that attend together, and what to.
pub(super) struct Together<'a> {
    pub tokens: Attended,
    pub heads: usize,
    /// Columns that meet the first part of vectors, and those that meet the second one.
    pub queries: [Queries<'a>; 2],
    /// The parts of vectors of each cache.
    pub caches: &'a [[&'a Vectors; 2]],
    pub selection: Option<&'a Buffer>,
    /// Tokens of the window, and of a compressed token.
    pub window: usize,
    pub every: usize,
    /// Rows attend in one piece.
    pub is_whole: bool,
}

impl Together<'_> {
    /// Columns of a value.
    fn width(&self) -> usize {
        let [first, second] = self.caches[0];
        first.width + if self.tokens == Attended::Both { second.width } else { 0 }
    }
}

impl GpuBackend {
    /// Attends with all query heads together, if there is a kernel for it.
    pub(super) fn attend_latent_shared(
        &mut self,
        tables: &StepTables,
        rows: Range<usize>,
        attention: &Attention<'_>,
        parts: (&Memory, usize),
    ) -> Result<bool, ComputeError> {
        let Some(absorbed) = attention.absorbed else { return Ok(false) };
        let (_, compressed, turned) = attention.caches.0.tokens(attention.caches.1);
        let queries = [
            Queries { buffer: absorbed, first: 0, of_head: compressed.width },
            Queries { buffer: attention.queries, first: attention.q_first, of_head: attention.q_head_stride },
        ];
        let together = Together {
            tokens: Attended::All,
            heads: attention.kv_heads.len(),
            queries,
            caches: &[[compressed, turned]],
            selection: None,
            window: 0,
            every: 1,
            is_whole: false,
        };
        let Some(form) = self.shared_for(&together, rows.len() * parts.1)? else { return Ok(false) };
        self.attend_shared(form, tables, rows, &together, parts)?;
        Ok(true)
    }

    /// The form for this number of splits over all rows, if there is one and it is correct: with
    /// more heads in a workgroup where enough workgroups are left. Both are proved together, the
    /// second one to have the bits of the first.
    pub(super) fn shared_for(
        &mut self,
        of: &Together<'_>,
        splits: usize,
    ) -> Result<Option<AttendShared>, ComputeError> {
        let [first, second] = of.caches[0];
        // Queries are read in quads.
        let are_quads = of.queries.iter().all(|queries| {
            [queries.first, queries.of_head, queries.buffer.stride()].iter().all(|n| n.is_multiple_of(4))
        });
        let few = AttendShared::of(of.tokens, [first.width, second.width], first.scales.is_some());
        let Some(few) = few.filter(|_| are_quads && !without(Way::Shared)) else { return Ok(None) };
        if let Some(Family::Shared(form)) = self.proving {
            return Ok(Some(form));
        }
        if !self.takes(Family::Shared(few))? {
            return Ok(None);
        }
        let many = few.with_most_heads();
        if of.heads <= few.heads || !self.takes(Family::Shared(many))? {
            return Ok(Some(few));
        }
        let is_enough = splits * of.heads.div_ceil(many.heads) >= self.busy_groups / LARGER;
        Ok(Some(if is_enough { many } else { few }))
    }

    /// Attends to `splits` parts of rows.
    pub(super) fn attend_shared(
        &mut self,
        form: AttendShared,
        tables: &StepTables,
        rows: Range<usize>,
        of: &Together<'_>,
        (parts, splits): (&Memory, usize),
    ) -> Outcome {
        let [queries, turned] = &of.queries;
        let [first, second] = of.caches[0];
        let arguments = [
            rows.start,
            splits,
            of.heads,
            of.width() + 2,
            queries.buffer.stride() / 4,
            queries.of_head / 4,
            turned.buffer.stride() / 4,
            turned.first / 4,
            turned.of_head / 4,
            first.width / UNIT,
            second.width / UNIT,
            tables.rows as usize,
            tables.blocks as usize,
            usize::from(of.is_whole),
            of.selection.map_or(0, Buffer::stride),
            of.window,
            of.every,
            usize::from(of.selection.is_some()),
        ]
        .map(|number| number as u32);
        let selected = of.selection.map_or(&self.nothing, |selection| &selection.memory).clone();
        let mut buffers = vec![&tables.memory, &queries.buffer.memory];
        match of.tokens {
            Attended::All => buffers.push(&turned.buffer.memory),
            Attended::Selected => buffers.extend([&turned.buffer.memory, &selected]),
            Attended::Both => buffers.push(&selected),
        }
        let vectors = || of.caches.iter().flatten();
        buffers.extend(vectors().map(|vectors| &vectors.data));
        buffers.push(parts);
        buffers.extend(vectors().flat_map(|vectors| &vectors.scales));
        let groups = [of.heads.div_ceil(form.heads) as u32, rows.len() as u32, splits as u32];
        self.device.dispatch(&Kernel::AttendShared(form), &buffers, &arguments, groups)
    }
}
