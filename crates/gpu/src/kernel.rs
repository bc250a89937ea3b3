//! The kernels: their WGSL, and the buffers that they are bound to.

#[cfg(test)]
mod all;
mod attend;
mod attend_block;
mod attend_latent;
mod attend_latent_matrices;
mod attend_many;
mod attend_matrices;
mod attend_shared;
mod attend_tiles;
mod batch;
mod change;
mod coherent;
mod compress;
mod conv;
mod decode;
mod draw;
mod edit;
mod exchange;
mod heads;
mod keep;
mod levels;
mod matrices;
mod norm;
mod pairs;
mod peak;
mod pieces;
mod product;
mod recurrence;
mod relay;
mod select;
mod tiles;
mod tokens;

pub(crate) use attend::{Attend, COMBINED, MAX_KEY, MAX_VALUE, splits_of};
pub(crate) use attend_latent::{AttendLatent, LATENT_ROWS};
pub(crate) use attend_latent_matrices::AttendLatentMatrices;
pub(crate) use attend_many::{AttendMany, COUNTERS, HEADS, LEAVES, NEIGHBOURS, NORMS, PREPARES, SINKS, UNIT};
pub(crate) use attend_matrices::AttendMatrices;
pub(crate) use attend_shared::{AttendShared, Attended};
pub(crate) use attend_tiles::{ATTENDED_ROWS, AttendTiles};
pub(crate) use batch::Batch;
pub(crate) use change::{CHANGED, Change, MAX_STREAMS, WEIGHED};
pub(crate) use coherent::{Coherent, MetalKernel};
pub(crate) use compress::{Compress, KEPT, MAX_COMPRESSED};
pub(crate) use conv::{CONV_THREADS, Conv, MAX_TAPS};
pub(crate) use draw::{Draw, words_of};
pub(crate) use edit::{EDITED, table_of};
pub(crate) use exchange::{EXCHANGE_THREADS, Exchange, Look};
pub(crate) use matrices::{Matrices, PADDED_COLUMNS, Shape};
pub(crate) use norm::MAX_NORM_BLOCKS;
pub(crate) use peak::{BYTES_OF_ROUND, FLOATS_OF_ROUND, PEAK_THREADS, matrices_of_round};
pub(crate) use pieces::AddPieces;
#[cfg(test)]
pub(crate) use product::Shape as ProductShape;
pub(crate) use product::{
    BATCHES, CHOOSE_OUTPUTS, CHOOSE_ROWS, Choose, FEW_CHOICES, Input, Leaves, Product, Role, Sum,
};
pub(crate) use recurrence::{HeldRecurrence, MAX_KEY_COLUMNS, Recurrence, Rule, STATE_COLUMNS};
pub(crate) use relay::{RELAY_UNNUMBERED, RELAY_WORDS, Relay};
pub(crate) use select::{BLOCKS_OF_GROUP, KEYS_OF_GROUP, MAX_INDEX, MAX_LISTED, SCORED, Select};

pub(crate) use tiles::{TILE_LINES, Tiles};

use crate::format::Format;
use crate::peak::GpuArithmetic;
use crate::spirv::with_bytes;
use crate::without::{Way, without};
use keep::{append, prepare, prepare_append, prepare_latent};
use levels::{Leaving, quantize};
pub(crate) use tokens::TokenSearch;
use tokens::next_tokens;

/// Maximum routed experts of a layer, which kernels have space for.
pub(crate) const MAX_EXPERTS: usize = 1024;

/// The order of numbers of which kernels look for the largest.
const KEY: &str = include_str!("kernel/key.wgsl");

/// The cap of outputs of which tokens are chosen.
const LIMIT: &str = include_str!("kernel/limit.wgsl");

/// The check word of a vector that the host reads.
const CHECK: &str = include_str!("kernel/check.wgsl");

/// The order of a router's experts.
const RANK: &str = include_str!("kernel/rank.wgsl");

/// Whether a kernel writes a buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Access {
    Read,
    Write,
}

/// A kernel in one compiled form.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Kernel {
    Embed(Format),
    /// With `levels`, the norm also stores levels.
    Norm {
        levels: bool,
    },
    SquareSums,
    NormBySums,
    /// Rounds rows to bytes, or to pairs of bytes.
    Quantize {
        pairs: bool,
    },
    Add,
    TakeRows,
    Gate,
    Largest,
    /// Chooses a row's token.
    Draw(Draw),
    /// Changes rows before tokens are chosen.
    Edit,
    /// How likely the chosen tokens are, and the likeliest ones.
    Likely,
    Product(Product),
    /// A product of several generated tokens' rows by matrices of bytes.
    Batch(Batch),
    /// A norm, its product with a router's matrix, and the choice of experts.
    Choose(Choose),
    /// A product of prompts' rows.
    Tiles(Tiles),
    /// A product of prompts' rows by cooperative matrices.
    Matrices(Matrices),
    Halve,
    Prepare,
    Append {
        int8: bool,
    },
    /// Prepares queries and keys, and appends keys and values to the cache.
    PrepareAppend {
        int8: bool,
    },
    /// Prepares queries and compressed vectors, and appends these to the cache.
    PrepareLatent {
        int8: bool,
    },
    Attend(Attend),
    /// Attention of generated tokens, for all heads of a KV head at once.
    AttendMany(AttendMany),
    /// Attention of prompts' rows.
    AttendTiles(AttendTiles),
    /// Attention of prompts' rows by cooperative matrices.
    AttendMatrices(AttendMatrices),
    /// Attention of prompts' rows to compressed vectors.
    AttendLatent(AttendLatent),
    /// The same by cooperative matrices.
    AttendLatentMatrices(AttendLatentMatrices),
    /// Attention of all query heads of a row to compressed vectors.
    AttendShared(AttendShared),
    /// Adds splits of attention; can also store levels of the sums.
    Combine {
        levels: bool,
    },
    Route,
    /// The weights of experts that are given.
    RouteAssigned,
    /// Sorts pairs of rows and experts by expert, and sums the pairs' results.
    SortPairs,
    AddPairs,
    /// Short convolutions.
    Conv(Conv),
    /// Recurrences whose state is a matrix for each head.
    Recurrence(Recurrence),
    /// The same, of sequences without drafts. The state stays in registers.
    HeldRecurrence(HeldRecurrence),
    /// Keeps what recurrences read of a draft's rows.
    KeepDrafts,
    NormGated,
    CopyColumns,
    /// Multiplies columns of rows with a factor for each row.
    Scale,
    /// Weighs the input of each row's only expert.
    WeighInput,
    /// A curve of each number, in place.
    Bend,
    /// Selects tokens, and attends to selected ones.
    Select(Select),
    /// Changes rows.
    Change(Change),
    /// Compresses tokens.
    Compress(Compress),
    /// The tokens of the next step.
    NextTokens,
    /// Each row's largest number, for the other ranks.
    ShareLargest,
    /// Results that the host reads while the device goes on.
    Report,
    /// Reads a buffer, to measure the memory bandwidth.
    ReadAll,
    /// Only multiplies and adds, to measure the arithmetic rate.
    PeakFloats,
    /// The same with dot products of bytes.
    PeakBytes,
    /// The same with cooperative matrices of this side.
    PeakMatrices {
        side: usize,
    },
    /// A sum over ranks, with the host.
    Exchange(Exchange),
    /// A sum over ranks in three kernels.
    Coherent(Coherent),
    /// A sum over ranks for which hosts relay partial sums.
    Relay(Relay),
    /// A part of a large sum over ranks of one host.
    AddPieces(AddPieces),
    /// Stores rows in memory of the host, or takes them from there.
    HostRows {
        takes: bool,
    },
}

impl Kernel {
    /// The buffers at bindings 0, 1, …
    pub fn bindings(&self) -> Vec<Access> {
        use Access::{Read, Write};
        match self {
            Self::Embed(format) => {
                let mut all = vec![Read; decode::buffers(*format) + 1];
                all.push(Write);
                all
            }
            Self::Product(product) => product.bindings(),
            Self::Batch(batch) => batch.bindings(),
            Self::Choose(choose) => choose.bindings(),
            Self::Tiles(tiles) => tiles.bindings(),
            Self::Matrices(matrices) => matrices.bindings(),
            Self::Attend(attend) => attend.bindings(),
            Self::AttendMany(many) => many.bindings(),
            Self::AttendTiles(tiles) => tiles.bindings(),
            Self::AttendMatrices(matrices) => matrices.bindings(),
            Self::AttendLatent(latent) => latent.bindings(),
            Self::AttendLatentMatrices(latent) => latent.bindings(),
            Self::AttendShared(shared) => shared.bindings(),
            Self::PrepareLatent { int8 } => {
                let mut all = vec![Read, Read, Read, Write, Read];
                all.extend(vec![Write; if *int8 { 4 } else { 2 }]);
                all
            }
            Self::PrepareAppend { int8 } => {
                let mut all = vec![Read; 4];
                all.extend(vec![Write; if *int8 { 5 } else { 3 }]);
                all
            }
            Self::Exchange(exchange) => exchange.bindings(),
            Self::Coherent(step) => step.bindings(),
            Self::Relay(relay) => relay.bindings(),
            Self::AddPieces(form) => form.bindings(),
            Self::HostRows { takes: false } => vec![Read, Write],
            Self::HostRows { takes: true } => vec![Write; 2],
            Self::Draw(_) => vec![Read, Read, Read, Write],
            Self::Report => vec![Read, Read, Write],
            Self::Select(select) => select.bindings(),
            Self::Change(change) => change.bindings(),
            Self::Compress(compress) => compress.bindings(),
            Self::AddPairs => vec![Read, Read, Read, Write],
            Self::SortPairs => vec![Read, Read, Write],
            Self::Norm { levels: false }
            | Self::NormBySums
            | Self::TakeRows
            | Self::Route
            | Self::RouteAssigned
            | Self::NormGated
            | Self::KeepDrafts => {
                vec![Read, Read, Write]
            }
            Self::Norm { levels: true } => vec![Read, Read, Write, Write, Write],
            Self::Quantize { .. } => vec![Read, Read, Write, Write, Write],
            Self::Conv(conv) => conv.bindings(),
            Self::WeighInput => vec![Write, Write],
            Self::Bend | Self::PeakFloats | Self::PeakBytes | Self::PeakMatrices { .. } => vec![Write],
            Self::Halve => vec![Read, Read, Write, Write],
            Self::Add
            | Self::CopyColumns
            | Self::Edit
            | Self::Scale
            | Self::Gate
            | Self::Largest
            | Self::Likely
            | Self::NextTokens
            | Self::ShareLargest
            | Self::ReadAll
            | Self::SquareSums => {
                vec![Read, Write]
            }
            Self::Prepare | Self::Combine { levels: false } => vec![Read, Read, Read, Write],
            Self::Combine { levels: true } => vec![Read, Read, Read, Write, Write, Write],
            Self::Append { int8: false } => vec![Read, Read, Write],
            Self::Append { int8: true } => vec![Read, Read, Write, Write],
            Self::Recurrence(form) => form.bindings(),
            Self::HeldRecurrence(form) => form.bindings(),
        }
    }

    /// The WGSL text.
    pub fn source(&self) -> String {
        match self {
            Self::Embed(format) => embed(*format),
            Self::Norm { levels } => norm::source(*levels),
            Self::SquareSums => include_str!("kernel/square_sums.wgsl").to_owned(),
            Self::NormBySums => include_str!("kernel/norm_by_sums.wgsl").to_owned(),
            Self::Quantize { pairs } => quantize(*pairs),
            Self::Add => include_str!("kernel/add.wgsl").to_owned(),
            Self::TakeRows => include_str!("kernel/take_rows.wgsl").to_owned(),
            Self::Gate => include_str!("kernel/gate.wgsl").replace("$ACTIVATE", product::ACTIVATE),
            Self::Largest => include_str!("kernel/largest.wgsl").replace("$KEY", KEY),
            Self::NextTokens => next_tokens(include_str!("kernel/take_token.wgsl")),
            Self::ShareLargest => next_tokens(include_str!("kernel/share_largest.wgsl")),
            Self::Report => include_str!("kernel/report.wgsl").replace("$CHECK", CHECK),
            Self::Draw(draw) => draw.source(),
            Self::Edit => edit::source(),
            Self::Likely => include_str!("kernel/likely.wgsl").replace("$KEY", KEY).replace("$LIMIT", LIMIT),
            Self::Product(product) => product.source(),
            Self::Batch(batch) => batch.source(),
            Self::Choose(choose) => choose.source(),
            Self::Tiles(tiles) => tiles.source(),
            Self::Matrices(matrices) => matrices.source(),
            Self::Halve => include_str!("kernel/halve.wgsl").to_owned(),
            Self::Prepare => prepare(),
            Self::Append { int8 } => append(*int8),
            Self::PrepareAppend { int8 } => prepare_append(*int8),
            Self::PrepareLatent { int8 } => prepare_latent(*int8),
            Self::Attend(attend) => attend.source(),
            Self::AttendMany(many) => many.source(),
            Self::AttendTiles(tiles) => tiles.source(),
            Self::AttendMatrices(matrices) => matrices.source(),
            Self::AttendLatent(latent) => latent.source(),
            Self::AttendLatentMatrices(latent) => latent.source(),
            Self::AttendShared(shared) => shared.source(),
            Self::Combine { levels } => attend::combine(*levels),
            Self::Exchange(exchange) => exchange.source(),
            Self::Coherent(step) => step.source(),
            Self::Relay(relay) => relay.source(),
            Self::AddPieces(form) => form.source(),
            Self::HostRows { takes } => host_rows(*takes),
            Self::Select(select) => select.source(),
            Self::Change(change) => change.source(),
            Self::Compress(compress) => compress.source(),
            Self::Route => include_str!("kernel/route.wgsl")
                .replace("$RANK", RANK)
                .replace("$ROUTE", &route_row(MAX_EXPERTS)),
            Self::RouteAssigned => {
                include_str!("kernel/route_assigned.wgsl").replace("$ROUTE", &route_row(MAX_EXPERTS))
            }
            Self::SortPairs => {
                include_str!("kernel/sort_pairs.wgsl").replace("$EXPERTS", &(MAX_EXPERTS + 1).to_string())
            }
            Self::AddPairs => include_str!("kernel/add_pairs.wgsl").to_owned(),
            Self::Conv(conv) => conv.source(),
            Self::KeepDrafts => include_str!("kernel/keep_drafts.wgsl").to_owned(),
            Self::Recurrence(form) => form.source(),
            Self::HeldRecurrence(form) => form.source(),
            Self::NormGated => include_str!("kernel/norm_gated.wgsl").to_owned(),
            Self::CopyColumns => include_str!("kernel/copy_columns.wgsl").to_owned(),
            Self::Scale => include_str!("kernel/scale.wgsl").to_owned(),
            Self::WeighInput => include_str!("kernel/weigh_input.wgsl").to_owned(),
            Self::Bend => include_str!("kernel/bend.wgsl").replace("$GELU", include_str!("kernel/gelu.wgsl")),
            Self::ReadAll => include_str!("kernel/read_all.wgsl").to_owned(),
            Self::PeakFloats => peak::floats(),
            Self::PeakBytes => peak::bytes(),
            Self::PeakMatrices { side } => peak::matrices(*side),
        }
    }

    /// What the kernel multiplies and adds with.
    pub fn arithmetic(&self) -> GpuArithmetic {
        match self {
            Self::Matrices(_)
            | Self::AttendMatrices(_)
            | Self::AttendLatentMatrices(_)
            | Self::PeakMatrices { .. } => GpuArithmetic::Matrices,
            Self::Product(product) if product.input.has_levels() => GpuArithmetic::Bytes,
            Self::Batch(_) | Self::PeakBytes => GpuArithmetic::Bytes,
            _ => GpuArithmetic::Floats,
        }
    }

    /// The kernel in Metal's own language, if it is not translated to it.
    pub fn metal(&self) -> Option<MetalKernel> {
        if let Self::Coherent(step) = self { Some(step.metal()) } else { None }
    }

    /// The kernel in SPIR-V, if it needs more than WGSL can say.
    pub fn spirv(&self, text: &str) -> Option<Result<Vec<u32>, String>> {
        matches!(self, Self::Batch(_)).then(|| with_bytes(text))
    }

    /// Whether the kernel is compiled without bounds checks, because its text stays within the
    /// buffer sizes that its arguments give. Those in SPIR-V always are.
    pub fn is_unchecked(&self) -> bool {
        let gains = match self {
            Self::Matrices(form) => form.tile().side == 16,
            Self::AttendMatrices(_) | Self::AttendLatentMatrices(_) => true,
            _ => false,
        };
        gains && !without(Way::Unchecked)
    }
}

fn embed(format: Format) -> String {
    let buffers = decode::buffers(format);
    let mut store = decode::load(format, "w", "block");
    for quad in 0..8 {
        let value = decode::quad(format, "w", quad);
        let value = if format.has_scales() {
            let group = decode::group(format, "block", quad / 4);
            format!("fma(vec4<f32>(scale_of({group}).x), {value}, vec4<f32>(scale_of({group}).y))")
        } else {
            value
        };
        store += &format!("store(at, b * 32u + {}u, {value});\n", 4 * quad);
    }
    include_str!("kernel/embed.wgsl")
        .replace("$IDS", &buffers.to_string())
        .replace("$OUT", &(buffers + 1).to_string())
        .replace("$DECLARE", &decode::declare(format, 0))
        .replace("$STORE", &store)
}

fn host_rows(takes: bool) -> String {
    let (access, copy) = match takes {
        false => ("read", "if (column < args.width) { host[there] = x[args.first + i]; }"),
        true => (
            "read_write",
            "var value = 0.0;
        if (column < args.width) { value = host[there]; }
        x[args.first + i] = value;",
        ),
    };
    include_str!("kernel/host_rows.wgsl").replace("$ACCESS", access).replace("$COPY", copy)
}

/// Chooses a row's experts, with space for this many.
fn route_row(experts: usize) -> String {
    include_str!("kernel/route_row.wgsl")
        .replace("$EXPERTS", &experts.to_string())
        .replace("$QUADS", &(experts / 4).to_string())
}
