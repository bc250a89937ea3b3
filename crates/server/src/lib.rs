//! The OpenAI-compatible HTTP API in front of an engine.
