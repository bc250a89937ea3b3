//! The numbers of exchanges with other ranks.

use crate::kernel::Kernel;

/// The arguments of an exchange's kernels.
pub(crate) const ARGUMENTS: usize = 6;

/// Numbers exchanges when their commands are recorded for the device.
pub(crate) trait Numbering: Send + Sync {
    /// The arguments of a kernel with its exchange's number; `None` for kernels that belong to no
    /// exchange, and for those whose arguments have a number.
    fn numbered(&self, kernel: &Kernel, arguments: &[u32]) -> Option<[u32; ARGUMENTS]>;
}
