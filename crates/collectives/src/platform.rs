//! What differs between Linux and macOS: shared memory objects, local sockets, the host's identity, socket options.

#[cfg(target_os = "linux")]
mod linux;
#[cfg(target_os = "linux")]
pub(crate) use linux::{bind_local, connect_local, host_identity, limit_unacknowledged, shared_object};

#[cfg(not(target_os = "linux"))]
mod macos;
#[cfg(not(target_os = "linux"))]
pub(crate) use macos::{bind_local, connect_local, host_identity, limit_unacknowledged, shared_object};

mod unix;
pub(crate) use unix::{
    Mapping, interface_addresses, peer_is_same_user, poll, receive_descriptor, send_descriptor,
};
