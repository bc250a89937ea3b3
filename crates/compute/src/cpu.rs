//! The CPU backend: packed weights, vector kernels chosen at run time, pinned threads.

mod attention;
mod buffer;
mod caches;
mod dispatch;
mod isa;
mod layout;
pub mod measure;
mod operations;
mod pointers;
mod product;
mod recurrence;
mod rows;
mod scratch;
pub mod simd;
#[cfg(test)]
mod tests;
mod threads;

use std::ops::Range;

use thunder_collectives::Group;

use crate::backend::{InputOf, Largest, LinearInput};
use crate::choice::ChoiceScratch;
use attention::latent::LatentScratch;
pub use buffer::Buffer;
pub use caches::Caches;
pub use isa::Isa;
pub use layout::matrix::Linear;
use layout::region::Arena;
use operations::experts::Router;
use pointers::SendPtr;
use pool::{Pool, for_rows};
pub use product::experts::Experts;
use product::numerics::Numerics;
pub use product::quantize::Activations;
use product::{MANY_ROWS, Product, Workspace};
pub use threads::pool;
pub use threads::reducer::Overlap;
use threads::reducer::Reducer;

/// Rows of a step's first part are a multiple of this: the rows of a pair of AMX tiles.
const PART_ROWS: usize = 32;

/// How a [`CpuBackend`] works.
#[derive(Debug, Clone)]
pub struct CpuConfig {
    /// Threads, the calling one included.
    pub threads: usize,
    /// Threads that pack weights before the first step, if more than `threads`.
    pub packing_threads: usize,
    /// Pin thread `i` to core `first_core + i` of the cores that this process may use; the calling
    /// thread when it calls [`crate::Backend::pin_caller`]. For cores that run nothing else; with
    /// `None` the system places the threads.
    pub first_core: Option<usize>,
    /// The kernels' instruction set.
    pub isa: Isa,
    /// Precision of activations in products with quantized weights.
    pub activations: Activations,
    /// Whether prompts' all-reduces overlap computing; the same on all ranks.
    pub overlap: Overlap,
}

impl CpuConfig {
    /// `threads` threads that are not pinned, and defaults for the rest.
    pub fn new(threads: usize, isa: Isa, activations: Activations) -> Self {
        Self {
            threads,
            packing_threads: threads,
            first_core: None,
            isa,
            activations,
            overlap: Overlap::default(),
        }
    }
}

/// One rank's CPU.
#[derive(Debug)]
pub struct CpuBackend {
    pool: Pool,
    /// Packs weights; dropped at the first step.
    packing: Option<Pool>,
    isa: Isa,
    activations: Activations,
    reducer: Reducer,
    arena: Arena,
    space: Workspace,
    step: Option<StepRows>,
    rotations: Vec<rows::Rotation>,
    /// Buffers between uses as scratch.
    spares: Vec<Buffer>,
    /// One normed row.
    normed: Vec<f32>,
    /// A copy of a convolution's last inputs, on which a draft's rows are computed.
    draft_inputs: Vec<f32>,
    /// One per thread.
    latent: Vec<LatentScratch>,
    /// One per thread.
    routers: Vec<Router>,
    choices: ChoiceScratch,
}

/// Rows of the current step.
#[derive(Debug, Clone, Copy)]
struct StepRows {
    all: usize,
    /// Rows of generated tokens, from the first on.
    generated: usize,
}

impl CpuBackend {
    /// A backend whose reductions go over `group`.
    pub fn new(config: &CpuConfig, group: Group) -> Self {
        let pool = Pool::new(config.threads, config.first_core);
        Self {
            space: Workspace::new(pool.threads()),
            packing: (config.packing_threads > config.threads)
                .then(|| Pool::new(config.packing_threads, None)),
            pool,
            isa: config.isa,
            activations: config.activations,
            reducer: Reducer::new(group, config.overlap),
            arena: Arena::default(),
            step: None,
            rotations: Vec::new(),
            spares: Vec::new(),
            normed: Vec::new(),
            draft_inputs: Vec::new(),
            latent: Vec::new(),
            routers: Vec::new(),
            choices: ChoiceScratch::default(),
        }
    }

    /// Threads that compute.
    pub fn threads(&self) -> usize {
        self.pool.threads()
    }

    /// Number of generated tokens among a buffer's `rows`; they come first. Their products, and
    /// those of rows picked from a step, are exact, so that a sequence's tokens do not depend on
    /// the rest of the batch; prompts' products may use bf16.
    fn generated(&self, rows: usize) -> usize {
        match self.step {
            Some(step) if step.all == rows => step.generated,
            Some(_) => rows,
            None if rows < MANY_ROWS => rows,
            None => 0,
        }
    }

    /// Splits rows into generated tokens and prompts (true).
    fn alike(&self, all: usize, rows: &Range<usize>) -> impl Iterator<Item = (Range<usize>, bool)> + use<> {
        let generated = self.generated(all);
        let parts =
            [(rows.start..generated.min(rows.end), false), (generated.max(rows.start)..rows.end, true)];
        parts.into_iter().filter(|(rows, _)| !rows.is_empty())
    }

    fn multiplier(&mut self, prompts: bool) -> Product<'_> {
        let numerics = Numerics { isa: self.isa, activations: self.activations, prompts };
        Product { numerics, pool: &mut self.pool, space: &mut self.space }
    }

    /// Multiplies rows, with prompts' rows separate from the others unless the product must be
    /// precise, and finds the largest outputs of the first rows if `largest` has places.
    fn multiply(
        &mut self,
        x: InputOf<'_, Self>,
        rows: Range<usize>,
        w: &Linear,
        out: &mut Buffer,
        adds: bool,
        mut largest: Option<&mut [Largest]>,
    ) {
        let all = x.buffer().rows;
        out.shape(all);
        debug_assert!(w.rows <= out.width, "{} outputs do not fit {} columns", w.rows, out.width);
        let precise = matches!(x, LinearInput::Precise(_));
        for (rows, prompts) in self.alike(all, &rows) {
            let prompts = prompts && !precise;
            let out = out.output(rows.clone(), adds);
            let largest = largest.as_deref_mut().map(|largest| &mut largest[rows.clone()]);
            self.multiplier(prompts).run(&x, rows, w, out, largest);
        }
    }

    /// A scratch buffer: a returned one, or a new one. Its content is arbitrary.
    fn spare(&mut self, rows: usize, width: usize) -> Buffer {
        let fits = |spare: &Buffer| spare.width == width && spare.capacity() >= rows;
        // The last one used is in the cache.
        match self.spares.iter().rposition(fits) {
            Some(index) => self.spares.swap_remove(index),
            None => Buffer::new(rows, width),
        }
    }

    /// `to[rows] += x[rows]`.
    fn add_rows(&mut self, x: &Buffer, rows: Range<usize>, to: &mut Buffer) {
        let width = x.width;
        debug_assert_eq!(width, to.width);
        let to = SendPtr(to.data[rows.start * width..rows.end * width].as_mut_ptr());
        let x = &x.data[rows.start * width..rows.end * width];
        for_rows(&mut self.pool, rows.len(), &|rows| {
            // SAFETY: each row is one thread's.
            let to = unsafe { std::slice::from_raw_parts_mut(to.at(rows.start * width), rows.len() * width) };
            for (to, x) in to.iter_mut().zip(&x[rows.start * width..]) {
                *to += x;
            }
        });
    }
}
