//! How to pull, and what the environment says of it.

use std::{path::PathBuf, time::Duration};

use crate::environment;

/// From where, to where and how to download.
#[derive(Debug, Clone)]
pub struct PullOptions {
    /// The hub's address.
    pub endpoint: String,
    /// Sent to the hub, and to no other host.
    pub token: Option<String>,
    /// The cache's folder.
    pub cache: PathBuf,
    /// Files at a time. More help where one connection is slower than the line, and cost the server more.
    pub jobs: usize,
    /// Attempts at a file without a byte gained before it is an error.
    pub attempts: u32,
    /// The wait after the first failed attempt; doubled after each, up to 30 s.
    pub first_wait: Duration,
    /// For how long a connection may bring nothing before it counts as broken.
    pub stall: Duration,
    /// Never use the network: succeed only if all is there.
    pub offline: bool,
    /// Ask the hub whether there is a newer commit even if all is there.
    pub refresh: bool,
}

impl PullOptions {
    /// What huggingface_hub's environment variables say: HF_ENDPOINT, HF_TOKEN (or the file of `hf auth login`),
    /// HF_HUB_CACHE and its kin, HF_HUB_OFFLINE.
    pub fn from_env() -> Self {
        let offline = environment::env("HF_HUB_OFFLINE")
            .is_some_and(|value| matches!(value.to_ascii_uppercase().as_str(), "1" | "ON" | "YES" | "TRUE"));
        Self {
            endpoint: environment::env("HF_ENDPOINT").unwrap_or_else(|| "https://huggingface.co".into()),
            token: environment::token_from(&environment::env),
            cache: environment::cache_root(),
            jobs: 4,
            attempts: 5,
            first_wait: Duration::from_millis(500),
            stall: Duration::from_secs(30),
            offline,
            refresh: false,
        }
    }
}
