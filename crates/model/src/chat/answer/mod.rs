//! Splits a model's answer into text, thinking and tool calls, as it arrives.
//!
//! What is not a call stays text. The pieces in which the answer arrives change nothing but the
//! pieces of the parts.

mod buffer;
mod calls;
mod harmony;
mod json;
mod parameters;
mod parser;
mod values;

#[cfg(test)]
mod tests;

pub(crate) use buffer::Marker;
pub use parser::{AnswerParser, AnswerPart, Ending, Opening};
pub use values::ToolSchemas;
