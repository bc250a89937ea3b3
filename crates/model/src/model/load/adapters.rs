//! What a rank reads of low-rank adapters. For a product that is split by outputs: all of `down`
//! and the rank's rows of `up`. For one that is split by inputs: the rank's columns of `down` and
//! all of `up`.

use std::ops::Range;

use thunder_compute::Backend;

use super::sources::{ShardView, of_floats};
use super::upload::Upload;
use crate::error::ModelError;
use crate::model::adapters::{Adapted, Adapters, LowRank};
use crate::weights::{AdaptedOutputs, Adapter};

/// The adapters of one product.
pub(super) struct AdaptersSources<'a> {
    adapters: &'a [Adapter],
    layer: usize,
    outputs: Vec<AdaptedOutputs>,
    columns: Range<usize>,
}

impl<'a> AdaptersSources<'a> {
    /// The adapters of a product of these outputs with these inputs.
    pub fn describe(
        view: &ShardView<'a>,
        layer: usize,
        outputs: Vec<AdaptedOutputs>,
        columns: Range<usize>,
    ) -> Self {
        Self { adapters: view.adapters, layer, outputs, columns }
    }

    fn rows(&self) -> usize {
        self.outputs.iter().map(|outputs| outputs.rows.len()).sum()
    }

    fn bytes_of(&self, adapter: &Adapter) -> usize {
        adapter.rank(self.layer, &self.outputs) * (self.rows() + self.columns.len()) * size_of::<f32>()
    }

    /// Bytes of the loaded adapters.
    pub fn bytes(&self) -> u64 {
        self.adapters.iter().map(|adapter| self.bytes_of(adapter) as u64).sum()
    }

    pub fn upload<B: Backend>(self, upload: &mut Upload<'_, B>) -> Result<Adapters<B>, ModelError> {
        let mut all = Vec::with_capacity(self.adapters.len());
        for adapter in self.adapters {
            let bytes = self.bytes_of(adapter);
            all.push(match adapter.rank(self.layer, &self.outputs) {
                0 => Adapted::Nothing,
                _ if self.rows() == 0 || self.columns.is_empty() => Adapted::Elsewhere,
                rank => {
                    let read = adapter.read(self.layer, &self.outputs, &self.columns)?;
                    let (down, up) = (to_bytes(&read.down), to_bytes(&read.up));
                    let down = upload.converted(of_floats(&down, [rank, self.columns.len()]), bytes)?;
                    Adapted::Here(LowRank {
                        down,
                        up: upload.converted(of_floats(&up, [self.rows(), rank]), 0)?,
                        rank,
                    })
                }
            });
        }
        // A product that no adapter changes needs no look at a step's sequences.
        let is_changed = all.iter().any(|adapted| !matches!(adapted, Adapted::Nothing));
        Ok(Adapters(if is_changed { all } else { Vec::new() }))
    }
}

fn to_bytes(numbers: &[f32]) -> Vec<u8> {
    numbers.iter().flat_map(|number| number.to_le_bytes()).collect()
}
