//! The endpoints, one file each.

pub(crate) mod chat;
pub(crate) mod completions;
pub(crate) mod models;
#[cfg(test)]
mod parse_tests;
