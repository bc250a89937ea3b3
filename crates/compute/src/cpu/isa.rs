//! Instruction sets: which ones this program has kernels for, and which of them this CPU runs.

#[cfg(target_arch = "aarch64")]
use super::simd::neon::Neon;
#[cfg(target_arch = "x86_64")]
use super::simd::{avx2::Avx2, avx512::Avx512};

/// An instruction set that this program has kernels for and this CPU can run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Isa {
    /// Plain Rust.
    Portable,
    /// AVX2 with FMA and F16C.
    #[cfg(target_arch = "x86_64")]
    Avx2,
    /// AVX2 with byte dot products (AVX-VNNI).
    #[cfg(target_arch = "x86_64")]
    AvxVnni,
    /// AVX-512 with VNNI.
    #[cfg(target_arch = "x86_64")]
    Avx512,
    /// AVX-512 with VNNI and bf16 dot products.
    #[cfg(target_arch = "x86_64")]
    Avx512Bf16,
    /// AVX-512 with VNNI and bf16, and AMX tiles of bf16 and int8.
    #[cfg(target_arch = "x86_64")]
    Amx,
    /// NEON with byte dot products.
    #[cfg(target_arch = "aarch64")]
    Neon,
    /// NEON with dot products of unsigned and signed bytes (i8mm).
    #[cfg(target_arch = "aarch64")]
    NeonI8mm,
}

impl Isa {
    /// The environment variable that forces an instruction set.
    pub const VARIABLE: &str = "THUNDER_KERNEL";

    /// The fastest instruction set of this CPU, or the one that `THUNDER_KERNEL` names.
    ///
    /// # Errors
    /// If the variable names an unknown set or one that the CPU lacks; the text lists the available
    /// sets.
    pub fn detect() -> Result<Self, String> {
        let best = Self::available().pop().unwrap_or(Self::Portable);
        match std::env::var(Self::VARIABLE) {
            Err(_) => Ok(best),
            Ok(name) => Self::named(&name).map_err(|error| format!("{}={name}: {error}", Self::VARIABLE)),
        }
    }

    /// The instruction set with this name.
    ///
    /// # Errors
    /// If the name is unknown or the CPU lacks the set; the text lists the available sets.
    pub fn named(name: &str) -> Result<Self, String> {
        let available = Self::available();
        available.iter().copied().find(|isa| isa.name() == name).ok_or_else(|| {
            let names: Vec<_> = available.into_iter().map(Self::name).collect();
            format!("this CPU runs {}", names.join(", "))
        })
    }

    /// All instruction sets that this CPU can run, the fastest last.
    pub fn available() -> Vec<Self> {
        let mut all = vec![Self::Portable];
        #[cfg(target_arch = "x86_64")]
        if Avx2::<false>::detected() {
            all.push(Self::Avx2);
            if Avx2::<true>::detected() {
                all.push(Self::AvxVnni);
            }
        }
        #[cfg(target_arch = "x86_64")]
        if Avx512::detected() {
            all.push(Self::Avx512);
            if is_x86_feature_detected!("avx512bf16") {
                all.push(Self::Avx512Bf16);
            }
            if amx_permitted() {
                all.push(Self::Amx);
            }
        }
        #[cfg(target_arch = "aarch64")]
        if Neon::<false>::detected() {
            all.push(Self::Neon);
            if Neon::<true>::detected() {
                all.push(Self::NeonI8mm);
            }
        }
        all
    }

    /// The name that `THUNDER_KERNEL` accepts.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Portable => "portable",
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => "avx2",
            #[cfg(target_arch = "x86_64")]
            Self::AvxVnni => "avxvnni",
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => "avx512",
            #[cfg(target_arch = "x86_64")]
            Self::Avx512Bf16 => "avx512bf16",
            #[cfg(target_arch = "x86_64")]
            Self::Amx => "amx",
            #[cfg(target_arch = "aarch64")]
            Self::Neon => "neon",
            #[cfg(target_arch = "aarch64")]
            Self::NeonI8mm => "i8mm",
        }
    }

    /// True if a matrix unit computes prompts' attention and gated activations in bf16.
    pub(super) const fn has_matrix_unit(self) -> bool {
        match self {
            #[cfg(target_arch = "x86_64")]
            Self::Amx => true,
            _ => false,
        }
    }
}

/// Asks the CPU for AMX and the system for permission to use it. Every CPU with AMX also has
/// AVX-512 with FP16 and bf16.
#[cfg(target_arch = "x86_64")]
fn amx_permitted() -> bool {
    #[cfg(target_os = "linux")]
    {
        /// Leaf 7, EDX: amx-bf16, amx-tile and amx-int8.
        const FEATURES: u32 = 1 << 22 | 1 << 24 | 1 << 25;
        /// `ARCH_REQ_XCOMP_PERM` of `arch_prctl`, and the state component of the tile data.
        const REQUEST_PERMISSION: libc::c_long = 0x1023;
        const TILE_DATA: libc::c_long = 18;
        // SAFETY: the call takes two numbers; it only allows the process to use more state.
        is_x86_feature_detected!("avx512fp16")
            && is_x86_feature_detected!("avx512bf16")
            && std::arch::x86_64::__cpuid_count(7, 0).edx & FEATURES == FEATURES
            && unsafe { libc::syscall(libc::SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) } == 0
    }
    #[cfg(not(target_os = "linux"))]
    false
}
