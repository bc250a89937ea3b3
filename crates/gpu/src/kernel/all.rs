//! All kernels, for tests.

use super::*;

impl Kernel {
    /// Every kernel in every form.
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
            Self::Edit,
            Self::Likely,
            Self::NextTokens,
            Self::ShareLargest,
            Self::Report,
            Self::Prepare,
            Self::Append { int8: false },
            Self::Append { int8: true },
            Self::PrepareAppend { int8: false },
            Self::PrepareAppend { int8: true },
            Self::PrepareLatent { int8: false },
            Self::PrepareLatent { int8: true },
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
            Self::PeakBytes,
            Self::PeakMatrices { side: 8 },
            Self::PeakMatrices { side: 16 },
            Self::HostRows { takes: false },
            Self::HostRows { takes: true },
        ];
        all.extend([Draw::NARROW, Draw::WIDE].map(Self::Draw));
        all.extend(AttendMany::all().map(Self::AttendMany));
        all.extend(AttendTiles::all().map(Self::AttendTiles));
        all.extend(AttendMatrices::all().map(Self::AttendMatrices));
        all.extend(AttendLatent::all().map(Self::AttendLatent));
        all.extend(AttendLatentMatrices::all().map(Self::AttendLatentMatrices));
        all.extend(AttendShared::all().map(Self::AttendShared));
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
            all.extend(Tiles::all(format).map(Self::Tiles));
            for shape in [Shape::Large, Shape::Small, Shape::Eights] {
                for gated in [false, true] {
                    all.push(Self::Matrices(Matrices { format, shape, gated, pairs: false }));
                }
            }
            for gated in [false, true] {
                for shape in [Shape::Small, Shape::Middle, Shape::Eights] {
                    all.push(Self::Matrices(Matrices { format, shape, gated, pairs: true }));
                }
            }
            for input in
                [Input::Bytes, Input::Pairs].into_iter().filter(|input| Batch::exists(format, *input))
            {
                for gated in [false, true] {
                    all.extend(Batch::all(format, input, gated).map(Self::Batch));
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
                        for role in [Role::ExpertGated, Role::ExpertUp, Role::ExpertDown] {
                            let product = Product::new(format, input, role, sum, batch);
                            let reads =
                                input == Input::Bytes || input == Input::Pairs && role == Role::ExpertDown;
                            let is_used = product.shares_experts() && reads;
                            all.extend(is_used.then_some(Self::Product(product)));
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
