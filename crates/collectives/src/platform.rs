//! What differs between Linux and macOS: shared memory objects, local sockets, the host's identity,
//! socket options, and reading another process's memory.

#[cfg(target_os = "linux")]
mod linux;
#[cfg(target_os = "linux")]
pub(crate) use linux::{
    Process, bind_local, connect_local, forget_local, host_identity, limit_unacknowledged, machine_identity,
    peer_process, shared_object,
};

#[cfg(not(target_os = "linux"))]
mod macos;
#[cfg(not(target_os = "linux"))]
pub(crate) use macos::{
    Process, bind_local, connect_local, forget_local, host_identity, limit_unacknowledged, machine_identity,
    peer_process, shared_object,
};

mod unix;
pub(crate) use unix::{Mapping, peer_is_same_user, poll, receive_descriptor, send_descriptor};
