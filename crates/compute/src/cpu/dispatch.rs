//! Macros that turn a choice made at run time (instruction set, bits, rows) into a call of a
//! generic kernel.

/// Writes an entry point: a function that takes an `Isa` first and calls a generic kernel inside a
/// `#[target_feature]` function of that instruction set. Entry points stand next to their kernels;
/// their names end in `_on`.
macro_rules! entry {
    ($(#[$doc:meta])* $vis:vis fn $name:ident($($arg:ident: $ty:ty),* $(,)?) = $generic:ident) => {
        $(#[$doc])*
        ///
        /// # Safety
        /// `isa` was detected on this CPU, and the kernel's own conditions hold.
        $vis unsafe fn $name(isa: $crate::cpu::isa::Isa, $($arg: $ty),*) {
            #[cfg(target_arch = "x86_64")]
            use $crate::cpu::simd::{avx2::Avx2, avx512::Avx512};
            #[cfg(target_arch = "aarch64")]
            use $crate::cpu::simd::neon::Neon;
            use $crate::cpu::{isa::Isa, simd::portable::Portable};

            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
            unsafe fn avx512($($arg: $ty),*) {
                // SAFETY: the caller's conditions.
                unsafe { $generic::<Avx512>($($arg),*) }
            }
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma,f16c")]
            unsafe fn avx2($($arg: $ty),*) {
                // SAFETY: the caller's conditions.
                unsafe { $generic::<Avx2<false>>($($arg),*) }
            }
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma,f16c,avxvnni")]
            unsafe fn avxvnni($($arg: $ty),*) {
                // SAFETY: the caller's conditions.
                unsafe { $generic::<Avx2<true>>($($arg),*) }
            }
            #[cfg(target_arch = "aarch64")]
            #[target_feature(enable = "neon,dotprod")]
            unsafe fn neon($($arg: $ty),*) {
                // SAFETY: the caller's conditions.
                unsafe { $generic::<Neon<false>>($($arg),*) }
            }
            #[cfg(target_arch = "aarch64")]
            #[target_feature(enable = "neon,dotprod,i8mm")]
            unsafe fn i8mm($($arg: $ty),*) {
                // SAFETY: the caller's conditions.
                unsafe { $generic::<Neon<true>>($($arg),*) }
            }
            // SAFETY: the caller's conditions.
            unsafe {
                match isa {
                    #[cfg(target_arch = "x86_64")]
                    Isa::Avx512 | Isa::Avx512Bf16 | Isa::Amx => avx512($($arg),*),
                    #[cfg(target_arch = "x86_64")]
                    Isa::Avx2 => avx2($($arg),*),
                    #[cfg(target_arch = "x86_64")]
                    Isa::AvxVnni => avxvnni($($arg),*),
                    #[cfg(target_arch = "aarch64")]
                    Isa::Neon => neon($($arg),*),
                    #[cfg(target_arch = "aarch64")]
                    Isa::NeonI8mm => i8mm($($arg),*),
                    Isa::Portable => $generic::<Portable>($($arg),*),
                }
            }
        }
    };
}
pub(super) use entry;

/// Calls a kernel for weights of `$bits` bits, which may be [`E2M1`] or [`IQ4`]; the bits are the
/// last of its generic parameters.
///
/// [`E2M1`]: crate::cpu::layout::matrix::E2M1
/// [`IQ4`]: crate::cpu::layout::matrix::IQ4
macro_rules! of_bits {
    ($bits:expr, [$($kernel:ident)::+], [$($generic:tt),*], ($($argument:expr),*)) => {
        match $bits {
            $crate::cpu::layout::matrix::E2M1 => {
                $($kernel)::+::<$($generic,)* { $crate::cpu::layout::matrix::E2M1 }>($($argument),*)
            }
            $crate::cpu::layout::matrix::IQ4 => {
                $($kernel)::+::<$($generic,)* { $crate::cpu::layout::matrix::IQ4 }>($($argument),*)
            }
            bits => $crate::cpu::dispatch::of_file_bits!(
                bits, [$($kernel)::+], [$($generic),*], ($($argument),*)
            ),
        }
    };
}
pub(super) use of_bits;

/// [`of_bits!`] for levels as files store them.
macro_rules! of_file_bits {
    ($bits:expr, [$($kernel:ident)::+], [$($generic:tt),*], ($($argument:expr),*)) => {
        match $bits {
            2 => $($kernel)::+::<$($generic,)* 2>($($argument),*),
            3 => $($kernel)::+::<$($generic,)* 3>($($argument),*),
            4 => $($kernel)::+::<$($generic,)* 4>($($argument),*),
            5 => $($kernel)::+::<$($generic,)* 5>($($argument),*),
            6 => $($kernel)::+::<$($generic,)* 6>($($argument),*),
            8 => $($kernel)::+::<$($generic,)* 8>($($argument),*),
            bits => unreachable!("no kernel multiplies {bits}-bit levels"),
        }
    };
}
pub(super) use of_file_bits;

/// Calls a kernel for blocks of four rows and then for single rows; the count is the last of its
/// generic parameters.
macro_rules! in_fours {
    ($rows:expr, $row:ident, $kernel:ident, [$($generic:tt),*], ($($argument:expr),*)) => {
        let mut $row = $rows.start;
        while $row + 4 <= $rows.end {
            $kernel::<$($generic,)* 4>($($argument),*);
            $row += 4;
        }
        while $row < $rows.end {
            $kernel::<$($generic,)* 1>($($argument),*);
            $row += 1;
        }
    };
}
pub(super) use in_fours;
