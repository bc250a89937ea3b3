//! What a rank reads for the connections to several residual streams. Every rank has all of it.

use thunder_compute::{Backend, MatrixSource, StreamSpec};

use super::sources::{ShardView, Window};
use super::upload::Upload;
use crate::error::ModelError;
use crate::model::streams::{Connection, PartConnection};
use crate::spec::{StreamReading, StreamsShape};
use crate::weights::{LayerRole, Role};

/// A connection to the residual streams.
pub(super) struct ConnectionSources<'a> {
    spec: StreamSpec,
    matrix: MatrixSource<'a>,
    eps: f32,
    reading: StreamReading,
}

/// Names of buffers of weights, where the next part reads by them.
const CARRIED: [&str; 2] = ["mixer's weights of streams", "feed-forward's weights of streams"];

impl<'a> ConnectionSources<'a> {
    /// The connections of a layer's mixer and feed-forward.
    pub fn of_layer(
        view: &ShardView<'a>,
        layer: usize,
        shape: StreamsShape,
    ) -> Result<[Self; 2], ModelError> {
        if shape.reading == StreamReading::Carried && view.shard.layers().start > 0 {
            return Err(ModelError::Plan(format!(
                "layer {layer} reads the residual streams by weights of the layer before its stage, which would be \
                 on another rank: use --parallel tensor"
            )));
        }
        use LayerRole::{
            FeedForwardStreams, FeedForwardStreamsBase, FeedForwardStreamsScale, MixerStreams,
            MixerStreamsBase, MixerStreamsScale,
        };
        let columns = StreamSpec::all_columns(shape.count);
        let of = |roles: [LayerRole; 3]| {
            Self::describe(view, shape, (columns, 3), roles.map(|role| role.of(layer)))
        };
        Ok([
            of([MixerStreams, MixerStreamsBase, MixerStreamsScale])?,
            of([FeedForwardStreams, FeedForwardStreamsBase, FeedForwardStreamsScale])?,
        ])
    }

    /// The connection of the last norm.
    pub fn of_output(view: &ShardView<'a>, shape: StreamsShape) -> Result<Self, ModelError> {
        let roles = [Role::OutputStreams, Role::OutputStreamsBase, Role::OutputStreamsScale];
        Self::describe(view, shape, (shape.count, 1), roles)
    }

    fn describe(
        view: &ShardView<'a>,
        shape: StreamsShape,
        (columns, scales): (usize, usize),
        [matrix, base, scale]: [Role; 3],
    ) -> Result<Self, ModelError> {
        let width = shape.count * view.spec.hidden;
        let window = Window { rows: 0..columns, cols: 0..width, bias: false };
        let given = view.weights.vector(scale, &[scales])?;
        let mut scale = [1.0; 3];
        scale[..scales].copy_from_slice(&given);
        let spec = StreamSpec {
            streams: shape.count,
            scale,
            base: view.weights.vector(base, &[columns])?,
            iterations: shape.iterations,
            eps: shape.eps,
        };
        let matrix = view.matrix(matrix, [columns, width], window)?;
        Ok(Self { spec, matrix, eps: view.spec.norm_eps, reading: shape.reading })
    }

    pub const fn matrix(&self) -> &MatrixSource<'a> {
        &self.matrix
    }

    pub fn upload<B: Backend>(self, upload: &mut Upload<'_, B>) -> Result<Connection<B>, ModelError> {
        let unit = upload.norm(&vec![1.0; self.matrix.cols], self.eps)?;
        Ok(Connection { spec: self.spec, matrix: upload.matrix(&[self.matrix])?, unit })
    }

    /// For a layer's mixer (0) or feed-forward (1), with the norm of its input.
    pub fn upload_part<B: Backend>(
        self,
        (part, norm): (usize, &[f32]),
        upload: &mut Upload<'_, B>,
    ) -> Result<PartConnection<B>, ModelError> {
        let [weights, reading] = match self.reading {
            StreamReading::Weighted | StreamReading::Mean => ["weights of streams"; 2],
            StreamReading::Carried => [CARRIED[part], CARRIED[1 - part]],
        };
        Ok(PartConnection {
            norm: upload.norm(norm, self.eps)?,
            normed_buffer: upload.shared_buffer("normed streams", self.matrix.cols)?,
            weights_buffer: upload.shared_buffer(weights, self.matrix.rows)?,
            reading_buffer: upload.shared_buffer(reading, self.matrix.rows)?,
            streams: self.upload(upload)?,
        })
    }
}
