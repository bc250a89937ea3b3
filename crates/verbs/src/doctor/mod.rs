//! Why RDMA works here, or why it does not and what to do: the facts for `thunder doctor`.

mod advice;
mod examine;
mod macos;
mod report;

pub use self::examine::examine;
pub use self::macos::{RdmaControl, ThunderboltPort, parse_rdma_ctl, parse_thunderbolt};
pub use self::report::{DeviceReport, LibraryReport, MacosReport, Report};
