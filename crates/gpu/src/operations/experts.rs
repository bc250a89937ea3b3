//! Experts: their weights, stored side by side, and the router.

use std::ops::Range;

use thunder_compute::{Activation, ComputeError, Expert, Float, RouterSpec, Scores, SharedExpert};

use super::Outcome;
use super::rows::fits;
use crate::backend::GpuBackend;
use crate::buffer::{BLOCK_COLUMNS, Buffer, Memory, Vector};
use crate::device::Device;
use crate::format::{Elements, Format, Scales};
use crate::kernel::{Kernel, MAX_EXPERTS, Role};
use crate::matrix::{Chunk, Matrix, larger};
use crate::proof::{Family, Weights};

/// Maximum chosen experts, and groups, that the router's kernel has space for.
const MAX_CHOSEN: usize = 64;
const MAX_GROUPS: usize = 256;

/// The experts of one layer.
#[derive(Debug)]
pub struct Experts {
    /// Sets of experts in ascending order: gates and ups here, down projections in `down`.
    pub(crate) up: Vec<Set>,
    pub(crate) down: Vec<Set>,
    /// `None`: experts have no gates, and a channel is `max(up, 0)²`.
    pub(super) activation: Option<Activation>,
    /// Channels of the largest expert.
    pub(super) channels: usize,
    /// All experts with weights on this rank have the same number of channels.
    pub(super) is_uniform: bool,
    /// Each expert's channels are whole blocks.
    pub(super) fills_blocks: bool,
    /// All experts have weights on this rank.
    pub(super) has_all: bool,
    /// Blocks in a row of gates and ups.
    pub(super) blocks: usize,
    /// Biases of `down`, `[experts][width]`.
    pub(super) down_bias: Option<Memory>,
}

/// Experts of one format whose weights can be bound together. Other experts are absent from its
/// table.
#[derive(Debug)]
pub(crate) struct Set {
    pub chunk: Chunk,
    /// Rows, and blocks per row, of the first expert that has weights on this rank.
    pub rows: usize,
    pub blocks: usize,
    pub(super) bias: Option<Memory>,
    /// For each expert: the first block; for gates and ups its channels, for down projections the
    /// blocks of a row; the first bias; 1 if the expert is in this set.
    pub(super) table: Memory,
    /// Number of experts in the table, including absent ones.
    pub(super) experts: usize,
    /// Its experts that have weights on this rank, by the size of their matrices.
    pub(super) equals: Vec<Equals>,
}

/// Experts of a set whose matrices have the same size: routed ones, or shared ones.
#[derive(Debug)]
pub(crate) struct Equals {
    /// The set's table, without other experts.
    pub table: Memory,
    pub rows: usize,
    pub blocks: usize,
    /// Number of these experts.
    pub count: usize,
}

impl Set {
    pub(crate) fn weights(&self) -> Weights<'_> {
        Weights { chunk: &self.chunk, blocks: self.blocks }
    }
}

/// One of an expert's matrices.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Side {
    /// With the rows of weights of a channel.
    Up { lines: usize },
    /// With the biases of an expert.
    Down { biases: usize },
}

impl Experts {
    /// Copies the experts' weights side by side.
    pub(crate) fn new(
        experts: Vec<Expert<Matrix>>,
        activation: Option<Activation>,
        device: &mut Device,
    ) -> Result<Self, ComputeError> {
        let lines = if activation.is_some() { 2 } else { 1 };
        let channels = experts.iter().map(|expert| expert.gate_up.rows / lines).max().unwrap_or(0);
        let blocks = experts.iter().map(|expert| expert.gate_up.blocks).max().unwrap_or(0);
        let has_all = experts.iter().all(|expert| expert.gate_up.rows > 0);
        let alike = experts.iter().all(|e| e.gate_up.rows == 0 || e.gate_up.rows == lines * channels);
        let width = experts.iter().map(|e| e.down_bias.as_ref().map_or(0, Vec::len)).max().unwrap_or(0);
        let mut biases = vec![0; width * experts.len()];
        for (expert, biases) in experts.iter().zip(biases.chunks_mut(width.max(1))) {
            for (bias, value) in biases.iter_mut().zip(expert.down_bias.iter().flatten()) {
                *bias = value.to_bits();
            }
        }
        let down_bias = match width {
            0 => None,
            _ => Some(device.filled(&biases, "biases of experts")?),
        };
        let (up, down): (Vec<_>, Vec<_>) = experts.into_iter().map(|e| (e.gate_up, e.down)).unzip();
        let up = sets(&up, Side::Up { lines }, device)?;
        let down = sets(&down, Side::Down { biases: width }, device)?;
        // The experts' own buffers can be freed.
        device.submit()?;
        device.wait()?;
        device.forget_bindings();
        let is_uniform = alike && channels > 0;
        let of_each =
            |set: &Set| set.equals.iter().all(|equal| (equal.rows / lines).is_multiple_of(BLOCK_COLUMNS));
        let fills_blocks = up.iter().all(of_each);
        Ok(Self { up, down, activation, channels, is_uniform, fills_blocks, has_all, blocks, down_bias })
    }
}

impl Experts {
    /// The role of their first products.
    pub(crate) fn first_role(&self) -> Role {
        Role::of_experts(self.activation.is_some())
    }

    /// Whether pairs of rows and experts leave out biases: experts without weights on this rank
    /// have no pairs.
    pub(super) fn lacks_biases(&self) -> bool {
        self.down_bias.is_some() && !self.has_all
    }

    /// Bytes of the weights of an expert.
    pub(super) fn bytes_of_one(&self) -> usize {
        let of_set = |set: &Set| set.rows * set.blocks * set.chunk.format.block_bytes();
        self.up.iter().chain(&self.down).map(of_set).sum()
    }
}

/// The weights of an expert's matrix, if it has any on this rank.
fn chunk_of(matrix: &Matrix) -> Option<&Chunk> {
    matrix.chunks.first().filter(|_| matrix.blocks > 0)
}

/// Divides matrices into sets, in order.
fn sets(matrices: &[Matrix], side: Side, device: &mut Device) -> Result<Vec<Set>, ComputeError> {
    let limit = device.max_binding_bytes;
    let mut groups: Vec<Vec<usize>> = Vec::new();
    for (index, matrix) in matrices.iter().enumerate() {
        fits(
            "the number of bindings of an expert's matrix",
            matrix.chunks.len(),
            1,
            "experts that fit in one",
        )?;
        let alike = |group: &Vec<usize>| {
            let mut chunks = group.iter().filter_map(|other| chunk_of(&matrices[*other]));
            let Some(mine) = chunk_of(matrix) else { return true };
            let same = chunks
                .clone()
                .next()
                .is_none_or(|other| other.format == mine.format && other.shift == mine.shift);
            let largest = |chunk: &Chunk| chunk.buffers.iter().map(Memory::bytes).max().unwrap_or(0);
            let taken: u64 = chunks.by_ref().map(largest).sum();
            same && taken + largest(mine) <= limit
        };
        match groups.last_mut() {
            Some(group) if alike(group) => group.push(index),
            _ => groups.push(vec![index]),
        }
    }
    groups.iter().map(|members| set(matrices, members, side, device)).collect()
}

/// Copies the matrices of `members` into one chunk.
fn set(matrices: &[Matrix], members: &[usize], side: Side, device: &mut Device) -> Result<Set, ComputeError> {
    let chunks = || members.iter().filter_map(|index| chunk_of(&matrices[*index]));
    // Experts without weights on this rank still have biases and empty sums.
    let empty = Format { elements: Elements::Float(Float::F32), scales: Scales::None, halves: false };
    let (format, shift) = chunks().next().map_or((empty, 0), |chunk| (chunk.format, chunk.shift));
    let count = format.words().len() + usize::from(format.has_scales());
    let mut buffers = Vec::with_capacity(count);
    for index in 0..count {
        let bytes: u64 = chunks().map(|chunk| chunk.buffers[index].bytes()).sum();
        buffers.push(device.memory(bytes as usize, "weights of experts")?);
    }
    let rows = members.iter().map(|index| matrices[*index].rows).sum();
    let is_biased = members.iter().any(|index| matrices[*index].bias.is_some());
    let bias = if is_biased { Some(device.memory(rows * 4, "biases of experts")?) } else { None };
    let (mut blocks, mut first_bias) = (0, 0);
    let mut table = vec![0; 4 * matrices.len()];
    for &index in members {
        let matrix = &matrices[index];
        let entry = match side {
            Side::Up { lines } => [blocks, matrix.rows / lines, first_bias, 1],
            Side::Down { biases } => [blocks, matrix.blocks, index * biases, 1],
        };
        table[4 * index..4 * index + 4].copy_from_slice(&entry.map(|number| number as u32));
        if let (Some(from), Some(to)) = (&matrix.bias, &bias) {
            device.copy((from, 0), (to, first_bias), matrix.rows)?;
        }
        first_bias += matrix.rows;
        let Some(chunk) = chunk_of(matrix) else { continue };
        let of_matrix = matrix.rows * matrix.blocks;
        copy_chunk(chunk, of_matrix, (&buffers, blocks), device)?;
        blocks += of_matrix;
    }
    let largest = chunks().map(|chunk| chunk.largest).fold(0.0, larger);
    let equals = equals(matrices, members, &table, device)?;
    let table = device.filled(&table, "a table of experts")?;
    let first = members.iter().map(|index| &matrices[*index]).find(|matrix| matrix.rows * matrix.blocks > 0);
    let (first_rows, first_blocks) = first.map_or((0, 0), |matrix| (matrix.rows, matrix.blocks));
    let chunk = Chunk { format, rows: 0..rows, shift, largest, buffers };
    Ok(Set { chunk, rows: first_rows, blocks: first_blocks, bias, table, experts: matrices.len(), equals })
}

/// Divides `members` by the size of their matrices.
fn equals(
    matrices: &[Matrix],
    members: &[usize],
    table: &[u32],
    device: &mut Device,
) -> Result<Vec<Equals>, ComputeError> {
    let mut sizes: Vec<[usize; 2]> = Vec::new();
    for &index in members {
        let size = [matrices[index].rows, matrices[index].blocks];
        if !size.contains(&0) && !sizes.contains(&size) {
            sizes.push(size);
        }
    }
    let of_size = |[rows, blocks]: [usize; 2]| {
        let is_equal = |index: &usize| [matrices[*index].rows, matrices[*index].blocks] == [rows, blocks];
        let mut mine = vec![0; table.len()];
        for index in members.iter().filter(|index| is_equal(index)) {
            mine[4 * index..][..4].copy_from_slice(&table[4 * index..][..4]);
        }
        let count = members.iter().filter(|index| is_equal(index)).count();
        Ok(Equals { table: device.filled(&mine, "a table of experts")?, rows, blocks, count })
    };
    sizes.into_iter().map(of_size).collect()
}

/// Appends `count` blocks of a chunk to the first `before` blocks of `to`.
fn copy_chunk(chunk: &Chunk, count: usize, (to, before): (&[Memory], usize), device: &mut Device) -> Outcome {
    let format = chunk.format;
    let mut words = format.words();
    let groups = |blocks: usize| if format.halves { blocks * 2 } else { blocks >> chunk.shift };
    for (words, (from, to)) in words.drain(..).zip(chunk.buffers.iter().zip(to)) {
        device.copy((from, 0), (to, before * words), count * words)?;
    }
    if let (true, Some(from), Some(to)) = (format.has_scales(), chunk.buffers.last(), to.last()) {
        let words = format.scale_words();
        device.copy((from, 0), (to, groups(before) * words), groups(count) * words)?;
    }
    Ok(())
}

/// A router's arguments for kernels.
pub(super) fn router_words(spec: &RouterSpec<Vector>) -> Result<[u32; 10], ComputeError> {
    fits("the number of experts", spec.experts, MAX_EXPERTS, "at most 1024")?;
    fits("the number of experts of a token", spec.chosen, MAX_CHOSEN, "at most 64")?;
    let (groups, of_groups, best) = spec.groups.map_or((0, 0, 0), |g| (g.count, g.chosen, g.best));
    fits("the number of groups of experts", groups, MAX_GROUPS, "at most 256")?;
    let shared = match spec.shared {
        SharedExpert::None => 0,
        SharedExpert::Plain => 1,
        SharedExpert::Gated => 2,
    };
    Ok([
        spec.experts as u32,
        spec.chosen as u32,
        match spec.scores {
            Scores::Softmax => 0,
            Scores::Sigmoid => 1,
            Scores::RootSoftplus => 2,
        },
        u32::from(spec.correction.is_some()),
        groups as u32,
        of_groups as u32,
        best as u32,
        u32::from(spec.renormalise),
        shared,
        spec.scale.to_bits(),
    ])
}

impl GpuBackend {
    /// Copies experts side by side and proves their products. Without an activation they have no
    /// gates.
    pub(super) fn upload_experts(
        &mut self,
        experts: Vec<Expert<Matrix>>,
        activation: Option<Activation>,
    ) -> Result<Experts, ComputeError> {
        let experts = Experts::new(experts, activation, &mut self.device)?;
        self.prove_experts(&experts)?;
        Ok(experts)
    }

    pub(crate) fn route_rows(
        &mut self,
        spec: &RouterSpec<Vector>,
        logits: &Buffer,
        rows: Range<usize>,
        choices: &mut Buffer,
    ) -> Outcome {
        choices.shape(logits.rows)?;
        let strides = [logits.stride() as u32, choices.stride() as u32];
        let arguments = [&[rows.start as u32][..], &strides, &router_words(spec)?].concat();
        let correction = spec.correction.as_ref().map_or(&self.nothing, |correction| &correction.memory);
        let buffers = [correction, &logits.memory, &choices.memory];
        self.device.dispatch(&Kernel::Route, &buffers, &arguments, [rows.len() as u32, 1, 1])
    }

    pub(super) fn route_given(
        &mut self,
        spec: &RouterSpec<Vector>,
        assigned: &[u16],
        logits: &Buffer,
        rows: Range<usize>,
        choices: &mut Buffer,
    ) -> Outcome {
        self.require(Family::Changes)?;
        choices.shape(logits.rows)?;
        let words: Vec<u32> = assigned.iter().map(|expert| u32::from(*expert)).collect();
        let (memory, at) = self.device.table(&words)?;
        let spec = RouterSpec { correction: None, groups: None, ..spec.clone() };
        let strides = [logits.stride() as u32, choices.stride() as u32];
        let arguments = [&[rows.start as u32][..], &strides, &router_words(&spec)?, &[at]].concat();
        let buffers = [&memory, &logits.memory, &choices.memory];
        self.device.dispatch(&Kernel::RouteAssigned, &buffers, &arguments, [rows.len() as u32, 1, 1])
    }
}
