//! The machines of a desk and the Thunderbolt cables between them.
//!
//! A probe ([`read::script`]) runs on each machine and prints a transcript. [`Machine::read`]
//! parses it, [`Desk`] matches the ports by their UUIDs, [`check`] lists problems with their
//! remedies, [`plan`] chooses addresses and exact commands, and [`apply`] runs them through a
//! [`Shell`]. A [`Record`] is written before each command, so that [`apply::undo`] can restore the
//! earlier state.
//!
//! Only [`shell`] and [`record`] touch the system; everything else computes.

pub mod apply;
pub mod awake;
pub mod check;
pub mod graph;
pub mod hostfile;
pub mod job;
pub mod lan;
pub mod machine;
pub mod network;
pub mod plan;
pub mod read;
pub mod record;
pub mod route;
pub mod shell;
pub mod tune;

#[cfg(test)]
mod tests;

pub use graph::Desk;
pub use machine::Machine;
pub use network::Network;
pub use record::Record;
pub use shell::Shell;
