//! Queue pairs whose state is their type. A pair owns all memory that the device may use through
//! it.
//!
//! The states are `Reset → Init → ReadyToReceive → ReadyToSend`; only the last can post. The device
//! gets memory one slot at a time. A [`SendSlot`] is writable until it is posted, and is free again
//! once its completion was read. A posted receive returns as a [`Received`] token, which is needed
//! to read the slot and to post it again. So a buffer with a posted request cannot be read, written
//! or freed. Dropping a pair first destroys it on the device.

mod options;
mod pair;
mod raw_pair;
mod ring;
mod send;
mod window;

pub use self::options::{Connection, QueueAddress, QueueOptions};
pub use self::pair::{Init, QueuePair, ReadyToReceive, ReadyToSend, Reset};
pub use self::raw_pair::Received;
pub use self::send::SendSlot;
pub use self::window::{RemoteWindow, Window};
