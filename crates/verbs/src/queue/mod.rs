//! Queue pairs whose state is their type, and which own all memory that they let a device touch.
//!
//! A pair goes `Reset → Init → ReadyToReceive → ReadyToSend`; only the last can post. Memory is handed to the device a
//! slot at a time: a [`SendSlot`] is writable until it is posted and comes back when its completion was read; a posted
//! receive comes back as a [`Received`] token, which is what it takes to read the slot and to post it again. So no
//! buffer with a posted request can be read, written or freed. Dropping the pair destroys it on the device first.

mod core;
mod options;
mod pair;
mod ring;
mod send;
mod window;

pub use self::core::Received;
pub use self::options::{Connection, QueueAddress, QueueOptions};
pub use self::pair::{Init, QueuePair, ReadyToReceive, ReadyToSend, Reset};
pub use self::send::SendSlot;
pub use self::window::{RemoteWindow, Window};
