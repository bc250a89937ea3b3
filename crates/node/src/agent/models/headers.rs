//! What a plan reads of a model that this node lacks, from a member that has it, or the hub.

use std::path::PathBuf;

use thunder_hub::PullOptions;

use super::super::Agent;
use super::split_revision;

/// Folder of models' headers in the data folder.
pub(super) const HEADERS_FOLDER: &str = "headers";

impl Agent {
    /// A folder, or a GGUF file, with a model's configuration and the headers of its weights.
    pub(in crate::agent) async fn headers_of(&self, model: String) -> Result<PathBuf, String> {
        let options = PullOptions { peers: self.weight_peers(), ..self.0.options.models.clone() };
        let into = self.0.folder.file(HEADERS_FOLDER);
        let fetched = tokio::task::spawn_blocking(move || {
            let (name, revision) = split_revision(&model);
            thunder_hub::fetch_headers(name, revision, &options, &into)
        });
        let fetched = fetched.await.map_err(|error| error.to_string())?;
        fetched.map(|headers| headers.folder).map_err(|error| error.to_string())
    }
}
