//! Sums of 16-bit floats that travel as partial sums in `f32`.

use half::{bf16, f16};

use super::portable::{ACC_BLOCK, ReduceType};
use super::reduce;
use crate::{DType, Op};

/// Bytes per element of a partial sum.
pub(crate) fn accumulated_size(dtype: DType) -> usize {
    if matches!(dtype, DType::F16 | DType::BF16) { size_of::<f32>() } else { dtype.size() }
}

/// Adds `own`, elements of a 16-bit float type, to `partial` sums in `f32`. Writes the sums to
/// `out` as `f32`, or without `out` back into `own`, rounded.
///
/// # Safety
/// The pointers must be valid for `count` elements of their types (no alignment needed).
pub(crate) unsafe fn reduce_partial(
    dtype: DType,
    op: Op,
    partial: *const u8,
    own: *mut u8,
    out: Option<*mut u8>,
    count: usize,
) {
    let mut wide = [0f32; ACC_BLOCK];
    let mut done = 0;
    while done < count {
        let n = ACC_BLOCK.min(count - done);
        // SAFETY: `done + n <= count`, for which the caller vouches; `wide` holds a block.
        unsafe {
            let own = own.add(done * dtype.size());
            let sum = wide.as_mut_ptr().cast::<u8>();
            widen(dtype, sum, own, n);
            reduce(DType::F32, op, sum, &[partial.add(done * size_of::<f32>()), sum.cast_const()], n);
            match out {
                Some(out) => {
                    let to = out.add(done * size_of::<f32>());
                    std::ptr::copy_nonoverlapping(sum, to, n * size_of::<f32>());
                }
                None => narrow(dtype, own, sum, n),
            }
        }
        done += n;
    }
}

/// Converts elements of a 16-bit float type to `f32`.
///
/// # Safety
/// `from` must be valid for `count` elements and `to` for `count` `f32` (no alignment needed).
pub(crate) unsafe fn widen(dtype: DType, to: *mut u8, from: *const u8, count: usize) {
    let mut wide = [0f32; ACC_BLOCK];
    let mut done = 0;
    while done < count {
        let n = ACC_BLOCK.min(count - done);
        // SAFETY: `done + n <= count`, for which the caller vouches.
        unsafe {
            let from = from.add(done * dtype.size());
            match dtype {
                DType::F16 => f16::load(from, &mut wide[..n]),
                _ => bf16::load(from, &mut wide[..n]),
            }
            let to = to.add(done * size_of::<f32>());
            std::ptr::copy_nonoverlapping(wide.as_ptr().cast(), to, n * size_of::<f32>());
        }
        done += n;
    }
}

/// Rounds `f32` to elements of a 16-bit float type.
///
/// # Safety
/// `from` must be valid for `count` `f32` and `to` for `count` elements (no alignment needed).
pub(crate) unsafe fn narrow(dtype: DType, to: *mut u8, from: *const u8, count: usize) {
    let mut wide = [0f32; ACC_BLOCK];
    let mut done = 0;
    while done < count {
        let n = ACC_BLOCK.min(count - done);
        // SAFETY: `done + n <= count`, for which the caller vouches; `wide` holds a block.
        unsafe {
            let from = from.add(done * size_of::<f32>());
            std::ptr::copy_nonoverlapping(from, wide.as_mut_ptr().cast(), n * size_of::<f32>());
            let to = to.add(done * dtype.size());
            match dtype {
                DType::F16 => f16::store(&wide[..n], to),
                _ => bf16::store(&wide[..n], to),
            }
        }
        done += n;
    }
}
