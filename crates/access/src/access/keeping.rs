//! Kept prompts and answers: the policy, writing and reading. The audit log has each reading. With
//! several servers, the server that was asked logs the texts of all, and each server that gave
//! texts logs its own.

use serde_json::{Value, json};

use super::shared::{Found, Gathered, Wanted};
use super::{Access, Caller, lock};
use crate::audit::Actor;
use crate::error::AccessError;
use crate::prompts::{KeepPolicy, Keeping, KeptPage, KeptPrompt, PromptsAsk};
use crate::store::Act;
use crate::time::Time;

impl Access {
    /// Sets the key file of kept prompts, instead of the one in the data folder. A backup of the
    /// store contains neither file.
    pub fn use_prompts_key(&self, path: std::path::PathBuf) {
        self.0.prompts.use_key(path);
    }

    /// Whose prompts and answers are kept.
    pub fn keep_policy(&self) -> KeepPolicy {
        self.0.prompts.policy()
    }

    /// Sets whose prompts and answers are kept. Running requests are not affected.
    ///
    /// # Errors
    /// When a value is wrong, there is no key to encrypt with, the other servers do not take it, or
    /// the disk fails.
    pub fn set_keep_policy(&self, policy: KeepPolicy, actor: &Actor, now: Time) -> Result<(), AccessError> {
        let _changing = lock(&self.0.changing);
        self.0.prompts.prepare(&policy)?;
        if policy == self.keep_policy() {
            return Ok(());
        }
        if let Some(peers) = self.peers() {
            peers.put_keep_policy(&policy).map_err(AccessError::Peers)?;
        }
        let details = serde_json::to_value(&policy).unwrap_or_default();
        let act = Act { actor, time: now, action: "prompts.policy", subject: None, details };
        self.0.store.put_keep_policy(&policy, &act)?;
        self.0.prompts.set(policy)
    }

    /// Whether a request's prompt and answer are kept. If so, pass them to [`Access::keep`] at its
    /// end.
    pub fn keeps(&self, caller: &Caller, model: &str) -> Option<Keeping> {
        self.0.prompts.keeps(caller.key().map(AsRef::as_ref), model)
    }

    /// Keeps a prompt and its answer, redacted and encrypted. Another thread does the work.
    pub fn keep(&self, keeping: &Keeping, kept: KeptPrompt) {
        self.0.prompts.keep(keeping, kept);
    }

    pub(crate) fn lose_prompt(&self, why: &str) {
        self.0.prompts.lose(why);
    }

    /// Kept prompts that this server could not write since it started.
    pub(super) fn prompts_lost(&self) -> u64 {
        self.0.prompts.lost()
    }

    /// Kept prompts that could not be written since their servers started, of all servers; and
    /// which servers are missing.
    pub fn all_prompts_lost(&self) -> Gathered<u64> {
        let (theirs, missing) = self.of_others(&Wanted::PromptsLost, |_, found| match found {
            Found::PromptsLost(lost) => Some(lost),
            _ => None,
        });
        (self.prompts_lost() + theirs.iter().sum::<u64>(), missing)
    }

    /// Kept prompts of all servers, the newest first, and the servers that are missing. When this
    /// returns, the audit log has the reading with its query.
    ///
    /// # Errors
    /// When the key is missing or another one, a file was changed, or the disk fails.
    pub fn kept_prompts(
        &self,
        ask: &PromptsAsk,
        actor: &Actor,
        now: Time,
    ) -> Result<Gathered<KeptPage>, AccessError> {
        let own = self.own_prompts(ask)?;
        let by = self.0.store.node.get().cloned().unwrap_or_default();
        let wanted = Wanted::Prompts { ask: ask.clone(), reader: actor.clone(), by };
        let (mut pages, missing) = self.of_others(&wanted, |_, found| match found {
            Found::Prompts(page) => Some(page),
            _ => None,
        });
        pages.insert(0, own);
        let page = KeptPage::merge(pages, ask.limit);
        self.note_reading(ask, &page, json!({ "missing": missing }), actor, now)?;
        Ok((page, missing))
    }

    /// This server's prompts for a reader `by` at another server.
    pub(super) fn prompts_for(
        &self,
        ask: &PromptsAsk,
        reader: &Actor,
        by: &str,
        now: Time,
    ) -> Result<KeptPage, AccessError> {
        let page = self.own_prompts(ask)?;
        if !page.prompts.is_empty() {
            self.note_reading(ask, &page, json!({ "at": by }), reader, now)?;
        }
        Ok(page)
    }

    fn own_prompts(&self, ask: &PromptsAsk) -> Result<KeptPage, AccessError> {
        let mut page = self.0.prompts.read(ask)?;
        let node = self.0.store.node.get();
        page.prompts.iter_mut().for_each(|kept| kept.node = node.cloned());
        Ok(page)
    }

    fn note_reading(
        &self,
        ask: &PromptsAsk,
        page: &KeptPage,
        mut details: Value,
        actor: &Actor,
        now: Time,
    ) -> Result<(), AccessError> {
        let ids: Vec<&str> = page.prompts.iter().take(MOST_IDS).map(|kept| kept.id.as_str()).collect();
        details["filter"] = json!(ask.filter);
        details["before"] = json!(ask.before.as_ref().map(ToString::to_string));
        details["limit"] = ask.limit.into();
        details["found"] = page.prompts.len().into();
        details["ids"] = json!(ids);
        self.note_act(actor, "prompts.read", None, details, now)
    }
}

/// Maximum number of prompt ids in an entry of the audit log.
const MOST_IDS: usize = 100;
