//! The endpoints, one file each. A new endpoint is a file here and a line in `routes.rs`.

pub(crate) mod chat;
pub(crate) mod completions;
pub(crate) mod models;
#[cfg(test)]
mod parse_tests;
