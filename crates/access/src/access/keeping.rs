//! Prompts and answers that a policy keeps: set, written, and read. Each reading is in the audit
//! log.

use serde_json::json;

use super::{Access, Caller, lock};
use crate::audit::Actor;
use crate::error::AccessError;
use crate::prompts::{KeepPolicy, Keeping, KeptPrompt};
use crate::store::Act;
use crate::time::Time;
use crate::usage::Filter;

impl Access {
    /// Names the file of the key of kept prompts, in place of the one in the data folder. A store's
    /// backup has neither.
    pub fn use_prompts_key(&self, path: std::path::PathBuf) {
        self.0.prompts.use_key(path);
    }

    /// Whose prompts and answers are kept.
    pub fn keep_policy(&self) -> KeepPolicy {
        self.0.prompts.policy()
    }

    /// Sets whose prompts and answers are kept. Requests that have begun are not changed.
    ///
    /// # Errors
    /// When a value is wrong, there is no key to encrypt with, the server is one of a cluster, or
    /// the disk fails.
    pub fn set_keep_policy(&self, policy: KeepPolicy, actor: &Actor, now: Time) -> Result<(), AccessError> {
        if policy.is_on() && self.peers().is_some() {
            return Err(AccessError::KeepsOfNode);
        }
        let _changing = lock(&self.0.changing);
        self.0.prompts.prepare(&policy)?;
        let details = serde_json::to_value(&policy).unwrap_or_default();
        let act = Act { actor, time: now, action: "prompts.policy", subject: None, details };
        self.0.store.put_keep_policy(&policy, &act)?;
        self.0.prompts.set(policy)
    }

    /// Whether a request's prompt and answer are kept: then [`Access::keep`] takes them at its end.
    pub fn keeps(&self, caller: &Caller, model: &str) -> Option<Keeping> {
        self.0.prompts.keeps(caller.key().map(AsRef::as_ref), model)
    }

    /// Keeps a prompt and its answer: redacted and encrypted, within moments. Takes no time here.
    pub fn keep(&self, keeping: &Keeping, kept: KeptPrompt) {
        self.0.prompts.keep(keeping, kept);
    }

    /// Kept prompts that could not be written since the server started.
    pub fn prompts_lost(&self) -> u64 {
        self.0.prompts.lost()
    }

    /// At most `limit` kept prompts, the newest first. That they were read is in the audit log when
    /// this returns, with what was asked for.
    ///
    /// # Errors
    /// When the key is missing or another one, a file was changed, or the disk fails.
    pub fn kept_prompts(
        &self,
        filter: &Filter,
        limit: usize,
        actor: &Actor,
        now: Time,
    ) -> Result<Vec<KeptPrompt>, AccessError> {
        let found = self.0.prompts.read(filter, limit)?;
        let ids: Vec<&str> = found.iter().take(MOST_IDS).map(|kept| kept.id.as_str()).collect();
        let details = json!({ "filter": filter, "limit": limit, "found": found.len(), "ids": ids });
        self.note_act(actor, "prompts.read", None, details, now)?;
        Ok(found)
    }
}

/// Ids of prompts that an entry of the audit log names.
const MOST_IDS: usize = 100;
