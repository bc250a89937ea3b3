//! The files of a repository, and those needed to run the model.

use std::path::Path;

use serde::Deserialize;

use crate::{
    error::HubError,
    locate::{GGUF_IS_NOT_READ, is_gguf},
    names,
};

/// The hub's response to `/api/models/<repo>/revision/<revision>`, limited to the fields used here.
#[derive(Debug, Deserialize)]
pub(crate) struct Listing {
    /// The commit.
    pub(crate) sha: String,
    siblings: Vec<Sibling>,
}

#[derive(Debug, Deserialize)]
struct Sibling {
    rfilename: String,
}

/// File name endings that a model needs. Weights in other formats are duplicates.
const NEEDED_ENDINGS: [&str; 6] = [".json", ".safetensors", ".jinja", ".txt", ".model", ".tiktoken"];

impl Listing {
    pub(crate) fn parse(repo: &str, bytes: &[u8]) -> Result<Self, HubError> {
        let wrong =
            |reason: String| HubError::Response { repo: repo.into(), file: "list of files".into(), reason };
        let listing: Self = serde_json::from_slice(bytes).map_err(|error| wrong(error.to_string()))?;
        if !names::is_commit(&listing.sha) {
            return Err(wrong(format!("{:?} is not a commit", listing.sha)));
        }
        match listing.siblings.iter().find(|file| !names::is_safe_path(&file.rfilename)) {
            Some(file) => Err(HubError::UnsafeName { repo: repo.into(), file: file.rfilename.clone() }),
            None => Ok(listing),
        }
    }

    /// The files needed to run the model.
    pub(crate) fn needed(&self, repo: &str) -> Result<Vec<&str>, HubError> {
        let top =
            || self.siblings.iter().map(|file| file.rfilename.as_str()).filter(|name| !name.contains('/'));
        // Some repositories have the weights twice, also under the publisher's own names
        // (consolidated.safetensors).
        let usual_names = top().any(|name| name.starts_with("model") && name.ends_with(".safetensors"));
        let is_needed = |name: &str| {
            NEEDED_ENDINGS.iter().any(|end| name.ends_with(end))
                && !(usual_names && name.ends_with(".safetensors") && !name.starts_with("model"))
        };
        let needed: Vec<&str> = top().filter(|name| is_needed(name)).collect();
        let lacks = |missing: &str, hint: &str| HubError::NotRunnable {
            repo: repo.into(),
            missing: missing.into(),
            hint: hint.into(),
        };
        let has_weights = needed.iter().any(|name| name.ends_with(".safetensors"));
        if !has_weights && top().any(|name| is_gguf(Path::new(name))) {
            return Err(lacks(".safetensors files", &format!(": {GGUF_IS_NOT_READ}")));
        }
        if !needed.contains(&"config.json") {
            return Err(lacks("config.json", ""));
        }
        if !has_weights {
            let other = [".bin", ".pth", ".onnx", ".npz"].iter().find(|end| top().any(|n| n.ends_with(*end)));
            let hint = other.map(|end| {
                format!(": its weights are {end} files; look for a safetensors or MLX version of the model")
            });
            return Err(lacks(".safetensors files", &hint.unwrap_or_default()));
        }
        Ok(needed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn needed(files: &[&str]) -> Result<Vec<String>, HubError> {
        let siblings: Vec<_> = files.iter().map(|name| serde_json::json!({ "rfilename": name })).collect();
        let text =
            serde_json::json!({"sha": "0".repeat(40), "siblings": siblings, "private": false}).to_string();
        let listing = Listing::parse("o/n", text.as_bytes())?;
        Ok(listing.needed("o/n")?.into_iter().map(str::to_owned).collect())
    }

    #[test]
    fn only_files_that_the_model_needs_are_listed() {
        let files = [
            "config.json",
            "README.md",
            "model-00001-of-00002.safetensors",
            "model-00002-of-00002.safetensors",
            "model.safetensors.index.json",
            "consolidated.safetensors",
            "pytorch_model.bin",
            "onnx/model.onnx",
            "original/params.json",
            "tokenizer.json",
            "tokenizer.model",
            "merges.txt",
            "chat_template.jinja",
            ".gitattributes",
        ];
        let expected = [
            "config.json",
            "model-00001-of-00002.safetensors",
            "model-00002-of-00002.safetensors",
            "model.safetensors.index.json",
            "tokenizer.json",
            "tokenizer.model",
            "merges.txt",
            "chat_template.jinja",
        ];
        assert_eq!(needed(&files).expect("a model"), expected);
        let own_names = ["config.json", "weights.00.safetensors"];
        assert_eq!(needed(&own_names).expect("a model"), own_names);
    }

    #[test]
    fn a_repository_without_a_model_gives_the_reason() {
        let error = |files: &[&str]| needed(files).expect_err("not a model").to_string();
        assert!(error(&["model.safetensors"]).contains("has no config.json"));
        assert!(error(&["config.json", "x.bin"]).contains(".bin files"));
        assert!(error(&["README.md", "x-Q4_K_M.gguf"]).contains("GGUF is not read yet"));
        assert!(error(&["config.json", "../model.safetensors"]).contains("unsafe name"));
    }
}
