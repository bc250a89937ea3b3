//! What a rank reads of tables by the last tokens.

use std::ops::Range;
use std::sync::Arc;

use thunder_compute::{Backend, CacheKind, Extra, MatrixSource, RecentSpec};

use super::compressed::whole;
use super::sources::ShardView;
use super::upload::Upload;
use crate::error::ModelError;
use crate::model::Vocabulary;
use crate::model::engram::Engram;
use crate::spec::{EngramLayer, EngramShape};
use crate::weights::LayerRole;

/// One layer's tables: this rank's rows, and everything needed to turn them into keys.
pub(super) struct EngramSources<'a> {
    shape: &'a EngramShape,
    of: &'a EngramLayer,
    table: MatrixSource<'a>,
    rows: Range<usize>,
    product: MatrixSource<'a>,
    weights: Vec<f32>,
    eps: f32,
}

impl<'a> EngramSources<'a> {
    /// The tables of a layer, if it has some.
    pub fn describe(view: &ShardView<'a>, layer: usize) -> Result<Option<Self>, ModelError> {
        let Some(shape) = &view.spec.engram else { return Ok(None) };
        let Some(of) = shape.of(layer) else { return Ok(None) };
        let (hidden, streams) = (view.spec.hidden, view.spec.streams.map_or(1, |streams| streams.count));
        let (table, rows) = view.table(LayerRole::EngramTables.of(layer), [of.rows(), shape.width])?;
        let [mut weights, of_keys] = [
            view.weights.vector(LayerRole::EngramStreams.of(layer), &[streams, hidden])?,
            view.weights.vector(LayerRole::EngramKeys.of(layer), &[streams, hidden])?,
        ];
        weights.iter_mut().zip(of_keys).for_each(|(weight, of_key)| *weight *= of_key);
        let product = [(streams + 1) * hidden, shape.columns()];
        Ok(Some(Self {
            shape,
            of,
            table,
            rows,
            product: whole(view, layer, LayerRole::EngramProduct, product)?,
            weights,
            eps: view.spec.norm_eps,
        }))
    }

    pub const fn matrices(&self) -> [&MatrixSource<'a>; 2] {
        [&self.table, &self.product]
    }

    /// Bytes of the tables in memory; a token reads only a few rows.
    pub fn table_bytes(&self) -> u64 {
        self.table.packed_bytes() as u64
    }

    /// Operations that not every backend has.
    pub const fn needs(&self) -> Extra {
        Extra::RecentTokens
    }

    const fn recent(&self) -> RecentSpec {
        RecentSpec { count: self.shape.longest - 1 }
    }

    /// The cache of the last tokens.
    pub const fn cache(&self) -> CacheKind {
        self.recent().cache()
    }

    pub fn upload<B: Backend>(self, upload: &mut Upload<'_, B>) -> Result<Engram<B>, ModelError> {
        let recent = self.recent();
        let Some(numbers) = upload.numbers.clone() else { unreachable!("a layer with tables has numbers") };
        Ok(Engram {
            recent,
            cache: upload.cache(recent.cache()),
            vectors_buffer: upload.shared_buffer("vectors of tables", self.shape.columns())?,
            keys_buffer: upload.shared_buffer("keys and value of tables", self.product.rows)?,
            table: Vocabulary { matrix: upload.matrix(&[self.table])?, rows: self.rows },
            product: upload.matrix(&[self.product])?,
            shape: Arc::new(self.shape.clone()),
            of: self.of.clone(),
            numbers,
            weights: self.weights,
            eps: self.eps,
        })
    }
}
