//! Starts, supervises and describes the ranks of a group: local processes, environments, host files.

pub mod hostfile;
pub mod launch;
pub mod local;
