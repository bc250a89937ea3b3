//! The files of a repository, and those needed to run the model.

use serde::Deserialize;

use crate::{
    error::HubError,
    gguf::{self, Choice, is_gguf},
    names,
};

/// The hub's response to `/api/models/<repo>/revision/<revision>`, limited to the fields used here.
#[derive(Debug, Clone, Deserialize)]
pub(crate) struct Listing {
    /// The commit.
    pub(crate) sha: String,
    siblings: Vec<Sibling>,
}

#[derive(Debug, Clone, Deserialize)]
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

    /// The files needed to run the model: GGUF files of a quantization, or safetensors and their
    /// companions. If the repository has only GGUF files, they must belong to one model.
    pub(crate) fn needed(&self, repo: &str, quantization: Option<&str>) -> Result<Vec<String>, HubError> {
        let top =
            || self.siblings.iter().map(|file| file.rfilename.as_str()).filter(|name| !name.contains('/'));
        let has_safetensors = top().any(|name| name.ends_with(".safetensors"));
        if quantization.is_some()
            || !has_safetensors && self.siblings.iter().any(|file| is_gguf(&file.rfilename))
        {
            return self.needed_gguf(repo, quantization);
        }
        // Some repositories have the weights twice, the second time under the publisher's own names
        // (consolidated.safetensors).
        let usual_names = top().any(|name| name.starts_with("model") && name.ends_with(".safetensors"));
        let is_needed = |name: &str| {
            NEEDED_ENDINGS.iter().any(|end| name.ends_with(end))
                && !(usual_names && name.ends_with(".safetensors") && !name.starts_with("model"))
        };
        let needed: Vec<String> = top().filter(|name| is_needed(name)).map(str::to_owned).collect();
        if !needed.iter().any(|name| name == "config.json") {
            return Err(lacks(repo, "config.json", String::new()));
        }
        if !has_safetensors {
            let other = [".bin", ".pth", ".onnx", ".npz"].iter().find(|end| top().any(|n| n.ends_with(*end)));
            let hint = other.map(|end| {
                format!(
                    ": its weights are {end} files; look for a safetensors, MLX or GGUF version of the model"
                )
            });
            return Err(lacks(repo, ".safetensors files", hint.unwrap_or_default()));
        }
        Ok(needed)
    }

    /// The GGUF files of a quantization.
    fn needed_gguf(&self, repo: &str, quantization: Option<&str>) -> Result<Vec<String>, HubError> {
        let models = gguf::models(self.siblings.iter().map(|file| file.rfilename.as_str()));
        let model = gguf::choose(&models, quantization).map_err(|choice| match choice {
            Choice::Several(quantizations) => {
                HubError::SeveralQuantizations { repo: repo.into(), quantizations }
            }
            Choice::None(there) => {
                let missing = format!("GGUF file of {}", quantization.unwrap_or_default());
                let hint = match there.is_empty() {
                    true => ": it has no GGUF files at all; leave out what follows the colon".to_owned(),
                    false => format!(": it has {}", there.join(", ")),
                };
                lacks(repo, &missing, hint)
            }
        })?;
        match model.missing_part() {
            Some(missing) => Err(lacks(repo, &missing, String::new())),
            None => Ok(model.files),
        }
    }
}

fn lacks(repo: &str, missing: &str, hint: String) -> HubError {
    HubError::NotRunnable { repo: repo.into(), missing: missing.into(), hint }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn needed(files: &[&str]) -> Result<Vec<String>, HubError> {
        let siblings: Vec<_> = files.iter().map(|name| serde_json::json!({ "rfilename": name })).collect();
        let text =
            serde_json::json!({"sha": "0".repeat(40), "siblings": siblings, "private": false}).to_string();
        let listing = Listing::parse("o/n", text.as_bytes())?;
        listing.needed("o/n", None)
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
    fn gguf_files_are_the_whole_model() {
        let files =
            ["README.md", "config.json", "a-Q4_K_M.gguf", "Q8_0/a-Q8_0-00001-of-00001.gguf", "mmproj.gguf"];
        let siblings: Vec<_> = files.iter().map(|name| serde_json::json!({ "rfilename": name })).collect();
        let text = serde_json::json!({"sha": "0".repeat(40), "siblings": siblings}).to_string();
        let listing = Listing::parse("o/n", text.as_bytes()).expect("a listing");
        assert_eq!(listing.needed("o/n", Some("q4_k_m")).expect("there"), ["a-Q4_K_M.gguf"]);
        assert_eq!(listing.needed("o/n", Some("Q8_0")).expect("there"), ["Q8_0/a-Q8_0-00001-of-00001.gguf"]);
        let error = listing.needed("o/n", Some("Q2_K")).expect_err("not there").to_string();
        assert!(error.contains("no GGUF file of Q2_K") && error.contains("it has Q8_0, Q4_K_M"), "{error}");
        assert_eq!(needed(&["only-Q6_K.gguf", "README.md"]).expect("the only one"), ["only-Q6_K.gguf"]);
    }

    #[test]
    fn a_repository_without_a_model_gives_the_reason() {
        let error = |files: &[&str]| needed(files).expect_err("not a model").to_string();
        assert!(error(&["model.safetensors"]).contains("has no config.json"));
        assert!(error(&["config.json", "x.bin"]).contains(".bin files"));
        assert!(
            error(&["a-Q8_0.gguf", "a-Q4_K_M.gguf"]).contains("such as o/n:Q4_K_M; there are Q4_K_M, Q8_0")
        );
        assert!(error(&["config.json", "../model.safetensors"]).contains("unsafe name"));
    }
}
