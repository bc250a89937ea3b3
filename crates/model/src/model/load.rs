//! Loading a rank's part: first a description of all that it takes from the files, then packing it.

use std::ops::{ControlFlow, Range};

use thunder_compute::{AttentionSpec, Backend, FilePages, KvFormat, KvLayer, KvShape, MatrixSource, QkNorm};

use super::{Attention, Buffers, FeedForward, Head, Layer, Mixer, Model, Vocabulary};
use crate::error::ModelError;
use crate::folder::ModelFolder;
use crate::loader::{Loader, Window};
use crate::plan::{Shard, ShardPlan};
use crate::spec::{AttentionShape, FeedForwardSpec, GatedShape, LayerSpec, MixerSpec, ModelSpec};
use crate::weights::Weights;

/// Told how many bytes of weights are loaded, of how many; `Break` ends the loading with [`ModelError::Stopped`].
pub type Progress<'a> = &'a mut dyn FnMut(u64, u64) -> ControlFlow<()>;

/// What a rank's part of a model takes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ShardFootprint {
    /// Layers it computes.
    pub layers: Range<usize>,
    /// Query heads of its first attention layer.
    pub queries: Range<usize>,
    /// KV heads of its first attention layer.
    pub kv: Range<usize>,
    /// Channels of its first MLP.
    pub channels: Range<usize>,
    /// Vocabulary rows.
    pub vocab: Range<usize>,
    /// Bytes of weights.
    pub weight_bytes: u64,
    /// Bytes of keys and values for each token.
    pub kv_bytes_per_token: u64,
}

/// What each rank of a plan takes with keys and values in this format. Reads headers only.
///
/// # Errors
/// When a tensor is missing or of another shape than the config implies.
pub fn shard_footprints(
    folder: &ModelFolder,
    plan: &ShardPlan,
    kv: KvFormat,
) -> Result<Vec<ShardFootprint>, ModelError> {
    (0..plan.ranks())
        .map(|rank| {
            let shard = plan.shard(rank);
            let sources = Sources::describe(folder, shard, None)?;
            let layer = &folder.spec.layers[shard.layers().start];
            let MixerSpec::Attention(attention) = &layer.mixer;
            let FeedForwardSpec::Gated(gated) = &layer.feed_forward;
            let heads = shard.heads(attention);
            let loader = Loader::new(&folder.weights, &folder.quantization, None);
            let names = Names::find(folder, shard.layers().start);
            Ok(ShardFootprint {
                layers: shard.layers(),
                queries: heads.queries,
                kv: heads.kv,
                channels: shard.channels(gated.channels, channel_unit(&loader, &names)?),
                vocab: shard.vocab(folder.spec.vocab),
                weight_bytes: sources.bytes(),
                kv_bytes_per_token: sources.kv_shape(kv, 0).bytes_per_token() as u64,
            })
        })
        .collect()
}

/// Bytes of an embedding that is only looked up in; 0 if it is the output projection as well.
pub fn lookup_bytes(folder: &ModelFolder) -> u64 {
    let names = Names::find(folder, 0);
    if tied(folder, &names) {
        return 0;
    }
    let table = names.outside("embed_tokens");
    let tensors = ["weight", "scales", "biases"].map(|part| folder.weights.get(&format!("{table}.{part}")));
    tensors.iter().flatten().map(|tensor| tensor.bytes.len() as u64).sum()
}

fn tied(folder: &ModelFolder, names: &Names) -> bool {
    folder.spec.tied.unwrap_or(!folder.weights.has(&format!("{}.weight", names.head(&folder.weights))))
}

/// Names of a layer's tensors, or of those outside of layers.
struct Names {
    /// What stands before `embed_tokens`, `layers` and `norm`.
    prefix: String,
    layer: usize,
}

impl Names {
    fn find(folder: &ModelFolder, layer: usize) -> Self {
        // The text model of a wrapped one is called differently from file to file, so the file is asked.
        const TABLE: &str = "embed_tokens.weight";
        let prefix =
            folder.weights.name_ending(TABLE).map_or("model.", |name| &name[..name.len() - TABLE.len()]);
        Self { prefix: prefix.to_owned(), layer }
    }

    fn outside(&self, name: &str) -> String {
        format!("{}{name}", self.prefix)
    }

    /// The output projection, wherever the file has it; as a rule beside the model, not in it.
    fn head(&self, weights: &Weights) -> String {
        let found = weights.name_ending("lm_head.weight").and_then(|name| name.strip_suffix(".weight"));
        found.unwrap_or("lm_head").to_owned()
    }

    fn inside(&self, name: &str) -> String {
        format!("{}layers.{}.{name}", self.prefix, self.layer)
    }
}

/// Channels that cannot be divided: the groups in which the down projection is quantized, or a panel's rows.
fn channel_unit(loader: &Loader<'_>, names: &Names) -> Result<usize, ModelError> {
    Ok(loader.encoding(&names.inside("mlp.down_proj"))?.column_unit().max(32))
}

/// All that a rank takes from the files.
struct Sources<'a> {
    embedding: Option<(MatrixSource<'a>, Range<usize>)>,
    layers: Vec<LayerSources<'a>>,
    head: Option<HeadSources<'a>>,
}

struct HeadSources<'a> {
    norm: Vec<f32>,
    matrix: Option<MatrixSource<'a>>,
    rows: Range<usize>,
}

struct LayerSources<'a> {
    norms: [Vec<f32>; 2],
    attention: AttentionSpec<Vec<f32>>,
    qkv: Vec<MatrixSource<'a>>,
    out: MatrixSource<'a>,
    gate_up: Vec<MatrixSource<'a>>,
    down: MatrixSource<'a>,
}

impl<'a> Sources<'a> {
    fn describe(
        folder: &'a ModelFolder,
        shard: Shard<'_>,
        pages: Option<&'a dyn FilePages>,
    ) -> Result<Self, ModelError> {
        let spec = &folder.spec;
        let loader = Loader::new(&folder.weights, &folder.quantization, pages);
        let names = Names::find(folder, 0);
        let tied = tied(folder, &names);
        let rows = shard.vocab(spec.vocab);
        let table = |path: &str| {
            let window = Window { rows: rows.clone(), cols: 0..spec.hidden, bias: false };
            loader.matrix(path, [spec.vocab, spec.hidden], &window)
        };
        let embedding = match shard.is_first() {
            true => Some((table(&names.outside("embed_tokens"))?, rows.clone())),
            false => None,
        };
        let head = match shard.is_last() {
            true => Some(HeadSources {
                norm: loader.vector(&names.outside("norm.weight"), spec.hidden)?,
                matrix: match (tied, embedding.is_some()) {
                    (true, true) => None,
                    (true, false) => Some(table(&names.outside("embed_tokens"))?),
                    (false, _) => Some(table(&names.head(&folder.weights))?),
                },
                rows: rows.clone(),
            }),
            false => None,
        };
        let layers = shard
            .layers()
            .map(|layer| {
                let names = Names { prefix: names.prefix.clone(), layer };
                LayerSources::describe(spec, &spec.layers[layer], shard, &loader, &names)
            })
            .collect::<Result<_, _>>()?;
        Ok(Self { embedding, layers, head })
    }

    fn matrices(&self) -> impl Iterator<Item = &MatrixSource<'a>> {
        let layers = self
            .layers
            .iter()
            .flat_map(|layer| layer.qkv.iter().chain(&layer.gate_up).chain([&layer.out, &layer.down]));
        let embedding = self.embedding.as_ref().map(|(matrix, _)| matrix);
        let head = self.head.as_ref().and_then(|head| head.matrix.as_ref());
        layers.chain(embedding).chain(head)
    }

    fn bytes(&self) -> u64 {
        self.matrices().map(|matrix| matrix.bytes() as u64).sum()
    }

    fn kv_shape(&self, format: KvFormat, blocks: usize) -> KvShape {
        let layers = self
            .layers
            .iter()
            .map(|layer| KvLayer { heads: layer.attention.kv_heads(), head_dim: layer.attention.head_dim })
            .collect();
        KvShape { format, layers, blocks }
    }
}

impl<'a> LayerSources<'a> {
    fn describe(
        spec: &ModelSpec,
        layer: &LayerSpec,
        shard: Shard<'_>,
        loader: &Loader<'a>,
        names: &Names,
    ) -> Result<Self, ModelError> {
        let MixerSpec::Attention(shape) = &layer.mixer;
        let FeedForwardSpec::Gated(gated) = &layer.feed_forward;
        let (attention, qkv, out) = attention(spec, shape, shard, loader, names)?;
        let (gate_up, down) = gated_mlp(spec, gated, shard, loader, names)?;
        Ok(Self {
            norms: [
                loader.vector(&names.inside("input_layernorm.weight"), spec.hidden)?,
                loader.vector(&names.inside("post_attention_layernorm.weight"), spec.hidden)?,
            ],
            attention,
            qkv,
            out,
            gate_up,
            down,
        })
    }
}

type AttentionSources<'a> = (AttentionSpec<Vec<f32>>, Vec<MatrixSource<'a>>, MatrixSource<'a>);

fn attention<'a>(
    spec: &ModelSpec,
    shape: &AttentionShape,
    shard: Shard<'_>,
    loader: &Loader<'a>,
    names: &Names,
) -> Result<AttentionSources<'a>, ModelError> {
    let dim = shape.head_dim;
    let heads = shard.heads(shape);
    let part = |name: &str, all: usize, mine: &Range<usize>| {
        let window =
            Window { rows: mine.start * dim..mine.end * dim, cols: 0..spec.hidden, bias: shape.qkv_bias };
        loader.matrix(&names.inside(name), [all * dim, spec.hidden], &window)
    };
    let qkv = vec![
        part("self_attn.q_proj", shape.heads, &heads.queries)?,
        part("self_attn.k_proj", shape.kv_heads, &heads.kv)?,
        part("self_attn.v_proj", shape.kv_heads, &heads.kv)?,
    ];
    // The heads' columns may begin inside of a quantization group. Then the whole group is taken, and the input is zero
    // where other ranks' heads would be.
    let out_path = names.inside("self_attn.o_proj");
    let unit = loader.encoding(&out_path)?.column_unit();
    let columns = heads.queries.start * dim..heads.queries.end * dim;
    let window = match columns.is_empty() {
        true => 0..0,
        false => columns.start / unit * unit..columns.end.next_multiple_of(unit),
    };
    let out_column = columns.start - window.start.min(columns.start);
    let out = loader.matrix(
        &out_path,
        [spec.hidden, shape.heads * dim],
        &Window { rows: 0..spec.hidden, cols: window, bias: shape.out_bias && shard.adds_once() },
    )?;
    let qk_norm = match shape.qk_norm {
        true => Some(QkNorm {
            query: loader.vector(&names.inside("self_attn.q_norm.weight"), dim)?,
            key: loader.vector(&names.inside("self_attn.k_norm.weight"), dim)?,
            eps: spec.norm_eps,
        }),
        false => None,
    };
    let attention = AttentionSpec {
        head_dim: dim,
        queries_of: heads.queries_of,
        scale: 1.0 / (dim as f32).sqrt(),
        window: shape.window,
        qk_norm,
        rope: shape.rope,
        temperature: shape.temperature,
        out_column,
    };
    Ok((attention, qkv, out))
}

fn gated_mlp<'a>(
    spec: &ModelSpec,
    gated: &GatedShape,
    shard: Shard<'_>,
    loader: &Loader<'a>,
    names: &Names,
) -> Result<(Vec<MatrixSource<'a>>, MatrixSource<'a>), ModelError> {
    let mine = shard.channels(gated.channels, channel_unit(loader, names)?);
    let part = |name: &str| {
        let window = Window { rows: mine.clone(), cols: 0..spec.hidden, bias: gated.bias };
        loader.matrix(&names.inside(name), [gated.channels, spec.hidden], &window)
    };
    let gate_up = vec![part("mlp.gate_proj")?, part("mlp.up_proj")?];
    let down = loader.matrix(
        &names.inside("mlp.down_proj"),
        [spec.hidden, gated.channels],
        &Window { rows: 0..spec.hidden, cols: mine.clone(), bias: gated.bias && shard.adds_once() },
    )?;
    Ok((gate_up, down))
}

/// Makes buffers that layers of the same width share.
struct Inner<B: Backend> {
    rows: usize,
    buffers: Vec<B::Buffer>,
    /// Role and width of each buffer.
    keys: Vec<(&'static str, usize)>,
}

impl<B: Backend> Inner<B> {
    fn get(&mut self, backend: &mut B, role: &'static str, width: usize) -> Result<usize, ModelError> {
        if let Some(found) = self.keys.iter().position(|key| *key == (role, width)) {
            return Ok(found);
        }
        self.keys.push((role, width));
        self.buffers.push(backend.buffer(self.rows, width)?);
        Ok(self.keys.len() - 1)
    }
}

/// How large a loaded model's buffers are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Capacity {
    /// Rows of a step.
    pub rows: usize,
    /// Rows of a step that want logits.
    pub logit_rows: usize,
    /// Blocks of the KV cache.
    pub kv_blocks: usize,
    /// How keys and values are kept.
    pub kv_format: KvFormat,
}

impl<B: Backend> Model<B> {
    /// Loads the part of `rank`: reads its byte ranges, packs them for the backend.
    ///
    /// # Errors
    /// When a tensor is missing or malformed, or memory runs out.
    pub fn load(
        folder: &ModelFolder,
        plan: &ShardPlan,
        rank: usize,
        capacity: Capacity,
        backend: &mut B,
        progress: Progress<'_>,
    ) -> Result<Self, ModelError> {
        let shard = plan.shard(rank);
        let spec = &folder.spec;
        let sources = Sources::describe(folder, shard, Some(&folder.weights))?;
        let kv = backend.kv_cache(sources.kv_shape(capacity.kv_format, capacity.kv_blocks))?;
        let (total, mut done) = (sources.bytes(), 0);
        let mut pack = |backend: &mut B, parts: &[MatrixSource<'_>]| -> Result<B::Matrix, ModelError> {
            let matrix = backend.matrix(parts)?;
            done += parts.iter().map(|part| part.bytes() as u64).sum::<u64>();
            match progress(done, total) {
                ControlFlow::Continue(()) => Ok(matrix),
                ControlFlow::Break(()) => Err(ModelError::Stopped),
            }
        };
        let embedding = match sources.embedding {
            Some((source, rows)) => Some(Vocabulary { matrix: pack(backend, &[source])?, rows }),
            None => None,
        };
        let mut inner = Inner { rows: capacity.rows, buffers: Vec::new(), keys: Vec::new() };
        let mut layers = Vec::with_capacity(sources.layers.len());
        for source in sources.layers {
            let LayerSources { norms, attention, qkv, out, gate_up, down } = source;
            let attention = Box::new(Attention {
                qkv_buffer: inner.get(backend, "qkv", attention.qkv_width())?,
                heads_buffer: inner.get(backend, "heads", out.cols)?,
                qkv: pack(backend, &qkv)?,
                out: pack(backend, &[out])?,
                spec: upload(attention, backend),
            });
            let feed_forward = FeedForward::Gated {
                channels_buffer: inner.get(backend, "channels", down.cols)?,
                gate_up: pack(backend, &gate_up)?,
                down: pack(backend, &[down])?,
            };
            let norms = norms.map(|norm| backend.vector(&norm));
            layers.push(Layer {
                norms,
                eps: spec.norm_eps,
                mixer: Mixer::Attention(attention),
                feed_forward,
            });
        }
        let head = match sources.head {
            Some(head) => Some(Head {
                norm: backend.vector(&head.norm),
                eps: spec.norm_eps,
                matrix: head.matrix.map(|source| pack(backend, &[source])).transpose()?,
                rows: head.rows,
            }),
            None => None,
        };
        let (rows, last_rows) = (capacity.rows, capacity.logit_rows.min(capacity.rows));
        let vocab = head.as_ref().map_or(0, |head| head.rows.len());
        let buffers = Buffers {
            residual: backend.buffer(rows, spec.hidden)?,
            last: backend.buffer(last_rows, spec.hidden)?,
            logits: backend.buffer(last_rows, vocab)?,
            largest: Vec::with_capacity(last_rows),
            inner: inner.buffers,
        };
        Ok(Self { ropes: spec.ropes.clone(), embedding, layers, head, kv, buffers })
    }
}

fn upload<B: Backend>(spec: AttentionSpec<Vec<f32>>, backend: &mut B) -> AttentionSpec<B::Vector> {
    AttentionSpec {
        head_dim: spec.head_dim,
        queries_of: spec.queries_of,
        scale: spec.scale,
        window: spec.window,
        qk_norm: spec.qk_norm.map(|norm| QkNorm {
            query: backend.vector(&norm.query),
            key: backend.vector(&norm.key),
            eps: norm.eps,
        }),
        rope: spec.rope,
        temperature: spec.temperature,
        out_column: spec.out_column,
    }
}
