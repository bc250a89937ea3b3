//! Options of a pull.

use std::{path::PathBuf, sync::Arc, time::Duration};

use crate::{environment, peer::Peer};

/// Source, destination and limits of a download.
#[derive(Debug, Clone)]
pub struct PullOptions {
    /// The hub's address.
    pub endpoint: String,
    /// The access token. Sent to the hub only, not to hosts that it redirects to.
    pub token: Option<String>,
    /// The cache's folder.
    pub cache: PathBuf,
    /// Number of parallel downloads. A larger number helps if one connection cannot use the whole
    /// bandwidth, but loads the server more.
    pub jobs: usize,
    /// Number of consecutive attempts at a file without a new byte before the pull fails.
    pub attempts: u32,
    /// Wait after the first failed attempt; doubled after each further failure, up to 30 s.
    pub first_wait: Duration,
    /// A connection that delivers nothing for this long counts as broken.
    pub stall: Duration,
    /// Machines that may have the model. They are asked first; the hub is asked for files that none
    /// of them has.
    pub peers: Vec<Arc<dyn Peer>>,
    /// Do not use the hub: fail if a file is missing and no peer has it.
    pub offline: bool,
    /// Ask the hub for a newer commit even if no file is missing.
    pub refresh: bool,
    /// The present commit of the revision, if it is already known; then it is not requested again.
    pub commit: Option<String>,
}

impl PullOptions {
    /// Options from huggingface_hub's environment variables: HF_ENDPOINT, HF_TOKEN (or the file
    /// that `hf auth login` writes), HF_HUB_OFFLINE, and those of
    /// [`cache_root`](crate::cache_root).
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
            peers: Vec::new(),
            offline,
            refresh: false,
            commit: None,
        }
    }
}
