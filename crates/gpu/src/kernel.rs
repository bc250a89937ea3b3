//! The kernels: their WGSL, and the buffers that they are bound to.

mod attend;
mod attend_many;
mod attend_matrices;
mod attend_tiles;
mod change;
mod coherent;
mod compress;
mod conv;
mod decode;
mod draw;
mod exchange;
mod matrices;
mod norm;
mod peak;
mod pieces;
mod product;
mod recurrence;
mod relay;
mod select;
mod tiles;

pub(crate) use attend::{Attend, COMBINED, MAX_KEY, MAX_VALUE, splits_of};
pub(crate) use attend_many::{AttendMany, COUNTERS, HEADS, LEAVES, NEIGHBOURS, NORMS, PREPARES, SINKS, UNIT};
pub(crate) use attend_matrices::AttendMatrices;
pub(crate) use attend_tiles::{ATTENDED_ROWS, AttendTiles};
pub(crate) use change::{CHANGED, Change, MAX_STREAMS, WEIGHED};
pub(crate) use coherent::{Coherent, MetalKernel};
pub(crate) use compress::{Compress, KEPT, MAX_COMPRESSED};
pub(crate) use conv::{CONV_THREADS, Conv, MAX_TAPS};
pub(crate) use draw::{Draw, words_of};
pub(crate) use exchange::{EXCHANGE_THREADS, Exchange, Look};
pub(crate) use matrices::{Matrices, PADDED_COLUMNS, Shape};
pub(crate) use norm::MAX_NORM_BLOCKS;
pub(crate) use peak::{FLOATS_OF_ROUND, PEAK_THREADS, matrices_of_round};
pub(crate) use pieces::AddPieces;
#[cfg(test)]
pub(crate) use product::Shape as ProductShape;
pub(crate) use product::{BATCHES, CHOOSE_OUTPUTS, CHOOSE_ROWS, Choose, Input, Leaves, Product, Role, Sum};
pub(crate) use recurrence::{HeldRecurrence, MAX_KEY_COLUMNS, Recurrence, Rule, STATE_COLUMNS};
pub(crate) use relay::{RELAY_WORDS, Relay};
pub(crate) use select::{BLOCKS_OF_GROUP, KEYS_OF_GROUP, MAX_INDEX, MAX_LISTED, SCORED, Select};

pub(crate) use tiles::{TILE_OUTPUTS, TILE_ROWS};

use crate::format::Format;
use crate::without::{Way, without};

/// Maximum routed experts of a layer, which kernels have space for.
pub(crate) const MAX_EXPERTS: usize = 1024;

/// The order of numbers of which kernels look for the largest.
const KEY: &str = include_str!("kernel/key.wgsl");

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
    Product(Product),
    /// A norm, its product with a router's matrix, and the choice of experts.
    Choose(Choose),
    /// A product of prompts' rows.
    Tiles(Format),
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
    Attend(Attend),
    /// Attention of generated tokens, for all heads of a KV head at once.
    AttendMany(AttendMany),
    /// Attention of prompts' rows.
    AttendTiles(AttendTiles),
    /// Attention of prompts' rows by cooperative matrices.
    AttendMatrices(AttendMatrices),
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
    /// Results that the host reads while the device goes on.
    Report,
    /// Reads a buffer, to measure the memory bandwidth.
    ReadAll,
    /// Only multiplies and adds, to measure the arithmetic rate.
    PeakFloats,
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
            Self::Choose(choose) => choose.bindings(),
            Self::Tiles(format) => tiles::bindings(*format),
            Self::Matrices(matrices) => matrices.bindings(),
            Self::Attend(attend) => attend.bindings(),
            Self::AttendMany(many) => many.bindings(),
            Self::AttendTiles(tiles) => tiles.bindings(),
            Self::AttendMatrices(matrices) => matrices.bindings(),
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
            Self::Bend | Self::PeakFloats | Self::PeakMatrices { .. } => vec![Write],
            Self::Halve => vec![Read, Read, Write, Write],
            Self::Add
            | Self::CopyColumns
            | Self::Scale
            | Self::Gate
            | Self::Largest
            | Self::NextTokens
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
            Self::NextTokens => include_str!("kernel/next_tokens.wgsl").replace("$KEY", KEY),
            Self::Report => include_str!("kernel/report.wgsl").replace("$CHECK", CHECK),
            Self::Draw(draw) => draw.source(),
            Self::Product(product) => product.source(),
            Self::Choose(choose) => choose.source(),
            Self::Tiles(format) => tiles::source(*format),
            Self::Matrices(matrices) => matrices.source(),
            Self::Halve => include_str!("kernel/halve.wgsl").to_owned(),
            Self::Prepare => include_str!("kernel/prepare.wgsl").to_owned(),
            Self::Append { int8 } => append(*int8),
            Self::PrepareAppend { int8 } => prepare_append(*int8),
            Self::Attend(attend) => attend.source(),
            Self::AttendMany(many) => many.source(),
            Self::AttendTiles(tiles) => tiles.source(),
            Self::AttendMatrices(matrices) => matrices.source(),
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
            Self::PeakMatrices { side } => peak::matrices(*side),
        }
    }

    /// The kernel in Metal's own language, if it is not translated to it.
    pub fn metal(&self) -> Option<MetalKernel> {
        if let Self::Coherent(step) = self { Some(step.metal()) } else { None }
    }

    /// Whether the kernel is compiled without bounds checks, because its text stays within the
    /// buffer sizes that its arguments give.
    pub fn is_unchecked(&self) -> bool {
        let gains = match self {
            Self::Matrices(form) => form.tile().side == 16,
            Self::AttendMatrices(_) => true,
            _ => false,
        };
        gains && !without(Way::Unchecked)
    }

    /// Every kernel in every form.
    #[cfg(test)]
    pub fn all() -> Vec<Self> {
        let mut all = vec![
            Self::Norm { levels: false },
            Self::Norm { levels: true },
            Self::SquareSums,
            Self::NormBySums,
            Self::Quantize { pairs: false },
            Self::Quantize { pairs: true },
            Self::Halve,
            Self::Add,
            Self::TakeRows,
            Self::Gate,
            Self::Largest,
            Self::NextTokens,
            Self::Report,
            Self::Prepare,
            Self::Append { int8: false },
            Self::Append { int8: true },
            Self::PrepareAppend { int8: false },
            Self::PrepareAppend { int8: true },
            Self::Combine { levels: false },
            Self::Combine { levels: true },
            Self::Route,
            Self::RouteAssigned,
            Self::SortPairs,
            Self::AddPairs,
            Self::KeepDrafts,
            Self::NormGated,
            Self::CopyColumns,
            Self::Scale,
            Self::WeighInput,
            Self::Bend,
            Self::ReadAll,
            Self::PeakFloats,
            Self::PeakMatrices { side: 8 },
            Self::PeakMatrices { side: 16 },
            Self::HostRows { takes: false },
            Self::HostRows { takes: true },
        ];
        all.extend([Draw::NARROW, Draw::WIDE].map(Self::Draw));
        all.extend(AttendMany::all().map(Self::AttendMany));
        all.extend(AttendTiles::all().map(Self::AttendTiles));
        all.extend(AttendMatrices::all().map(Self::AttendMatrices));
        for (latent, int8) in [(false, false), (false, true), (true, false), (true, true)] {
            all.push(Self::Attend(Attend { latent, int8 }));
        }
        all.extend(Conv::all().map(Self::Conv));
        all.extend(Recurrence::all().map(Self::Recurrence));
        all.extend(HeldRecurrence::all().map(Self::HeldRecurrence));
        all.extend(Exchange::all().into_iter().map(Self::Exchange));
        all.extend(Coherent::ALL.map(Self::Coherent));
        all.extend(Relay::all().into_iter().map(Self::Relay));
        all.extend(AddPieces::all().map(Self::AddPieces));
        all.extend(Choose::all().map(Self::Choose));
        all.extend(Select::all().map(Self::Select));
        all.extend(Change::ALL.map(Self::Change));
        all.extend(Compress::ALL.map(Self::Compress));
        for format in Format::all() {
            all.push(Self::Embed(format));
            all.push(Self::Tiles(format));
            for shape in [Shape::Large, Shape::Small, Shape::Eights] {
                for gated in [false, true] {
                    all.push(Self::Matrices(Matrices { format, shape, gated, pairs: false }));
                }
            }
            for gated in [false, true] {
                for shape in [Shape::Small, Shape::Middle] {
                    all.push(Self::Matrices(Matrices { format, shape, gated, pairs: true }));
                }
            }
            for input in [Input::Floats, Input::Bytes, Input::Pairs] {
                if input.has_levels() && !format.has_scales() {
                    continue;
                }
                for sum in [Sum::Shared, Sum::Subgroup] {
                    for batch in input.batches(usize::MAX) {
                        for role in [Role::Plain, Role::Gated] {
                            all.push(Self::Product(Product::new(format, input, role, sum, batch)));
                        }
                    }
                    for role in [Role::ExpertGated, Role::ExpertUp, Role::ExpertDown] {
                        all.push(Self::Product(Product::new(format, input, role, sum, 1)));
                    }
                    let leaving = [
                        (Role::Plain, Leaves::Normed),
                        (Role::Gated, Leaves::Bytes),
                        (Role::Gated, Leaves::Pairs),
                        (Role::ExpertGated, Leaves::Bytes),
                        (Role::ExpertGated, Leaves::Pairs),
                        (Role::ExpertUp, Leaves::Bytes),
                        (Role::ExpertUp, Leaves::Pairs),
                        (Role::ExpertDown, Leaves::Normed),
                    ];
                    for (role, leaves) in leaving.into_iter().filter(|_| input.has_levels()) {
                        let product = Product::new(format, input, role, sum, 1).leaving(leaves);
                        all.extend(product.can_bind().then_some(Self::Product(product)));
                    }
                }
            }
        }
        all
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

fn quantize(pairs: bool) -> String {
    include_str!("kernel/quantize.wgsl").replace("$LEVELS", &store_levels(pairs))
}

/// Results of a workgroup that are also stored as levels.
struct Leaving<'a> {
    /// Levels have 16 bits, otherwise 8.
    pairs: bool,
    /// Number of quads that there is space for.
    quads: usize,
    /// Number of quads that are used, in WGSL.
    used: &'a str,
    /// A quad in WGSL; `None` if it is in the array `left`.
    value: Option<&'a str>,
    /// Blocks of a row, in WGSL.
    row_blocks: &'a str,
    /// Numbers are multiplied with a norm's weights, and the sum of their squares is stored too.
    normed: bool,
}

/// The block of 32 numbers that is in `left`.
impl Default for Leaving<'_> {
    fn default() -> Self {
        Self {
            pairs: false,
            quads: 8,
            used: "LEFT_QUADS",
            value: None,
            row_blocks: "args.x_blocks",
            normed: false,
        }
    }
}

impl Leaving<'_> {
    /// The declaration of a function `leave_levels`.
    fn source(&self) -> String {
        let weigh = "if (has_quad) { left_squares[quad] = square_of(value); }
    value = value * left_norm[first * 8u + quad];";
        let square: String = (1..8)
            .fold("left_squares[quad]".to_owned(), |sum, i| format!("({sum} + left_squares[quad + {i}u])"));
        let square = format!("squares_out[row * args.x_blocks + block] = {square};");
        let squares = "var<workgroup> left_squares: array<f32, LEFT_QUADS>;\n";
        let left = "var<workgroup> left: array<f32, LEFT_QUADS * 4u>;\n";
        let of_left =
            "vec4<f32>(left[4u * quad], left[4u * quad + 1u], left[4u * quad + 2u], left[4u * quad + 3u])";
        let if_normed = |text: &'static str| if self.normed { text } else { "" };
        include_str!("kernel/leave_levels.wgsl")
            .replace("$LEVELS", &store_levels(self.pairs))
            .replace("$LEFT", if self.value.is_none() { left } else { "" })
            .replace("$SQUARES", if_normed(squares))
            .replace("$USED", self.used)
            .replace("$VALUE", self.value.unwrap_or(of_left))
            .replace("$QUADS", &self.quads.to_string())
            .replace("$WEIGH", if_normed(weigh))
            .replace("$SQUARE", if self.normed { &square } else { "" })
            .replace("args.x_blocks", self.row_blocks)
    }
}

/// Stores levels.
fn store_levels(pairs: bool) -> String {
    // A 16-bit level is a signed high byte and a signed low byte, in planes of words as products
    // read them, in quads of half blocks.
    let levels = match pairs {
        false => {
            "const MOST = 127.0;
fn store(row: u32, quad: u32, level: vec4<i32>) {
    levels_out[place(row, quad, 0u, 2u)] = pack4xI8(level);
}"
        }
        true => {
            "const MOST = 32512.0;
fn store(row: u32, quad: u32, level: vec4<i32>) {
    let low = ((level + vec4<i32>(128)) & vec4<i32>(255)) - vec4<i32>(128);
    levels_out[place(row, quad, 0u, 4u)] = pack4xI8((level - low) / vec4<i32>(256));
    levels_out[place(row, quad, 2u, 4u)] = pack4xI8(low);
}"
        }
    };
    let place = "fn place(row: u32, quad: u32, plane: u32, planes: u32) -> u32 {
    let vector = (row * planes + plane + quad / 4u % 2u) * args.x_blocks + quad / 8u;
    return vector * 4u + quad % 4u;
}
// Each step is one rounding, whatever a compiler makes of sums of products.
fn square_of(v: vec4<f32>) -> f32 {
    return fma(v.w, v.w, fma(v.z, v.z, fma(v.y, v.y, v.x * v.x)));
}
";
    format!("{place}{levels}")
}

fn append(int8: bool) -> String {
    let scales = "@group(0) @binding(3) var<storage, read_write> cache_scales: array<f32>;";
    include_str!("kernel/append.wgsl").replace("$SCALES", if int8 { scales } else { "" }).replace(
        "$KEEP",
        &keep(int8, "x[source + ", ["cache[vector * words + i] = word;", "cache_scales[vector] = scale;"]),
    )
}

fn prepare_append(int8: bool) -> String {
    let scales = "@group(0) @binding(7) var<storage, read_write> key_scales: array<f32>;
@group(0) @binding(8) var<storage, read_write> value_scales: array<f32>;";
    let word =
        "if (is_value) { values[vector * words + i] = word; } else { keys[vector * words + i] = word; }";
    let scale = "if (is_value) { value_scales[vector] = scale; } else { key_scales[vector] = scale; }";
    include_str!("kernel/prepare_append.wgsl")
        .replace("$SCALES", if int8 { scales } else { "" })
        .replace("$KEEP", &keep(int8, "head[", [word, scale]))
}

/// Rounds a vector to a cache's format. `value` is an expression for its columns; the statements
/// `keep` store a word and its scale.
fn keep(int8: bool, value: &str, [word, scale]: [&str; 2]) -> String {
    let text = match int8 {
        false => include_str!("kernel/keep_f16.wgsl"),
        true => include_str!("kernel/keep_int8.wgsl"),
    };
    text.replace("$VALUE[", value).replace("$KEEP_WORD", word).replace("$KEEP_SCALE", scale)
}
