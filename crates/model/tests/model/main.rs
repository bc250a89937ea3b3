//! The model's tests, in one program: several would each compile the same generic code.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod accuracy;
mod adapters;
mod ahead;
mod bad_encoders;
mod bad_folders;
#[cfg(unix)]
mod changed_file;
mod common;
mod encoder_texts;
mod encoders;
mod engram;
mod format_values;
mod formats;
mod gguf;
mod golden;
mod parts;
mod text_chat;
mod text_tokenizer;
mod tokenizer_forms;
