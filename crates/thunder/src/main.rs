//! The thunder command.
fn main() {}
