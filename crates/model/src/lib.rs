//! Model folders: configuration, weight files, quantization formats, tokenizer, chat template, architectures and shard
//! plans.

pub mod chat;
pub mod tokenizer;
