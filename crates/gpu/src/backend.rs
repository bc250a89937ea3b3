//! The backend: its state between operations, and the tables of a step.

use std::collections::{HashMap, HashSet};
use std::ops::Range;
use std::sync::Arc;

use thunder_collectives::Group;
use thunder_compute::step::{KV_BLOCK_TOKENS, StepSequence};
use thunder_compute::{Activations, ChoiceScratch, ComputeError, Overlap, Rope, Step};

use crate::adapter::Found;
use crate::buffer::{Buffer, Memory, stride};
use crate::device::Device;
use crate::format::Format;
use crate::kernel::{ATTENDED_ROWS, Choose, Input, Kernel, Product, Role, Sum};
use crate::operations::compress::Recent;
use crate::operations::expect::Expected;
use crate::operations::leaving::{Added, Left, Levels};
use crate::peak::GpuArithmetic;
use crate::proof::Family;
use crate::proof::memory::{Proofs, default_file};
use crate::slots::{MOST_ALTERNATING, Slots};
use crate::sums::{Mailboxes, SumForm, Sums};
use crate::wait::Cores;
use crate::without::{Way, without};

/// Configuration of a [`GpuBackend`].
#[derive(Debug, Clone, Copy, Default)]
pub struct GpuConfig {
    /// Precision of activations in products with quantized weights. [`Activations::Auto`] and
    /// [`Activations::Int8`] multiply bytes with a scale for each 32 columns if kernels have such a
    /// form; with `Auto`, gated activations have 16 bits.
    pub activations: Activations,
    /// Whether prompts' rows are computed in two parts. Must be the same on all ranks, because CPU
    /// ranks of the group sum the two parts separately.
    pub overlap: Overlap,
    /// Remembers proofs of kernels in the user's cache folder.
    pub remembers: bool,
    /// Whether sums over ranks are exchanged within a submission.
    pub mailboxes: Mailboxes,
    /// All ranks of the group compute on GPUs of their own and open them at the same time, so they
    /// can agree on exchanges between their devices.
    pub peers: bool,
    /// Cores for the threads that serve the device, each of which gets its own if there are enough.
    pub cores: Option<Cores>,
}

/// A product's form, without the way in which lanes add up.
pub(crate) type FormKey = (Format, Input, Role, usize);

/// The table of blocks is padded to a multiple of this.
const TABLE_UNIT: usize = 256;

/// The number of splits of attention is chosen for a multiple of this many tokens. Unneeded splits
/// cost little, and most steps then have the same dispatches.
const LONGEST_UNIT: usize = 512;

/// Number of attention workgroups that keeps a GPU busy. With more, each computes several splits of
/// a row.
const BUSY_GROUPS: usize = 512;

/// One rank's GPU.
pub struct GpuBackend {
    pub(crate) device: Device,
    pub(crate) sums: Sums,
    pub(crate) config: GpuConfig,
    /// How lanes add up in the proved forms; `None` if all forms are wrong.
    pub(crate) forms: HashMap<FormKey, Option<Sum>>,
    /// Whether products in tiles and by cooperative matrices are correct.
    pub(crate) products: HashMap<Kernel, bool>,
    /// Kernels of steps with more rows that threads compile or have compiled.
    pub(crate) coming: HashSet<Kernel>,
    /// Formats whose products threads compile: plain or gated ones, without or with those by
    /// matrices.
    pub(crate) expected_forms: HashSet<(Format, bool, bool)>,
    /// Matrices whose products are proved after all are loaded.
    pub(crate) expected: Vec<Expected>,
    /// Whether products of all heads together are correct with a format.
    pub(crate) heads: HashMap<Format, bool>,
    /// Subgroups may consist of sets of 32 lanes; the proofs decide.
    pub(crate) has_subgroups: bool,
    pub(crate) proofs: Proofs,
    /// Whether families that have a substitute are correct.
    pub(crate) taken: HashMap<Family, bool>,
    /// The family that is being proved.
    pub(crate) proving: Option<Family>,
    /// Forms that were wrong on this device, with the reason.
    pub(crate) refusals: Vec<String>,
    pub(crate) step: Option<StepTables>,
    /// The first table of the next step, if that step only adds a token to each sequence, and where
    /// this step's tokens are.
    pub(crate) next: Option<(Vec<u32>, Option<u32>)>,
    /// Steps may be computed ahead: this is not switched off, and nothing is computed between two
    /// steps.
    pub(crate) goes_ahead: bool,
    /// The current step's tokens.
    pub(crate) tokens: StepTokens,
    /// Free scratch buffers.
    pub(crate) spares: Vec<Buffer>,
    /// Activations as levels.
    pub(crate) levels: [Option<Levels>; 2],
    /// The rows that a kernel has also stored as levels.
    pub(crate) left: Option<Left>,
    /// The product that was last added to rows.
    pub(crate) added: Option<Added>,
    /// Weights of the norm that last followed the addition of a product, by the id of the product's
    /// weights.
    pub(crate) norms_after: HashMap<u64, Memory>,
    /// The last norm.
    pub(crate) normed: Option<Added>,
    /// Norms whose results were last rounded to levels, by the id of their weights.
    pub(crate) rounded_norms: HashSet<u64>,
    /// Whether kernels that compute a norm, a router's product and its choice are correct.
    pub(crate) choosing: HashMap<Choose, bool>,
    /// Their logits, after the workgroup counters.
    pub(crate) chosen_logits: Option<Memory>,
    /// Whether products that store levels are correct.
    pub(crate) leaving: HashMap<Product, bool>,
    /// Activations as f16, and their scales.
    pub(crate) halves: Option<(Memory, Memory)>,
    /// Pairs of rows and experts, in tiles.
    pub(crate) sorted: Option<Memory>,
    /// Splits of attention.
    pub(crate) parts: Option<Memory>,
    /// Splits of attention after workgroup counters, for the kernel that adds its splits itself.
    pub(crate) counted_parts: Option<Memory>,
    /// Whether workgroups of a kernel see each other's results. Metal does not guarantee this.
    pub(crate) has_shared_results: bool,
    /// [`BUSY_GROUPS`], or a test's value.
    pub(crate) busy_groups: usize,
    /// Results that the host reads.
    pub(crate) results: Option<Memory>,
    /// Chosen tokens.
    pub(crate) chosen: Option<Memory>,
    /// Each row's largest number of each rank.
    pub(crate) shared_largest: Option<Memory>,
    /// For choices by the host.
    pub(crate) choices: ChoiceScratch,
    /// Bound in place of buffers that a kernel does not use.
    pub(crate) nothing: Memory,
    /// Tables about query heads, by their content.
    pub(crate) kv_heads: HashMap<Vec<u32>, Memory>,
    /// The last tokens, by the id of the states' buffer.
    pub(crate) recent: HashMap<u64, Recent>,
    pub(crate) words: Vec<u32>,
    /// Where the states of the first caches that have any are.
    pub(crate) slots: Option<Slots>,
    /// Caches that were made, without those of proofs.
    pub(crate) cache_sets: usize,
    /// For each sequence of the step: where its state is read and written, and where the next step
    /// writes it.
    places: Vec<[usize; 3]>,
}

impl std::fmt::Debug for GpuBackend {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("GpuBackend").field("device", &self.device.name).finish_non_exhaustive()
    }
}

/// What kernels read about the current step, in one buffer.
#[derive(Debug, Clone)]
pub(crate) struct StepTables {
    pub memory: Memory,
    /// For each row: position, first block in the table of blocks, slot, first row of its sequence.
    pub rows: u32,
    pub blocks: u32,
    /// For each sequence: first row, end, first position, slot, rows of its draft, right rows of
    /// its last draft, where its state is read, and where it is written.
    pub sequences: u32,
    pub sequence_count: u32,
    /// A sequence has a draft, or had one in its last step.
    pub has_drafts: bool,
    /// States are written elsewhere than they are read.
    pub alternates: bool,
    pub ropes: Vec<RopeTable>,
    /// Number of rows, and of generated tokens' rows, which come first.
    pub all: usize,
    pub generated: usize,
    /// No sequence has more than one generated token in the step.
    pub has_single_rows: bool,
    /// Upper bound of the generated tokens' positions.
    pub longest: usize,
    /// Rows of prompts, and where they are in the buffer.
    pub tiles: Arc<[Tile]>,
    pub first_tile: u32,
}

/// A step's tokens.
#[derive(Default)]
pub(crate) struct StepTokens {
    pub ids: Vec<u32>,
    /// The first token of this rank's part of the vocabulary.
    pub first: u32,
    /// Where kernels read the tokens; `None` before an embedding has read them.
    pub table: Option<(Memory, u32)>,
}

/// Consecutive rows of a prompt.
#[derive(Debug, Clone)]
pub(crate) struct Tile {
    pub rows: Range<usize>,
    /// Number of the sequence's tokens up to and including the last row.
    pub end: usize,
    /// Position of the sequence's last token in the step.
    pub newest: usize,
}

/// Words of a tile in the buffer.
pub(crate) const TILE_WORDS: usize = 5;

/// Cosine and sine of each pair of columns, for each row.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RopeTable {
    /// Offset in pairs of words.
    pub first: u32,
    pub pairs: u32,
    pub interleaved: bool,
}

impl GpuBackend {
    /// Opens a device. Kernels are proved when a model needs them.
    ///
    /// # Errors
    /// If the device cannot be opened, or computes wrongly.
    pub fn new(found: &Found, config: GpuConfig, group: Group) -> Result<Self, ComputeError> {
        let mut backend = Self::unproved(found, config, group)?;
        backend.prove(Family::Rows)?;
        backend.takes(Family::Draws(backend.device.draw))?;
        backend.sums.prove(&mut backend.device, &found.info, (config.mailboxes, config.peers))?;
        if let Err(reason) = backend.device.prove_reports(found.info.is_real())? {
            backend.refuse("Report", &reason);
        }
        Ok(backend)
    }

    pub(crate) fn unproved(found: &Found, config: GpuConfig, group: Group) -> Result<Self, ComputeError> {
        let mut device = Device::open(found, config.mailboxes.may_be_for(&found.info, group.size()))?;
        device.cores = config.cores;
        let nothing = device.memory(16, "nothing")?;
        let file = if config.remembers { default_file() } else { None };
        let info = &found.info;
        Ok(Self {
            device,
            sums: Sums::new(group),
            config,
            forms: HashMap::new(),
            taken: HashMap::new(),
            products: HashMap::new(),
            coming: HashSet::new(),
            expected_forms: HashSet::new(),
            expected: Vec::new(),
            heads: HashMap::new(),
            has_subgroups: info.may_have_sets_of_32() && info.features.contains(&"subgroups"),
            proofs: Proofs::new(info, file),
            proving: None,
            refusals: Vec::new(),
            step: None,
            next: None,
            goes_ahead: !without(Way::Ahead),
            tokens: StepTokens::default(),
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
            sorted: None,
            parts: None,
            counted_parts: None,
            has_shared_results: info.api == "vulkan" && !without(Way::Whole),
            busy_groups: BUSY_GROUPS,
            results: None,
            chosen: None,
            shared_largest: None,
            choices: ChoiceScratch::default(),
            nothing,
            kv_heads: HashMap::new(),
            recent: HashMap::new(),
            words: Vec::new(),
            slots: None,
            cache_sets: 0,
            places: Vec::new(),
        })
    }

    /// The device's name.
    pub fn device_name(&self) -> &str {
        &self.device.name
    }

    /// Kernel forms that were refused because they are wrong on this device, with the reason.
    pub fn refusals(&self) -> &[String] {
        &self.refusals
    }

    /// How often the host has waited for results.
    pub fn waits(&self) -> usize {
        self.device.reads
    }

    /// Number of steps that were submitted before the results of the previous step were read.
    pub fn steps_ahead(&self) -> usize {
        self.device.followed
    }

    /// The fastest arithmetic of the kernels that `run` uses.
    ///
    /// # Errors
    /// Those of `run`.
    pub fn arithmetic_of(
        &mut self,
        run: impl FnOnce(&mut Self) -> Result<(), ComputeError>,
    ) -> Result<GpuArithmetic, ComputeError> {
        self.device.forget_bindings();
        run(self)?;
        Ok(self.device.arithmetic())
    }

    /// How sums over ranks travel.
    pub fn sum_form(&self) -> SumForm {
        self.sums.form()
    }

    /// How the sum of rows of this width travels.
    pub fn sum_form_of(&self, rows: usize, width: usize) -> SumForm {
        self.sums.form_of(rows * stride(width))
    }

    /// Whether sums over ranks are exchanged within submissions.
    pub fn has_mailbox(&self) -> bool {
        matches!(self.sum_form(), SumForm::Relay | SumForm::Mailbox)
    }

    /// Uploads the tables of a step.
    pub(crate) fn begin_step(&mut self, step: &Step, ropes: &[Rope]) -> Result<(), ComputeError> {
        self.device.end_packing();
        self.sums.begin_step();
        let generated = (step.generated() == step.rows()).then_some(step.rows());
        self.device.clear_tables(generated)?;
        (self.next, self.tokens.table) = (None, None);
        let alternates = self.place_states(step);
        let mut tables = self.words_of(step, ropes);
        tables.alternates = alternates;
        let (memory, first) = self.device.table(&self.words)?;
        if let Some(next) = next_of(step).filter(|_| self.goes_ahead && self.sums.may_go_ahead()) {
            let mut table = std::mem::take(&mut self.words);
            self.places.iter_mut().for_each(|places| places.rotate_left(1));
            let after = self.words_of(&next, ropes);
            std::mem::swap(&mut table, &mut self.words);
            // All dispatches are the same in this case.
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

    /// Decides where the states of a step's sequences are read and written. Returns whether these
    /// places differ.
    fn place_states(&mut self, step: &Step) -> bool {
        self.places.clear();
        let Some(slots) = self.slots.as_mut().filter(|_| self.proving.is_none()) else {
            self.places.extend(step.sequences.iter().map(|sequence| [sequence.slot; 3]));
            return false;
        };
        let only_generates = |s: &StepSequence| !s.prompt && s.rows.len() == 1 && s.drafted + s.accepted == 0;
        let alternates = self.cache_sets == 1
            && self.sums.may_go_ahead()
            && step.sequences.len() <= MOST_ALTERNATING
            && step.sequences.iter().all(only_generates);
        slots.begin();
        self.places.extend(step.sequences.iter().map(|StepSequence { slot, .. }| match alternates {
            true => slots.alternate(*slot),
            false => [slots.place(*slot); 3],
        }));
        alternates
    }

    /// Writes a step's tables to `words`. Returns where they are, counted from their first word.
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
        // The tables after this keep their place while sequences grow, so most steps have the same
        // dispatches.
        words.resize(words.len().next_multiple_of(TABLE_UNIT), 0);
        let sequences = words.len();
        for (sequence, [from, to, _]) in step.sequences.iter().zip(&self.places) {
            let StepSequence { rows, start, slot, drafted, accepted, .. } = sequence;
            let numbers = [rows.start, rows.end, *start, *slot, *drafted, *accepted, *from, *to];
            words.extend(numbers.map(|number| number as u32));
        }
        let generated = step.generated();
        let first_tile = words.len();
        let mut tiles = Vec::new();
        for sequence in step.sequences.iter().filter(|s| s.rows.start >= generated) {
            for first in sequence.rows.clone().step_by(ATTENDED_ROWS) {
                let rows = first..sequence.rows.end.min(first + ATTENDED_ROWS);
                let newest = sequence.position(sequence.rows.end - 1);
                let numbers: [_; TILE_WORDS] =
                    [first, rows.len(), sequence.position(first), sequence.blocks.start, newest];
                words.extend(numbers.map(|number| number as u32));
                tiles.push(Tile { end: sequence.position(rows.end), rows, newest });
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
        // The offset of the pairs of rotations must be even, as the table's first word is.
        words.resize(words.len().next_multiple_of(2), 0);
        let ends = step.sequences.iter().filter(|s| s.rows.end <= generated).map(|s| s.start + s.rows.len());
        StepTables {
            memory: self.nothing.clone(),
            rows: 0,
            blocks: blocks as u32,
            sequences: sequences as u32,
            sequence_count: step.sequences.len() as u32,
            has_drafts: step.sequences.iter().any(|s| s.drafted + s.accepted > 0),
            alternates: false,
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

    /// A scratch buffer: a returned one, or a new one. Its content is arbitrary.
    pub(crate) fn spare(&mut self, rows: usize, width: usize) -> Result<Buffer, ComputeError> {
        let fits = |spare: &Buffer| spare.width == width && spare.capacity() >= rows;
        if let Some(index) = self.spares.iter().rposition(fits) {
            return Ok(self.spares.swap_remove(index));
        }
        let memory = self.device.memory(Buffer::bytes_of(rows, width), "activations")?;
        Ok(Buffer::new(memory, rows, width))
    }

    /// A buffer of at least `bytes`: the one in `place`, or a new one that replaces it.
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

/// The next step without its tokens, if all rows are generated tokens of sequences that continue
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

/// Appends cosine and sine of each pair of columns for each row, computed as in the reference.
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
