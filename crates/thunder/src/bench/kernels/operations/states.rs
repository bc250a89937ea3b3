//! Recurrences and convolutions, whose state has a fixed size.

use thunder_compute::cpu::measure::arithmetic::Arithmetic;
use thunder_compute::{
    Activations, Backend, CacheKind, CacheShape, ComputeError, Decays, DeltaSpec, GatedConvSpec, HeadSharing,
    Isa, KvFormat, Norm, StateSpaceSpec,
};

use super::data::{Changed, SEQUENCES, Steps, filled, numbers, sequences_of};
use super::{How, Subject, Work};

/// With the sequences, the states of a delta rule have 536 MiB.
const LAYERS: usize = 16;
const FLOAT: usize = size_of::<f32>();

/// What is measured of a delta rule.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Part {
    /// The rule.
    Rule,
    /// The convolution before it.
    Conv,
}

fn states<B: Backend>(cache: CacheKind, backend: &mut B) -> Result<B::Caches, ComputeError> {
    let caches = vec![cache; LAYERS];
    backend.caches(&CacheShape { format: KvFormat::F16, caches, blocks: 1, slots: SEQUENCES })
}

/// A subject whose states have been used once, so that no run is the first that touches them.
fn used<B: Backend, S: Subject<B>>(mut subject: S, backend: &mut B) -> Result<S, ComputeError> {
    subject.begin(backend, (Isa::Portable, Activations::F32), SEQUENCES)?;
    (0..LAYERS).try_for_each(|_| subject.run(backend, SEQUENCES))?;
    Ok(subject)
}

/// The delta rule of Qwen3-Next 80B and Qwen3.5 35B, with states that are used in turn.
pub struct Delta<B: Backend> {
    part: Part,
    spec: DeltaSpec<B::Vector>,
    caches: B::Caches,
    steps: Steps,
    qkv: Changed<B>,
    gates: B::Buffer,
    out: B::Buffer,
}

impl<B: Backend> Delta<B> {
    pub fn new(part: Part, backend: &mut B) -> Result<Self, ComputeError> {
        let (key_heads, value_heads, dim, kernel) = (16, 32, 128, 4);
        let channels = (2 * key_heads + value_heads) * dim;
        let spec = DeltaSpec {
            key_heads,
            value_heads,
            sharing: HeadSharing::Grouped,
            key_dim: dim,
            value_dim: dim,
            kernel,
            taps: backend.vector(&numbers(channels * kernel))?,
            unit_eps: 1e-6,
            decays: Decays::Softplus,
            decay: backend.vector(&numbers(value_heads))?,
            decay_bias: backend.vector(&numbers(value_heads))?,
            norm: Norm { weight: backend.vector(&vec![1.0; dim])?, eps: 1e-6 },
        };
        let new = Self {
            part,
            caches: states(spec.cache(), backend)?,
            steps: Steps::new(LAYERS, None),
            qkv: Changed::new(1, channels, backend)?,
            gates: backend.buffer(1, 2 * value_heads)?,
            out: backend.buffer(1, value_heads * dim)?,
            spec,
        };
        used(new, backend)
    }
}

impl<B: Backend> Subject<B> for Delta<B> {
    fn begin(&mut self, backend: &mut B, _: How, rows: usize) -> Result<Work, ComputeError> {
        let (spec, sequences) = (&self.spec, sequences_of(rows));
        let (channels, width) = (spec.channels(), spec.value_heads * spec.value_dim);
        self.qkv = Changed::new(rows, channels, backend)?;
        self.gates = filled(rows, 2 * spec.value_heads, backend)?;
        self.out = backend.buffer(rows, width)?;
        self.steps.restart();
        let matrices = spec.value_heads * spec.key_dim * spec.value_dim;
        // States are read and written.
        let (numbers, operations) = match self.part {
            // `S *= decay`, `Sᵀk`, `S += k ⊗ change` and `Sᵀq`.
            Part::Rule => (2 * sequences * matrices + rows * (channels + width), 7 * rows * matrices),
            Part::Conv => {
                (2 * sequences * spec.conv_numbers() + 2 * rows * channels, 2 * rows * channels * spec.kernel)
            }
        };
        Ok(Work { bytes: FLOAT * numbers, operations, arithmetic: Arithmetic::Floats, counts_floats: true })
    }

    fn run(&mut self, backend: &mut B, rows: usize) -> Result<(), ComputeError> {
        let Self { part, spec, caches, steps, qkv, gates, out } = self;
        let qkv = qkv.next(backend, rows)?;
        let (step, layer) = steps.next(backend, rows)?;
        match part {
            Part::Rule => backend.delta_rule(spec, step, 0..rows, (qkv, gates), (caches, layer), out),
            Part::Conv => backend.short_conv(spec, step, 0..rows, qkv, (caches, layer)),
        }
    }

    fn out(&self) -> &B::Buffer {
        match self.part {
            Part::Rule => &self.out,
            Part::Conv => self.qkv.last(),
        }
    }
}

/// The state space of Nemotron 3 Nano, with states that are used in turn.
pub struct StateSpace<B: Backend> {
    spec: StateSpaceSpec<B::Vector>,
    caches: B::Caches,
    steps: Steps,
    x: Changed<B>,
    times: B::Buffer,
    out: B::Buffer,
}

impl<B: Backend> StateSpace<B> {
    pub fn new(backend: &mut B) -> Result<Self, ComputeError> {
        let (heads, head_dim, groups, state_dim, kernel) = (64, 64, 8, 128, 4);
        let channels = heads * head_dim + 2 * groups * state_dim;
        let spec = StateSpaceSpec {
            heads,
            head_dim,
            groups,
            state_dim,
            kernel,
            taps: backend.vector(&numbers(channels * kernel))?,
            conv_bias: None,
            rate: backend.vector(&numbers(heads))?,
            time_bias: backend.vector(&numbers(heads))?,
            skip: backend.vector(&numbers(heads))?,
            time_limit: (0.0, f32::INFINITY),
        };
        let new = Self {
            caches: states(spec.cache(), backend)?,
            steps: Steps::new(LAYERS, None),
            x: Changed::new(1, channels, backend)?,
            times: backend.buffer(1, heads)?,
            out: backend.buffer(1, heads * head_dim)?,
            spec,
        };
        used(new, backend)
    }
}

impl<B: Backend> Subject<B> for StateSpace<B> {
    fn begin(&mut self, backend: &mut B, _: How, rows: usize) -> Result<Work, ComputeError> {
        let (spec, sequences) = (&self.spec, sequences_of(rows));
        self.x = Changed::new(rows, spec.channels(), backend)?;
        self.times = filled(rows, spec.heads, backend)?;
        self.out = backend.buffer(rows, spec.width())?;
        self.steps.restart();
        let states = spec.conv_numbers() + spec.matrix_numbers();
        // The convolution writes its rows, which the heads read.
        let numbers = 2 * sequences * states + rows * (3 * spec.channels() + spec.width());
        // `S *= decay`, `S += B ⊗ x` and `Sᵀ C`.
        let operations = rows * (5 * spec.matrix_numbers() + 2 * spec.kernel * spec.channels());
        Ok(Work { bytes: FLOAT * numbers, operations, arithmetic: Arithmetic::Floats, counts_floats: true })
    }

    fn run(&mut self, backend: &mut B, rows: usize) -> Result<(), ComputeError> {
        let Self { spec, caches, steps, x, times, out } = self;
        let x = x.next(backend, rows)?;
        let (step, layer) = steps.next(backend, rows)?;
        backend.state_space(spec, step, 0..rows, (x, times), (caches, layer), out)
    }

    fn out(&self) -> &B::Buffer {
        &self.out
    }
}

/// The gated short convolution of LFM2 8B, with states that are used in turn.
pub struct GatedConv<B: Backend> {
    spec: GatedConvSpec<B::Vector>,
    caches: B::Caches,
    steps: Steps,
    x: Changed<B>,
    out: B::Buffer,
}

impl<B: Backend> GatedConv<B> {
    pub fn new(backend: &mut B) -> Result<Self, ComputeError> {
        let (channels, kernel) = (2048, 3);
        let spec = GatedConvSpec { channels, kernel, taps: backend.vector(&numbers(channels * kernel))? };
        let new = Self {
            caches: states(spec.cache(), backend)?,
            steps: Steps::new(LAYERS, None),
            x: Changed::new(1, 3 * channels, backend)?,
            out: backend.buffer(1, channels)?,
            spec,
        };
        used(new, backend)
    }
}

impl<B: Backend> Subject<B> for GatedConv<B> {
    fn begin(&mut self, backend: &mut B, _: How, rows: usize) -> Result<Work, ComputeError> {
        let GatedConvSpec { channels, kernel, .. } = self.spec;
        self.x = Changed::new(rows, 3 * channels, backend)?;
        self.out = backend.buffer(rows, channels)?;
        self.steps.restart();
        // Everything once.
        let numbers = 2 * sequences_of(rows) * (kernel - 1) * channels + 4 * rows * channels;
        // Both gates, and the taps.
        let operations = rows * channels * (2 + 2 * kernel);
        Ok(Work { bytes: FLOAT * numbers, operations, arithmetic: Arithmetic::Floats, counts_floats: true })
    }

    fn run(&mut self, backend: &mut B, rows: usize) -> Result<(), ComputeError> {
        let Self { spec, caches, steps, x, out } = self;
        let x = x.next(backend, rows)?;
        let (step, layer) = steps.next(backend, rows)?;
        backend.gated_conv(spec, step, 0..rows, x, (caches, layer), out)
    }

    fn out(&self) -> &B::Buffer {
        &self.out
    }
}
