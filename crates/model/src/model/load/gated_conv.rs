//! What a rank reads for a gated short convolution (LFM2).

use thunder_compute::{Backend, CacheKind, GatedConvSpec, MatrixSource};

use super::sources::{ShardView, Window};
use super::upload::Upload;
use crate::error::ModelError;
use crate::model::gated_conv::GatedConv;
use crate::spec::GatedConvShape;
use crate::weights::LayerRole;

/// One layer's convolution on this rank, which has some of the channels.
pub(super) struct GatedConvSources<'a> {
    spec: GatedConvSpec<Vec<f32>>,
    /// Gates of the convolution's inputs, gates of its results, inputs.
    inputs: [MatrixSource<'a>; 3],
    out: MatrixSource<'a>,
}

impl<'a> GatedConvSources<'a> {
    pub fn describe(view: &ShardView<'a>, layer: usize, shape: GatedConvShape) -> Result<Self, ModelError> {
        let (hidden, GatedConvShape { channels: all, kernel }) = (view.spec.hidden, shape);
        let unit = view.weights.format(LayerRole::DeltaOut.of(layer))?.column_unit();
        let own = view.shard.channels(all, unit);
        let part = |index: usize| {
            let rows = index * all + own.start..index * all + own.end;
            let window = Window { rows, cols: 0..hidden, bias: false };
            view.matrix(LayerRole::ConvIn.of(layer), [3 * all, hidden], window)
        };
        let taps = view.weights.vector(LayerRole::DeltaConvolution.of(layer), &[all, 1, kernel])?;
        let window = Window { rows: 0..hidden, cols: own.clone(), bias: false };
        Ok(Self {
            inputs: [part(0)?, part(1)?, part(2)?],
            out: view.matrix(LayerRole::DeltaOut.of(layer), [hidden, all], window)?,
            spec: GatedConvSpec {
                channels: own.len(),
                kernel,
                taps: taps[own.start * kernel..own.end * kernel].to_vec(),
            },
        })
    }

    pub fn matrices(&self) -> [&MatrixSource<'a>; 4] {
        let [input_gates, output_gates, inputs] = &self.inputs;
        [input_gates, output_gates, inputs, &self.out]
    }

    pub fn cache(&self) -> CacheKind {
        self.spec.cache()
    }

    pub fn upload<B: Backend>(self, upload: &mut Upload<'_, B>) -> Result<GatedConv<B>, ModelError> {
        let Self { spec, inputs, out } = self;
        Ok(GatedConv {
            cache: upload.cache(spec.cache()),
            inputs_buffer: upload.shared_buffer("gated inputs", 3 * spec.channels)?,
            results_buffer: upload.shared_buffer("convolved", spec.channels)?,
            inputs: upload.matrix(&inputs)?,
            out: upload.matrix(&[out])?,
            spec: spec.try_map(&mut |values| upload.vector(&values))?,
        })
    }
}
