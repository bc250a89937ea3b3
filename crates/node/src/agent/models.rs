//! Models on the disks of nodes: what each has, and how they come from one to another.
//!
//! A node sends the models of its Hugging Face cache to members, in the hub's own form over a
//! member's call ([`serving`]). A node that lacks a model pulls it from those that have it, and
//! from the hub only if none does ([`jobs`]). [`tasks`] does this on several nodes, so that one
//! download serves all.

mod headers;
mod jobs;
mod parts;
mod serving;
mod tasks;

use serde::{Deserialize, Serialize};

use super::Agent;
use super::calls::{Call, CallReply};
use crate::id::NodeId;
use crate::placement::value_of;

pub(super) use jobs::Jobs;
pub(super) use serving::Serving;
pub(super) use tasks::Tasks;
pub use tasks::{NodeTask, TaskState, TaskStatus};

/// What is asked about the models on a node's disk.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum ModelAsk {
    /// Which there are.
    List,
    /// Whether this one is there, complete.
    Has(String),
    /// Whether all that a rank reads of this one is there.
    HasPart {
        /// org/name, or org/name:QUANTIZATION.
        model: String,
        /// The rank.
        part: RankPart,
    },
    /// Begin a job.
    Begin {
        /// What to do.
        work: Work,
        /// org/name, or org/name:QUANTIZATION.
        model: String,
        /// Branch, tag or commit.
        revision: String,
        /// The commit that the revision has now, if a node has asked the hub already.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        commit: Option<String>,
        /// The rank for which it is pulled; `None`: all of it is wanted.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        part: Option<RankPart>,
    },
    /// Delete this one.
    Remove(String),
}

/// A rank that reads a part of a model's weight files.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RankPart {
    /// The rank.
    pub rank: u32,
    /// Ranks of its group.
    pub ranks: u32,
    /// What `thunder serve` takes besides the model.
    pub arguments: Vec<String>,
}

/// What a job does with a model.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Work {
    /// Download it, unless it is there.
    Pull,
    /// Download what is new.
    Update,
    /// Check its files against their hashes.
    Verify,
}

/// The answer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum ModelAnswer {
    /// The models on the disk.
    Models(Vec<StoredModel>),
    /// Whether the model is there.
    Has(bool),
    /// A job has begun, or runs already.
    Begun(u64),
    /// The model is deleted; bytes that became free.
    Removed(u64),
}

/// A model on a node's disk.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StoredModel {
    /// org/name, or org/name:QUANTIZATION.
    pub name: String,
    /// The commit, if the model is complete.
    pub commit: Option<String>,
    /// Bytes of its files.
    pub bytes: u64,
    /// A file that is missing, if the model is not complete.
    pub missing: Option<String>,
    /// Bytes of all its files, if `bytes` of them are there, for ranks of this node.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub part_of: Option<u64>,
}

/// A model's name and revision: `org/name@revision`, or `org/name`.
pub(super) fn split_revision(name: &str) -> (&str, &str) {
    name.split_once('@').unwrap_or((name, "main"))
}

/// Whether a model that is served uses the files that removing `removed` deletes: all quantizations
/// of a repository, or one.
pub fn uses_files(served: &str, removed: &str) -> bool {
    let (name, _) = split_revision(served);
    name == removed || name.split_once(':').is_some_and(|(repo, _)| repo == removed)
}

impl Agent {
    /// The model with a rank on this node that uses these files, as its own or as its draft's.
    fn model_that_uses(&self, files: &str) -> Option<String> {
        let state = self.lock();
        let document = state.membership.document();
        let used = document.models().find(|(group, register)| {
            let is_here = document.placement(group).is_some_and(|(_, it)| it.nodes.contains(&self.0.id));
            let wish = register.value.as_ref().filter(|_| is_here);
            wish.is_some_and(|wish| {
                let draft = value_of(&wish.arguments, "--draft");
                uses_files(&wish.model, files) || draft.is_some_and(|draft| uses_files(draft, files))
            })
        });
        used.and_then(|(_, register)| register.value.as_ref()).map(|wish| wish.model.clone())
    }

    /// Answers a question about this node's disk.
    pub(super) async fn answer_models(&self, ask: ModelAsk) -> Result<ModelAnswer, String> {
        let cache = self.0.options.models.cache.clone();
        let answer = match ask {
            ModelAsk::Begin { work, model, revision, commit, part } => {
                return self.begin_job(work, model, revision, commit, part).map(ModelAnswer::Begun);
            }
            ModelAsk::HasPart { model, part } => {
                let agent = self.clone();
                tokio::task::spawn_blocking(move || Ok(ModelAnswer::Has(agent.has_part(&model, &part))))
            }
            ModelAsk::List => tokio::task::spawn_blocking(move || {
                let models = thunder_hub::cached_models(&cache)?;
                let stored = |model: thunder_hub::CachedModel| {
                    let thunder_hub::CachedModel { name, commit, bytes, missing, part_of } = model;
                    StoredModel { name, commit, bytes, missing, part_of }
                };
                Ok(ModelAnswer::Models(models.into_iter().map(stored).collect()))
            }),
            ModelAsk::Has(name) => tokio::task::spawn_blocking(move || {
                Ok(ModelAnswer::Has(thunder_hub::locate_in(&name, &cache).is_ok()))
            }),
            ModelAsk::Remove(name) => {
                if let Some(model) = self.model_that_uses(&name) {
                    return Err(format!("{model} is served here: `thunder model unload {model}` first"));
                }
                tokio::task::spawn_blocking(move || {
                    thunder_hub::remove(&name, &cache).map(ModelAnswer::Removed)
                })
            }
        };
        let answer = answer.await.map_err(|error| error.to_string())?;
        answer.map_err(|error: thunder_hub::HubError| error.to_string())
    }

    /// Asks a member, or this node itself.
    pub(super) async fn ask_models(&self, node: NodeId, ask: ModelAsk) -> Result<ModelAnswer, String> {
        if node == self.0.id {
            return self.answer_models(ask).await;
        }
        match self.call(node, &Call::Models(ask)).await?.0 {
            CallReply::Models(answer) => Ok(answer),
            _ => Err(format!("{} is of a version that shares no models", self.name_of(&node))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::uses_files;

    #[test]
    fn removing_a_repository_removes_all_its_quantizations() {
        for served in ["org/name", "org/name@v2", "org/name:Q4_K_M"] {
            assert!(uses_files(served, "org/name"), "{served}");
        }
        assert!(uses_files("org/name:Q4_K_M@v2", "org/name:Q4_K_M"));
        for (served, removed) in
            [("org/name:Q8_0", "org/name:Q4_K_M"), ("org/name2", "org/name"), ("builtin", "org/name")]
        {
            assert!(!uses_files(served, removed), "{served}");
        }
    }
}
