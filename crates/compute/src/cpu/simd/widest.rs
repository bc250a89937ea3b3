//! Plain code that the compiler vectorizes, compiled for the widest vectors of the CPU.

/// Code without intrinsics. Implementations are `#[inline(always)]`, or they are compiled for every
/// CPU of the architecture only.
pub(crate) trait Work {
    fn run(self);
}

/// Runs `work` with the widest vectors of the CPU.
pub(crate) fn widest(work: impl Work) {
    #[cfg(target_arch = "x86_64")]
    {
        use super::{avx2::Avx2, avx512::Avx512};

        #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
        fn avx512(work: impl Work) {
            work.run();
        }
        #[target_feature(enable = "avx2")]
        fn avx2(work: impl Work) {
            work.run();
        }
        if Avx512::detected() {
            // SAFETY: detected.
            return unsafe { avx512(work) };
        }
        if Avx2::<false>::detected() {
            // SAFETY: detected.
            return unsafe { avx2(work) };
        }
    }
    work.run();
}
