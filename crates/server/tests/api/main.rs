//! The API with scripted engines: what a client receives, and what the engine receives.

#![allow(clippy::unwrap_used, reason = "a panic fails the test")]

mod access;
mod adapters;
mod agents;
mod chat;
mod completions;
mod cut_off;
mod deploy;
mod document;
mod embeddings;
mod errors;
mod fuzz;
mod fuzz_http;
mod lifecycle;
mod limits;
mod load;
mod metrics;
mod prompts;
mod refused;
mod relay;
mod security;
mod support;
mod tls;
mod tools;
