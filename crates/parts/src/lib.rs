//! Which bytes of a file are there.
//!
//! A rank reads a part of a model's weight files. A node that has nothing else of them keeps each
//! as a sparse file of the whole length, and next to it a [`Record`] of what is there. `model` says
//! which bytes a rank reads, as [`Run`]s; `hub` fetches them; loading checks the record.
//!
//! ```
//! use thunder_parts::{Ranges, Run};
//!
//! let wanted = Ranges::of(&[Run { first: 100, len: 10, stride: 50, count: 3 }]);
//! let there = Ranges::of(&[Run::of(90..155)]);
//! assert_eq!(wanted.minus(&there).runs(), [Run::of(155..160), Run::of(200..210)]);
//! assert_eq!("100+10*3/50".parse::<Run>().unwrap().bytes(), 30);
//! ```
//!
//! Architecture invariant: this crate depends on no other, and reads and writes records only.

mod ranges;
mod record;
mod run;

pub use ranges::Ranges;
pub use record::{Piece, Record};
pub use run::Run;
