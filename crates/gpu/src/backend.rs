//! The backend: what it keeps between operations, and the tables of a step.

use std::collections::{HashMap, HashSet};
use std::ops::Range;
use std::sync::Arc;

use thunder_collectives::Group;
use thunder_compute::step::{KV_BLOCK_TOKENS, StepSequence};
use thunder_compute::{Activations, ComputeError, Overlap, Rope, Step};

use crate::adapter::Found;
use crate::buffer::{Buffer, Memory};
use crate::device::Device;
use crate::format::Format;
use crate::kernel::{ATTENDED_ROWS, Choose, Input, Matrices, Product, Role, Sum};
use crate::operations::leaving::{Added, Left, Levels};
use crate::proof::Family;
use crate::proof::memory::{Proofs, default_file};
use crate::sums::{Mailboxes, SumForm, Sums};
use crate::without::{Way, without};

/// How a [`GpuBackend`] works.
#[derive(Debug, Clone, Copy, Default)]
pub struct GpuConfig {
    /// Precision of activations in products with quantized weights. [`Activations::Auto`] and
    /// [`Activations::Int8`] multiply bytes with a scale for each 32 columns where kernels have
    /// such a form; gated activations get 16 bits unless it is `Int8`.
    pub activations: Activations,
    /// Whether prompts' rows are computed in two parts; the same on all ranks, as CPU ranks of the
    /// group sum the parts apart.
    pub overlap: Overlap,
    /// Remembers proofs of kernels in the user's cache folder.
    pub remembers: bool,
    /// Whether sums over ranks are exchanged inside of a submission.
    pub mailboxes: Mailboxes,
    /// All ranks of the group compute on GPUs of their own, and open them at the same time: they
    /// agree on exchanges between their devices.
    pub peers: bool,
}

/// A product's form but for how lanes add up.
pub(crate) type FormKey = (Format, Input, Role, usize);

/// The table of blocks ends at a multiple of this.
const TABLE_UNIT: usize = 256;

/// Splits of attention suffice for a multiple of this many tokens: those that a row does not need
/// cost little, and most steps dispatch the same.
const LONGEST_UNIT: usize = 512;

/// Workgroups of attention that keep a GPU busy: with more, each has several splits of a row.
const BUSY_GROUPS: usize = 512;

/// One rank's GPU.
pub struct GpuBackend {
    pub(crate) device: Device,
    pub(crate) sums: Sums,
    pub(crate) config: GpuConfig,
    /// How lanes add up in the forms that were proved; `None` where all are wrong.
    pub(crate) forms: HashMap<FormKey, Option<Sum>>,
    /// Whether products in tiles are right.
    pub(crate) tiles: HashMap<Format, bool>,
    /// Whether products by cooperative matrices are right.
    pub(crate) matrices: HashMap<Matrices, bool>,
    /// Subgroups have 32 lanes, all of them.
    pub(crate) has_subgroups: bool,
    pub(crate) proofs: Proofs,
    /// Whether families that others can stand in for are right.
    pub(crate) taken: HashMap<Family, bool>,
    /// What is being proved.
    pub(crate) proving: Option<Family>,
    /// Forms that were wrong on this device, and how.
    pub(crate) refusals: Vec<String>,
    pub(crate) step: Option<StepTables>,
    /// The first table of the step after this one, if that one only adds a token to each sequence;
    /// and where the tokens of this step are.
    pub(crate) next: Option<(Vec<u32>, Option<u32>)>,
    /// Buffers between uses as scratch.
    pub(crate) spares: Vec<Buffer>,
    /// Activations as levels.
    pub(crate) levels: [Option<Levels>; 2],
    /// The rows whose levels a kernel left next to its results.
    pub(crate) left: Option<Left>,
    /// The product that was added last.
    pub(crate) added: Option<Added>,
    /// Weights of the norms that followed products when they were added the last time.
    pub(crate) norms_after: HashMap<u64, Memory>,
    /// The norm that was computed last.
    pub(crate) normed: Option<Added>,
    /// Weights of norms whose results were rounded to levels the last time.
    pub(crate) rounded_norms: HashSet<u64>,
    /// Whether kernels that norm, multiply and choose experts are right.
    pub(crate) choosing: HashMap<Choose, bool>,
    /// Their logits, behind counters of workgroups.
    pub(crate) chosen_logits: Option<Memory>,
    /// Whether products that leave levels are right.
    pub(crate) leaving: HashMap<Product, bool>,
    /// How much of the arithmetic that a submission may have is recorded and not submitted.
    pub(crate) recorded_share: f32,
    /// Activations as f16, and their scales.
    pub(crate) halves: Option<(Memory, Memory)>,
    /// Pairs of rows and experts in tiles.
    pub(crate) sorted: Option<Memory>,
    /// Splits of attention.
    pub(crate) parts: Option<Memory>,
    /// The same, behind counters of workgroups, where the kernel that computes splits adds them.
    pub(crate) counted_parts: Option<Memory>,
    /// Whether workgroups of a kernel may see each other's results: not promised on Metal.
    pub(crate) has_shared_results: bool,
    /// [`BUSY_GROUPS`], or what a test has in its place.
    pub(crate) busy_groups: usize,
    /// Results that the host reads.
    pub(crate) results: Option<Memory>,
    /// Bound where a kernel has no use for a buffer.
    pub(crate) nothing: Memory,
    /// Tables about query heads, by their words.
    pub(crate) kv_heads: HashMap<Vec<u32>, Memory>,
    pub(crate) words: Vec<u32>,
}

impl std::fmt::Debug for GpuBackend {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("GpuBackend").field("device", &self.device.name).finish_non_exhaustive()
    }
}

/// What kernels read of the current step, in one buffer.
#[derive(Debug, Clone)]
pub(crate) struct StepTables {
    pub memory: Memory,
    /// Of each row: position, first block in the table of blocks, slot, first row of its sequence.
    pub rows: u32,
    pub blocks: u32,
    /// Of each sequence: first row, end, first position, slot.
    pub sequences: u32,
    pub sequence_count: u32,
    pub ropes: Vec<RopeTable>,
    /// All rows, and those of generated tokens, which come first.
    pub all: usize,
    pub generated: usize,
    /// Each generated token is the only one of its sequence.
    pub has_single_rows: bool,
    /// No position of a generated token is this large.
    pub longest: usize,
    /// Prompts' rows, and where they are in the buffer.
    pub tiles: Arc<[Tile]>,
    pub first_tile: u32,
}

/// Consecutive rows of a prompt.
#[derive(Debug, Clone)]
pub(crate) struct Tile {
    pub rows: Range<usize>,
    /// Tokens of the sequence up to the last row's.
    pub end: usize,
}

/// Cosine and sine of each pair of each row.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RopeTable {
    /// In pairs of words.
    pub first: u32,
    pub pairs: u32,
    pub interleaved: bool,
}

impl GpuBackend {
    /// Opens a device. Kernels are proved as a model needs them.
    ///
    /// # Errors
    /// When the device cannot be opened, or computes wrongly.
    pub fn new(found: &Found, config: GpuConfig, group: Group) -> Result<Self, ComputeError> {
        let mut backend = Self::unproved(found, config, group)?;
        backend.prove(Family::Rows)?;
        backend.sums.prove(&mut backend.device, &found.info, (config.mailboxes, config.peers))?;
        Ok(backend)
    }

    pub(crate) fn unproved(found: &Found, config: GpuConfig, group: Group) -> Result<Self, ComputeError> {
        let mut device = Device::open(found, config.mailboxes.may_be_for(&found.info, group.size()))?;
        let nothing = device.memory(16, "nothing")?;
        let file = if config.remembers { default_file() } else { None };
        let info = &found.info;
        Ok(Self {
            device,
            sums: Sums::new(group),
            config,
            forms: HashMap::new(),
            tiles: HashMap::new(),
            taken: HashMap::new(),
            matrices: HashMap::new(),
            has_subgroups: info.subgroup_lanes == [32, 32] && info.features.contains(&"subgroups"),
            proofs: Proofs::new(info, file),
            proving: None,
            refusals: Vec::new(),
            step: None,
            next: None,
            spares: Vec::new(),
            levels: [None, None],
            left: None,
            added: None,
            norms_after: HashMap::new(),
            normed: None,
            rounded_norms: HashSet::new(),
            choosing: HashMap::new(),
            chosen_logits: None,
            leaving: HashMap::new(),
            halves: None,
            recorded_share: 0.0,
            sorted: None,
            parts: None,
            counted_parts: None,
            has_shared_results: info.api == "vulkan" && !without(Way::Whole),
            busy_groups: BUSY_GROUPS,
            results: None,
            nothing,
            kv_heads: HashMap::new(),
            words: Vec::new(),
        })
    }

    /// The device's name.
    pub fn device_name(&self) -> &str {
        &self.device.name
    }

    /// Kernel forms that were refused because they are wrong on this device, and how.
    pub fn refusals(&self) -> &[String] {
        &self.refusals
    }

    /// How sums over ranks travel.
    pub fn sum_form(&self) -> SumForm {
        self.sums.form()
    }

    /// Whether sums over ranks are exchanged inside of submissions.
    pub fn has_mailbox(&self) -> bool {
        matches!(self.sum_form(), SumForm::Relay | SumForm::Mailbox)
    }

    /// Uploads the tables of a step.
    pub(crate) fn begin_step(&mut self, step: &Step, ropes: &[Rope]) -> Result<(), ComputeError> {
        self.device.end_packing();
        let generated = (step.generated() == step.rows()).then_some(step.rows());
        self.device.clear_tables(generated)?;
        self.next = None;
        let mut tables = self.words_of(step, ropes);
        let (memory, first) = self.device.table(&self.words)?;
        if let Some(next) = next_of(step).filter(|_| self.sums.size() == 1) {
            let mut table = std::mem::take(&mut self.words);
            let after = self.words_of(&next, ropes);
            std::mem::swap(&mut table, &mut self.words);
            // Then all dispatches are the same.
            if after.longest == tables.longest {
                self.next = Some((table, None));
            }
        }
        for table in &mut tables.ropes {
            table.first += first / 2;
        }
        tables.memory = memory;
        for place in [&mut tables.rows, &mut tables.blocks, &mut tables.sequences, &mut tables.first_tile] {
            *place += first;
        }
        self.step = Some(tables);
        Ok(())
    }

    /// Writes a step's tables to `words`; where they are, from their first word on.
    fn words_of(&mut self, step: &Step, ropes: &[Rope]) -> StepTables {
        let words = &mut self.words;
        words.clear();
        for sequence in &step.sequences {
            for row in sequence.rows.clone() {
                let numbers =
                    [sequence.position(row), sequence.blocks.start, sequence.slot, sequence.rows.start];
                words.extend(numbers.map(|number| number as u32));
            }
        }
        let blocks = words.len();
        words.extend(&step.blocks);
        // What follows stays where it is while sequences grow: most steps dispatch the same.
        words.resize(words.len().next_multiple_of(TABLE_UNIT), 0);
        let sequences = words.len();
        for sequence in &step.sequences {
            let numbers = [sequence.rows.start, sequence.rows.end, sequence.start, sequence.slot];
            words.extend(numbers.map(|number| number as u32));
        }
        let generated = step.generated();
        let first_tile = words.len();
        let mut tiles = Vec::new();
        for sequence in step.sequences.iter().filter(|s| s.rows.start >= generated) {
            for first in sequence.rows.clone().step_by(ATTENDED_ROWS) {
                let rows = first..sequence.rows.end.min(first + ATTENDED_ROWS);
                let numbers = [first, rows.len(), sequence.position(first), sequence.blocks.start];
                words.extend(numbers.map(|number| number as u32));
                tiles.push(Tile { end: sequence.position(rows.end), rows });
            }
        }
        let mut tables = Vec::with_capacity(ropes.len());
        for rope in ropes {
            words.resize(words.len().next_multiple_of(2), 0);
            tables.push(RopeTable {
                first: words.len() as u32 / 2,
                pairs: rope.inverse_frequencies.len() as u32,
                interleaved: rope.interleaved,
            });
            rotations(step, rope, words);
        }
        // The table's first word must be even too, for the pairs of rotations.
        words.resize(words.len().next_multiple_of(2), 0);
        let ends = step.sequences.iter().filter(|s| s.rows.end <= generated).map(|s| s.start + s.rows.len());
        StepTables {
            memory: self.nothing.clone(),
            rows: 0,
            blocks: blocks as u32,
            sequences: sequences as u32,
            sequence_count: step.sequences.len() as u32,
            ropes: tables,
            all: step.rows(),
            generated,
            has_single_rows: step
                .sequences
                .iter()
                .all(|sequence| sequence.rows.len() == 1 || sequence.rows.start >= generated),
            longest: ends.max().unwrap_or(0).next_multiple_of(LONGEST_UNIT),
            tiles: tiles.into(),
            first_tile: first_tile as u32,
        }
    }

    /// The current step's tables.
    pub(crate) fn tables(&self) -> Result<StepTables, ComputeError> {
        self.step.clone().ok_or(ComputeError::Shape {
            what: "the number of steps begun",
            value: 0,
            backend: "GPU",
            needs: "a step, begun before its other operations",
        })
    }

    /// A buffer for scratch: one that was given back, or a new one. Its contents are arbitrary.
    pub(crate) fn spare(&mut self, rows: usize, width: usize) -> Result<Buffer, ComputeError> {
        let fits = |spare: &Buffer| spare.width == width && spare.capacity() >= rows;
        if let Some(index) = self.spares.iter().rposition(fits) {
            return Ok(self.spares.swap_remove(index));
        }
        let memory = self.device.memory(Buffer::bytes_of(rows, width), "activations")?;
        Ok(Buffer::new(memory, rows, width))
    }

    /// A buffer of at least `bytes`: the one in `place`, or a new one for it.
    pub(crate) fn grown(
        device: &mut Device,
        place: &mut Option<Memory>,
        bytes: usize,
        what: &'static str,
    ) -> Result<Memory, ComputeError> {
        match place {
            Some(memory) if memory.bytes() >= bytes as u64 => Ok(memory.clone()),
            _ => {
                let memory = device.memory(bytes, what)?;
                Ok(place.insert(memory).clone())
            }
        }
    }
}

/// The step after `step` but for its tokens, if all rows are generated tokens that are continued
/// and need no new block.
fn next_of(step: &Step) -> Option<Step> {
    let is_continued =
        |s: &StepSequence| !s.prompt && s.rows.len() == 1 && s.start + 1 < s.blocks.len() * KV_BLOCK_TOKENS;
    let all = step.logit_rows.len() == step.rows() && step.sequences.iter().all(is_continued);
    all.then(|| {
        let mut next = step.clone();
        next.sequences.iter_mut().for_each(|sequence| sequence.start += 1);
        next
    })
}

/// Appends cosine and sine of each pair of each row, as the reference computes them.
fn rotations(step: &Step, rope: &Rope, words: &mut Vec<u32>) {
    for sequence in &step.sequences {
        for row in sequence.rows.clone() {
            let position = sequence.position(row) as f64;
            for frequency in &rope.inverse_frequencies {
                let (sin, cos) = (position * f64::from(*frequency)).sin_cos();
                words.extend([cos, sin].map(|x| (x as f32 * rope.amplitude).to_bits()));
            }
        }
    }
}
