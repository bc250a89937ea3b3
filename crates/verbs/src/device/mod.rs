//! RDMA devices and their ports.

mod context;
mod list;
mod port;

pub use self::context::{Context, DeviceLimits};
pub use self::list::DeviceList;
pub(crate) use self::port::mtu_code;
pub use self::port::{LinkLayer, LocalPort, PortInfo, PortState};
