//! Weights in the device's memory.

mod pack;

use std::ops::Range;

use thunder_compute::{ComputeError, Float, MatrixSource, PackedFormat};

use crate::buffer::{BLOCK_COLUMNS, Memory};
use crate::device::Device;
use crate::format::{Elements, Format, Scales};
use pack::Packed;
pub(crate) use pack::larger;

/// Bytes that are packed at a time and then uploaded.
const PIECE_BYTES: usize = 16 << 20;

/// Packed matrices that share their input, `[Σ rows, cols]`.
#[derive(Debug)]
pub struct Matrix {
    pub(crate) rows: usize,
    /// Blocks of 32 columns of a row.
    pub(crate) blocks: usize,
    pub(crate) chunks: Vec<Chunk>,
    /// One for each row, if any part has a bias.
    pub(crate) bias: Option<Memory>,
    pub(crate) bytes: usize,
}

/// Consecutive rows with one format, in buffers that can be bound.
#[derive(Debug, Clone)]
pub(crate) struct Chunk {
    pub format: Format,
    /// Its rows in the matrix.
    pub rows: Range<usize>,
    /// The group of a block is `block >> shift`.
    pub shift: u32,
    /// Upper bound of the weights' magnitudes. Not finite if a weight is not finite.
    pub largest: f32,
    /// Elements, then scales if the format has them, in the order in which [`crate::kernel`] binds
    /// them.
    pub buffers: Vec<Memory>,
}

impl Chunk {
    /// Whether its first output begins a quad. Kernels by matrices store quads.
    pub fn begins_a_quad(&self) -> bool {
        self.rows.start.is_multiple_of(4)
    }
}

impl Matrix {
    /// Packs `parts` on all cores and uploads them in pieces. Parts keep their formats, or all have
    /// `common`.
    pub(crate) fn pack(
        parts: &[MatrixSource<'_>],
        common: Option<PackedFormat>,
        device: &mut Device,
    ) -> Result<Self, ComputeError> {
        let format_of = |part: &MatrixSource<'_>| common.unwrap_or(part.encoding.packed());
        let rows = parts.iter().map(|part| part.rows).sum();
        let blocks = parts.iter().map(|part| part.cols).max().unwrap_or(0).div_ceil(BLOCK_COLUMNS);
        let mut chunks = Vec::new();
        let mut first = 0;
        for run in runs(parts, &format_of, device.max_binding_bytes as usize) {
            let rows = run.iter().map(|(_, rows)| rows.len()).sum::<usize>();
            chunks.push(pack_chunk(&run, format_of(run[0].0), first, device)?);
            first += rows;
        }
        let bias = pack_bias(parts, rows, device)?;
        let buffers = chunks.iter().flat_map(|chunk| &chunk.buffers).chain(&bias);
        let bytes = buffers.map(|memory| memory.bytes() as usize).sum();
        Ok(Self { rows, blocks, chunks, bias, bytes })
    }
}

/// Some rows of a part.
type Piece<'a, 's> = (&'a MatrixSource<'s>, Range<usize>);

/// A format that represents all parts exactly; `None` if they have one format already.
///
/// Levels keep their values in more bits, and groups repeat their scales in smaller ones. Besides
/// floats, they become f32.
pub(crate) fn common_format(parts: &[MatrixSource<'_>]) -> Option<PackedFormat> {
    let formats = || parts.iter().filter(|part| part.rows > 0).map(|part| part.encoding.packed());
    let first = formats().next()?;
    if formats().all(|format| format == first) {
        return None;
    }
    formats().reduce(|a, b| match (a, b) {
        (PackedFormat::Affine { bits: a, group: of_a }, PackedFormat::Affine { bits: b, group: of_b }) => {
            PackedFormat::Affine { bits: a.max(b), group: of_a.min(of_b) }
        }
        _ => PackedFormat::Float(Float::F32),
    })
}

/// Divides parts into runs of rows of one format that can each be bound as one buffer.
fn runs<'a, 's>(
    parts: &'a [MatrixSource<'s>],
    format_of: &dyn Fn(&MatrixSource<'_>) -> PackedFormat,
    limit: usize,
) -> Vec<Vec<Piece<'a, 's>>> {
    let mut runs: Vec<Vec<Piece<'_, '_>>> = Vec::new();
    for part in parts.iter().filter(|part| part.rows > 0) {
        let row_bytes = part.cols.div_ceil(BLOCK_COLUMNS) * block_bytes(format_of(part));
        // Whole quads of outputs, which kernels store together.
        let most = (limit / row_bytes.max(1)).max(1);
        let most = if most > 4 { most / 4 * 4 } else { most };
        let mut start = 0;
        while start < part.rows {
            let mut open = None;
            if let Some(run) = runs.last_mut() {
                let taken = run.iter().map(|(_, rows)| rows.len()).sum::<usize>();
                let alike = format_of(run[0].0) == format_of(part);
                if alike && taken < most {
                    open = Some((run, most - taken));
                }
            }
            let free = open.as_ref().map_or(most, |(_, free)| *free);
            let piece = (part, start..part.rows.min(start + free));
            start = piece.1.end;
            match open {
                Some((run, _)) => run.push(piece),
                None => runs.push(vec![piece]),
            }
        }
    }
    runs
}

/// Bytes of a block in the format's largest buffer.
fn block_bytes(format: PackedFormat) -> usize {
    match format {
        PackedFormat::Float(float) => BLOCK_COLUMNS * float.bytes(),
        PackedFormat::Affine { bits, group } => {
            let scales = BLOCK_COLUMNS.div_ceil(group) * 8;
            (bits as usize * 4).max(scales)
        }
    }
}

fn pack_bias(
    parts: &[MatrixSource<'_>],
    rows: usize,
    device: &mut Device,
) -> Result<Option<Memory>, ComputeError> {
    if parts.iter().all(|part| part.bias.is_none()) || rows == 0 {
        return Ok(None);
    }
    let mut words = Vec::with_capacity(rows);
    for part in parts {
        match &part.bias {
            Some(bias) => words.extend(bias.iter().map(|x| x.to_bits())),
            None => words.resize(words.len() + part.rows, 0),
        }
    }
    device.filled(&words, "a bias").map(Some)
}

/// Packs a run of [`runs`], whose first row is row `first` of the matrix.
fn pack_chunk(
    run: &[Piece<'_, '_>],
    format: PackedFormat,
    first: usize,
    device: &mut Device,
) -> Result<Chunk, ComputeError> {
    let cols = run[0].0.cols;
    let (elements, group) = match format {
        PackedFormat::Float(float) => (Elements::Float(float), BLOCK_COLUMNS),
        PackedFormat::Affine { bits, group } => (Elements::Levels(bits), group),
    };
    let (halves, shift) = (group < BLOCK_COLUMNS, (group / BLOCK_COLUMNS).max(1).ilog2());
    // The format of scales is chosen after all scales were read.
    let scales = if matches!(elements, Elements::Float(_)) { Scales::None } else { Scales::F32 };
    let mut format = Format { elements, scales, halves };
    let words = format.words();
    let (rows, blocks) =
        (run.iter().map(|(_, rows)| rows.len()).sum::<usize>(), cols.div_ceil(BLOCK_COLUMNS));
    let mut buffers = Vec::new();
    for words in &words {
        buffers.push(device.memory(rows * blocks * words * 4, "weights")?);
    }
    let row_bytes = blocks * words.iter().sum::<usize>() * 4;
    let step = (PIECE_BYTES / row_bytes.max(1)).max(1);
    let (mut all_scales, mut done, mut largest) = (Vec::new(), 0, 0.0f32);
    for (part, mine) in run {
        for start in mine.clone().step_by(step) {
            let rows = start..mine.end.min(start + step);
            let count = rows.len();
            let Packed { planes, scales, largest: of_piece } =
                pack::rows(part, rows, (format, group), device.packers());
            largest = larger(largest, of_piece);
            for ((plane, memory), words) in planes.iter().zip(&buffers).zip(&words) {
                device.upload(memory, done * blocks * words, plane)?;
            }
            all_scales.extend(scales);
            done += count;
        }
    }
    if format.has_scales() {
        let (scales, words) = pack::scales(&all_scales);
        format.scales = scales;
        buffers.push(device.filled(&words, "scales of weights")?);
    }
    Ok(Chunk { format, rows: first..first + rows, shift, largest, buffers })
}
