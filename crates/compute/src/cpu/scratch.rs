//! Memory that each compute thread owns for kernels that need more than registers and stack.

#[cfg(target_arch = "x86_64")]
pub(super) use super::product::amx::Scratch;

/// Memory of one compute thread: nothing, as only AMX kernels need some.
#[cfg(not(target_arch = "x86_64"))]
#[derive(Debug, Default)]
pub(super) struct Scratch;
