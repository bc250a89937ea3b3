//! The element types that a group can move and reduce.

use half::{bf16, f16};

mod sealed {
    pub trait Sealed {}
}

/// The type of an element, as it is named on the wire.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u8)]
#[allow(missing_docs)]
pub enum DType {
    F32 = 1,
    F64,
    F16,
    BF16,
    I8,
    I16,
    I32,
    I64,
    U8,
    U16,
    U32,
    U64,
    Bool,
}

impl DType {
    /// Bytes of one element.
    pub const fn size(self) -> usize {
        match self {
            Self::I8 | Self::U8 | Self::Bool => 1,
            Self::F16 | Self::BF16 | Self::I16 | Self::U16 => 2,
            Self::F32 | Self::I32 | Self::U32 => 4,
            Self::F64 | Self::I64 | Self::U64 => 8,
        }
    }

    /// True for types whose sums are rounded, so that the order of a reduction shows. It shows in
    /// maxima and minima too, as 0 and -0 are equal.
    pub(crate) fn is_float(self) -> bool {
        matches!(self, Self::F32 | Self::F64 | Self::F16 | Self::BF16)
    }

    pub(crate) fn from_wire(value: u8) -> Option<Self> {
        const ALL: [DType; 13] = [
            DType::F32,
            DType::F64,
            DType::F16,
            DType::BF16,
            DType::I8,
            DType::I16,
            DType::I32,
            DType::I64,
            DType::U8,
            DType::U16,
            DType::U32,
            DType::U64,
            DType::Bool,
        ];
        ALL.into_iter().find(|dtype| *dtype as u8 == value)
    }
}

/// What a reduction does with the ranks' elements. They are taken in rank order, so the result has
/// the same bits on every rank and in every run. Integers wrap. `f16` and `bf16` accumulate in
/// `f32`. For booleans, `Sum` and `Max` are "or", `Prod` and `Min` are "and". If one float is NaN,
/// `Max` and `Min` take the other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[repr(u8)]
#[allow(missing_docs)]
pub enum Op {
    #[default]
    Sum = 1,
    Prod,
    Max,
    Min,
}

/// A type that a group can move and reduce.
pub trait Element:
    Copy + Send + Sync + Default + PartialEq + std::fmt::Debug + sealed::Sealed + 'static
{
    /// The type's name on the wire.
    const DTYPE: DType;
}

macro_rules! elements {
    ($($type:ty => $dtype:ident),* $(,)?) => {$(
        impl sealed::Sealed for $type {}
        impl Element for $type {
            const DTYPE: DType = DType::$dtype;
        }
        const _: () = assert!(size_of::<$type>() == DType::$dtype.size());
    )*};
}

elements! {
    f32 => F32, f64 => F64, f16 => F16, bf16 => BF16, i8 => I8, i16 => I16, i32 => I32, i64 => I64,
    u8 => U8, u16 => U16, u32 => U32, u64 => U64, bool => Bool,
}

/// The bytes of a slice of elements.
pub(crate) fn bytes_of<T: Element>(elements: &[T]) -> &[u8] {
    // SAFETY: `Element` is sealed to plain types without padding, so every byte is initialised.
    unsafe { std::slice::from_raw_parts(elements.as_ptr().cast(), size_of_val(elements)) }
}

/// The start and the length in bytes of a slice that will be filled from the wire. A raw pointer,
/// because the bytes of a `bool` are checked only after they have arrived.
pub(crate) fn raw_bytes_of<T: Element>(elements: &mut [T]) -> (*mut u8, usize) {
    (elements.as_mut_ptr().cast(), size_of_val(elements))
}

/// Makes booleans from the wire, which may be any byte, 0 or 1 before they are used as `bool`. Does
/// nothing for other types.
///
/// # Safety
/// `pointer` must be valid for `bytes` bytes.
pub(crate) unsafe fn make_valid(dtype: DType, pointer: *mut u8, bytes: usize) {
    if dtype != DType::Bool {
        return;
    }
    for index in 0..bytes {
        // SAFETY: within the bytes that the caller vouches for.
        unsafe {
            let byte = pointer.add(index);
            *byte = u8::from(*byte != 0);
        }
    }
}
