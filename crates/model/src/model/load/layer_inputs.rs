//! What a rank reads for the layers' inputs.

use std::ops::Range;

use thunder_compute::{Backend, MatrixSource, PartNorm};

use super::compressed::whole;
use super::sources::{ShardView, Window};
use super::upload::Upload;
use crate::error::ModelError;
use crate::model::Vocabulary;
use crate::model::layer_inputs::{LayerInput, LayerInputs};
use crate::spec::LayerInputsShape;
use crate::weights::{LayerRole, Role};

/// The name of the buffer with all layers' inputs.
const INPUTS: &str = "layers' inputs";

/// What makes the inputs of all layers.
pub(super) struct LayerInputsSources<'a> {
    width: usize,
    table: MatrixSource<'a>,
    rows: Range<usize>,
    projection: MatrixSource<'a>,
    norm: Vec<f32>,
    eps: f32,
}

impl<'a> LayerInputsSources<'a> {
    pub fn describe(view: &ShardView<'a>) -> Result<Option<Self>, ModelError> {
        let Some(LayerInputsShape { width, vocab }) = view.spec.layer_inputs else { return Ok(None) };
        if !(view.shard.is_first() && view.shard.is_last()) {
            return Err(ModelError::Plan(
                "every layer reads inputs that are made of the embedding, which later stages of a pipeline do \
                 not have: use --parallel tensor"
                    .into(),
            ));
        }
        let (hidden, all) = (view.spec.hidden, view.spec.layers.len() * width);
        let (table, rows) = view.table(Role::LayerInputs, [vocab, all])?;
        let projection = Window { rows: 0..all, cols: 0..hidden, bias: false };
        Ok(Some(Self {
            width,
            table,
            rows,
            projection: view.matrix(Role::LayerInputsProjection, [all, hidden], projection)?,
            norm: view.norm(Role::LayerInputsNorm, width)?,
            // The norm is of the projection times the root of `1 / hidden`.
            eps: view.spec.norm_eps * hidden as f32,
        }))
    }

    pub const fn matrices(&self) -> [&MatrixSource<'a>; 2] {
        [&self.table, &self.projection]
    }

    /// Bytes of the table in memory; a token reads only a row.
    pub fn table_bytes(&self) -> u64 {
        self.table.packed_bytes() as u64
    }

    pub fn upload<B: Backend>(self, upload: &mut Upload<'_, B>) -> Result<LayerInputs<B>, ModelError> {
        let Self { width, norm, eps, .. } = self;
        let all = self.projection.rows;
        // An input is the sum of both, times the root of a half.
        let half = 0.5f32.sqrt();
        let norm: Vec<f32> = norm.iter().map(|weight| weight * half).collect();
        let norms = (0..all).step_by(width).map(|first| {
            let columns = first..first + width;
            let weight = upload.vector(&norm)?;
            Ok(PartNorm { counted: columns.clone(), columns, weight, width, eps })
        });
        let norms: Vec<_> = norms.collect::<Result<_, ModelError>>()?;
        Ok(LayerInputs {
            scale: (width as f32).sqrt() * half,
            sums_buffer: upload.shared_buffer("square sums", norms.len())?,
            norms,
            projected_buffer: upload.shared_buffer("projections to layers' inputs", all)?,
            inputs_buffer: upload.shared_buffer(INPUTS, all)?,
            table: Vocabulary { matrix: upload.matrix(&[self.table])?, rows: self.rows },
            projection: upload.matrix(&[self.projection])?,
        })
    }
}

/// What a layer does with its input.
pub(super) struct LayerInputSources<'a> {
    gate: MatrixSource<'a>,
    out: MatrixSource<'a>,
    norm: Vec<f32>,
    layer: usize,
    layers: usize,
}

impl<'a> LayerInputSources<'a> {
    pub fn describe(view: &ShardView<'a>, layer: usize) -> Result<Option<Self>, ModelError> {
        let Some(LayerInputsShape { width, .. }) = view.spec.layer_inputs else { return Ok(None) };
        let hidden = view.spec.hidden;
        Ok(Some(Self {
            gate: whole(view, layer, LayerRole::InputGate, [width, hidden])?,
            out: whole(view, layer, LayerRole::InputOut, [hidden, width])?,
            norm: view.norm(LayerRole::InputPostNorm.of(layer), hidden)?,
            layer,
            layers: view.spec.layers.len(),
        }))
    }

    pub const fn matrices(&self) -> [&MatrixSource<'a>; 2] {
        [&self.gate, &self.out]
    }

    pub fn upload<B: Backend>(
        self,
        eps: f32,
        upload: &mut Upload<'_, B>,
    ) -> Result<LayerInput<B>, ModelError> {
        let width = self.gate.rows;
        Ok(LayerInput {
            first: self.layer * width,
            inputs_buffer: upload.shared_buffer(INPUTS, self.layers * width)?,
            both_buffer: upload.shared_buffer("gates and inputs", 2 * width)?,
            gated_buffer: upload.shared_buffer("gated inputs", width)?,
            sum_buffer: upload.shared_buffer("sum", self.norm.len())?,
            normed_buffer: upload.shared_buffer("normed sum", self.norm.len())?,
            norm: upload.norm(&self.norm, eps)?,
            gate: upload.matrix(&[self.gate])?,
            out: upload.matrix(&[self.out])?,
        })
    }
}
