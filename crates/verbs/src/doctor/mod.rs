//! Whether RDMA works on this machine and, if not, what to do. `thunder doctor` prints it.

mod advice;
mod examine;
mod macos;
mod report;

pub use self::examine::examine;
pub use self::macos::{RdmaControl, ThunderboltPort, parse_rdma_ctl, parse_thunderbolt};
pub use self::report::{DeviceReport, LibraryReport, MacosReport, Report};
