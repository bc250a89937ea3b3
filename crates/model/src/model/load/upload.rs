//! Packing a rank's matrices and making its buffers.

use std::collections::HashMap;
use std::ops::{ControlFlow, Range};
use std::sync::Arc;

use thunder_compute::{Activation, Backend, CacheKind, Expert, Heads, MatrixSource, Norm};

use super::Progress;
use crate::engram::TokenNumbers;
use crate::error::ModelError;

/// Matrices are packed together up to this many bytes in the files. Progress is reported after each
/// batch.
const TOGETHER_BYTES: usize = 256 << 20;

/// The content of a cache that several layers read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum SharedCache {
    /// Compressed tokens.
    Entries,
    /// The keys by which these are chosen.
    Keys,
    /// Keys and values of heads.
    Heads,
}

/// A backend that receives one rank's weights.
pub(super) struct Upload<'a, B: Backend> {
    backend: &'a mut B,
    progress: Progress<'a>,
    done: u64,
    total: u64,
    /// Rows of each shared buffer.
    rows: usize,
    shared: Vec<B::Buffer>,
    /// Role, width and written columns of each shared buffer.
    keys: Vec<(&'static str, usize, Range<usize>)>,
    caches: Vec<CacheKind>,
    /// Caches that other layers read, by the layer that writes them.
    shared_caches: HashMap<(usize, SharedCache), usize>,
    /// All layers use the first one's caches, one after the other in each step, because an encoder
    /// reads no keys of earlier steps.
    pub shares_caches: bool,
    /// Numbers of tokens, if a layer has tables by them.
    pub numbers: Option<Arc<TokenNumbers>>,
}

impl<'a, B: Backend> Upload<'a, B> {
    /// `rows` is the height of shared buffers, `total` the bytes of all matrices.
    pub fn new(backend: &'a mut B, rows: usize, total: u64, progress: Progress<'a>) -> Self {
        Self {
            backend,
            progress,
            done: 0,
            total,
            rows,
            shared: Vec::new(),
            keys: Vec::new(),
            caches: Vec::new(),
            shared_caches: HashMap::new(),
            shares_caches: false,
            numbers: None,
        }
    }

    /// Packs matrices with the same input into one and reports progress.
    pub fn matrix(&mut self, parts: &[MatrixSource<'_>]) -> Result<B::Matrix, ModelError> {
        self.pack(parts, parts.iter().map(|part| part.bytes()).sum())
    }

    /// Packs a matrix for each head, which were read from `read_bytes` of the files.
    pub fn heads(
        &mut self,
        all: &[MatrixSource<'_>],
        read_bytes: usize,
    ) -> Result<Heads<B::Matrix>, ModelError> {
        let heads = self.backend.heads(all)?;
        self.report(read_bytes)?;
        Ok(heads)
    }

    /// Packs matrices of experts. For small ones this is faster than packing them one by one.
    pub fn expert_matrices(&mut self, all: &[Vec<MatrixSource<'_>>]) -> Result<Vec<B::Matrix>, ModelError> {
        let mut packed = Vec::with_capacity(all.len());
        let mut left = all;
        while !left.is_empty() {
            let mut bytes = 0;
            let fits = |parts: &&Vec<MatrixSource<'_>>| {
                let fits = bytes < TOGETHER_BYTES;
                bytes += parts.iter().map(MatrixSource::bytes).sum::<usize>();
                fits
            };
            let (now, later) = left.split_at(left.iter().take_while(fits).count());
            let parts: Vec<&[MatrixSource<'_>]> = now.iter().map(Vec::as_slice).collect();
            packed.extend(self.backend.expert_matrices(&parts)?);
            self.report(now.iter().flatten().map(MatrixSource::bytes).sum())?;
            left = later;
        }
        Ok(packed)
    }

    /// Packs a matrix that was made of `read_bytes` of the files.
    pub fn converted(
        &mut self,
        matrix: MatrixSource<'_>,
        read_bytes: usize,
    ) -> Result<B::Matrix, ModelError> {
        self.pack(&[matrix], read_bytes)
    }

    /// Packs an expert's matrices with the same input into one that was read from `read_bytes` of
    /// the files.
    pub fn converted_expert(
        &mut self,
        parts: &[MatrixSource<'_>],
        read_bytes: usize,
    ) -> Result<B::Matrix, ModelError> {
        let mut packed = self.backend.expert_matrices(&[parts])?;
        let Some(matrix) = packed.pop() else { unreachable!("one for each") };
        self.report(read_bytes)?;
        Ok(matrix)
    }

    fn pack(&mut self, parts: &[MatrixSource<'_>], read_bytes: usize) -> Result<B::Matrix, ModelError> {
        let matrix = self.backend.matrix(parts)?;
        self.report(read_bytes)?;
        Ok(matrix)
    }

    fn report(&mut self, read_bytes: usize) -> Result<(), ModelError> {
        self.done += read_bytes as u64;
        match (self.progress)(self.done, self.total) {
            ControlFlow::Continue(()) => Ok(()),
            ControlFlow::Break(()) => Err(ModelError::Stopped),
        }
    }

    /// Collects a layer's experts. Without an activation they have no gates.
    pub fn experts(
        &mut self,
        experts: Vec<Expert<B::Matrix>>,
        activation: Option<Activation>,
    ) -> Result<B::Experts, ModelError> {
        Ok(match activation {
            Some(activation) => self.backend.experts(experts, activation)?,
            None => self.backend.ungated_experts(experts)?,
        })
    }

    /// Uploads a vector.
    pub fn vector(&mut self, values: &[f32]) -> Result<B::Vector, ModelError> {
        Ok(self.backend.vector(values)?)
    }

    /// Uploads a norm's weights.
    pub fn norm(&mut self, weight: &[f32], eps: f32) -> Result<Norm<B::Vector>, ModelError> {
        Ok(Norm { weight: self.vector(weight)?, eps })
    }

    /// The index of a new cache.
    pub fn cache(&mut self, kind: CacheKind) -> usize {
        if self.shares_caches
            && let Some(found) = self.caches.iter().position(|other| *other == kind)
        {
            return found;
        }
        self.caches.push(kind);
        self.caches.len() - 1
    }

    /// The index of a new cache of `layer`, which other layers read too.
    pub fn share_cache(&mut self, layer: usize, role: SharedCache, kind: CacheKind) -> usize {
        let cache = self.cache(kind);
        self.shared_caches.insert((layer, role), cache);
        cache
    }

    /// The index of a cache that `layer` writes.
    ///
    /// # Panics
    /// When the layer has none, or comes later: what a layer reads was checked when it was
    /// described.
    pub fn cache_of(&self, layer: usize, role: SharedCache) -> usize {
        self.shared_caches[&(layer, role)]
    }

    /// The index of a buffer that all layers with this role and width share.
    pub fn shared_buffer(&mut self, role: &'static str, width: usize) -> Result<usize, ModelError> {
        self.partly_written_buffer(role, width, 0..width)
    }

    /// The index of a buffer that is shared by all layers that write only these columns; the others
    /// stay zero.
    pub fn partly_written_buffer(
        &mut self,
        role: &'static str,
        width: usize,
        written: Range<usize>,
    ) -> Result<usize, ModelError> {
        let key = (role, width, written);
        if let Some(found) = self.keys.iter().position(|other| *other == key) {
            return Ok(found);
        }
        self.keys.push(key);
        self.shared.push(self.backend.buffer(self.rows, width)?);
        Ok(self.keys.len() - 1)
    }

    /// A separate buffer.
    pub fn buffer(&mut self, rows: usize, width: usize) -> Result<B::Buffer, ModelError> {
        Ok(self.backend.buffer(rows, width)?)
    }

    /// The shared buffers and the caches, by index.
    pub fn into_parts(self) -> (Vec<B::Buffer>, Vec<CacheKind>) {
        (self.shared, self.caches)
    }
}
