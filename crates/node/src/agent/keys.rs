//! Keys and limits of the API, and the policy of kept prompts: entries of the cluster's document,
//! which this node's store follows.
//!
//! If an entry is written twice, the later write wins, as everywhere in the document. The
//! revocation of a key is an entry of its own, which nothing removes, so a concurrent change on
//! another node does not restore the key.

use std::sync::Weak;

use serde::Serialize;
use serde::de::DeserializeOwned;
use thunder_access::{
    Access, Found, KeepPolicy, Key, Limited, ModelPolicy, Peers, Policy, Shared, Standing, StoredKey,
    TeamPolicy, Time, Wanted,
};
use tokio::runtime::Handle;

use super::state::State;
use super::{Agent, Inner};
use crate::document::{Document, DocumentError};
use crate::id::NodeId;

/// Prefix of the names of entries, before a key's id, a team or a model.
const KEY: &str = "key/";
const REVOKED: &str = "revoked/";
const TEAM: &str = "team/";
const MODEL: &str = "model/";
/// Limits of keys without their own.
const DEFAULT: &str = "default";
/// Currency of prices.
const CURRENCY: &str = "currency";
/// The policy of kept prompts and answers.
const KEEP: &str = "keep";

fn text(value: &impl Serialize) -> String {
    // Names, numbers and lists can always be serialized.
    serde_json::to_string(value).unwrap_or_default()
}

/// What the nodes of a document share. Entries of a later version that this version cannot read are
/// omitted.
fn read(document: &Document) -> Shared {
    fn parse<T: DeserializeOwned>(name: &str, text: &str) -> Option<T> {
        let parsed = serde_json::from_str(text);
        parsed.map_err(|error| tracing::error!("the cluster's entry {name} cannot be read: {error}")).ok()
    }
    let Shared { mut keys, mut policy, mut keep } = Shared::default();
    let entries = document.access();
    for (name, register) in entries {
        let Some(text) = register.value.as_deref() else { continue };
        if let Some(id) = name.strip_prefix(KEY) {
            let Some(mut stored) = parse::<StoredKey>(name, text) else { continue };
            let revoked = entries.get(&format!("{REVOKED}{id}")).and_then(|entry| entry.value.as_deref());
            if let Some(revoked) = revoked {
                stored.key.revoked = Some(revoked.parse().unwrap_or(Time(0)));
            }
            keys.push(stored);
        } else if let Some(team) = name.strip_prefix(TEAM) {
            policy.teams.extend(parse::<TeamPolicy>(name, text).map(|parsed| (team.to_owned(), parsed)));
        } else if let Some(model) = name.strip_prefix(MODEL) {
            policy.models.extend(parse::<ModelPolicy>(name, text).map(|parsed| (model.to_owned(), parsed)));
        } else if name == DEFAULT {
            policy.default_limits = parse(name, text).unwrap_or_default();
        } else if name == CURRENCY {
            policy.currency = parse(name, text);
        } else if name == KEEP {
            keep = parse(name, text).unwrap_or_else(KeepPolicy::unknown);
        }
    }
    Shared { keys, policy, keep }
}

/// The entries of a key.
fn of_key(stored: &StoredKey) -> Vec<(String, Option<String>)> {
    let Key { id, revoked, .. } = &stored.key;
    let mut entries = vec![(format!("{KEY}{id}"), Some(text(stored)))];
    entries.extend(revoked.map(|time| (format!("{REVOKED}{id}"), Some(time.to_string()))));
    entries
}

/// The entries of these limits.
fn of_policy(policy: &Policy) -> Vec<(String, Option<String>)> {
    let teams = policy.teams.iter().map(|(name, team)| (format!("{TEAM}{name}"), Some(text(team))));
    let models = policy.models.iter().map(|(name, model)| (format!("{MODEL}{name}"), Some(text(model))));
    let own = [
        (DEFAULT.to_owned(), Some(text(&policy.default_limits))),
        (CURRENCY.to_owned(), policy.currency.as_ref().map(text)),
    ];
    teams.chain(models).chain(own).collect()
}

/// The entry with the policy of kept prompts.
fn of_keep(policy: &KeepPolicy) -> [(String, Option<String>); 1] {
    [(KEEP.to_owned(), Some(text(policy)))]
}

/// Writes the entries that the document lacks or has differently.
fn write(
    document: &mut Document,
    author: NodeId,
    entries: &[(String, Option<String>)],
) -> Result<(), DocumentError> {
    for (name, value) in entries {
        let known = document.access().get(name).and_then(|register| register.value.as_ref());
        if known != value.as_ref() {
            document.set_access(author, name, value.clone())?;
        }
    }
    Ok(())
}

/// Writes these limits, and removes those of teams and models that they do not contain.
fn write_policy(document: &mut Document, author: NodeId, policy: &Policy) -> Result<(), DocumentError> {
    let wanted = of_policy(policy);
    let is_limit = |name: &str| name.starts_with(TEAM) || name.starts_with(MODEL);
    let gone: Vec<(String, Option<String>)> = document
        .access()
        .iter()
        .filter(|(name, register)| register.value.is_some() && is_limit(name))
        .filter(|(name, _)| wanted.iter().all(|(known, _)| known != *name))
        .map(|(name, _)| (name.clone(), None))
        .collect();
    write(document, author, &gone)?;
    write(document, author, &wanted)
}

/// Whether a document has, or had, a key, readable or not.
fn has_keys(document: &Document) -> bool {
    document.access().keys().any(|name| name.starts_with(KEY))
}

/// Whether a store has keys and the document has none.
fn lacks_keys(document: &Document, store: &Shared) -> bool {
    !store.keys.is_empty() && !has_keys(document)
}

/// Writes entries of a store that the document has never had. Limits and the policy of kept prompts
/// are the cluster's once it has some: a joining node must not change them for others.
fn import(document: &mut Document, author: NodeId, store: &Shared) -> Result<(), DocumentError> {
    let Shared { keys, policy, keep } = store;
    let lacks = |document: &Document, entries: &[(String, Option<String>)]| {
        entries.iter().all(|(name, _)| !document.access().contains_key(name))
    };
    keys.iter().try_for_each(|key| write(document, author, &of_key(key)))?;
    let (keep, limits) = (
        if *keep == KeepPolicy::default() { Vec::new() } else { of_keep(keep).to_vec() },
        if *policy == Policy::default() { Vec::new() } else { of_policy(policy) },
    );
    for entries in [keep, limits] {
        if lacks(document, &entries) {
            write(document, author, &entries)?;
        }
    }
    Ok(())
}

/// The other nodes, as this node's store sees them. Must not keep the agent alive.
#[derive(Debug)]
struct Others {
    agent: Weak<Inner>,
    runtime: Handle,
}

impl Others {
    fn agent(&self) -> Result<Agent, String> {
        self.agent.upgrade().map(Agent).ok_or_else(|| "the node ends".to_owned())
    }

    fn change(
        &self,
        change: impl FnOnce(&mut Document, NodeId) -> Result<(), DocumentError>,
    ) -> Result<(), String> {
        let agent = self.agent()?;
        let me = agent.0.id;
        let spread = self.runtime.block_on(agent.change(|document| change(document, me)))?;
        if !spread {
            tracing::warn!("no other node has heard of the change of keys, limits or kept prompts yet");
        }
        Ok(())
    }
}

impl Peers for Others {
    fn put_key(&self, key: &StoredKey) -> Result<(), String> {
        self.change(|document, me| write(document, me, &of_key(key)))
    }

    fn put_policy(&self, policy: &Policy) -> Result<(), String> {
        self.change(|document, me| write_policy(document, me, policy))
    }

    fn put_keep_policy(&self, policy: &KeepPolicy) -> Result<(), String> {
        self.change(|document, me| write(document, me, &of_keep(policy)))
    }

    fn look(&self, wanted: &Wanted) -> Vec<(String, Result<Found, String>)> {
        let Ok(agent) = self.agent() else { return Vec::new() };
        self.runtime.block_on(agent.look_at_others(wanted))
    }

    fn standings(&self, limited: &[Limited]) -> Option<Vec<Standing>> {
        let agent = self.agent().ok()?;
        self.runtime.block_on(agent.standings(limited))
    }
}

impl Agent {
    /// Makes this node's store one of the cluster's. Its keys, limits and policy of kept prompts
    /// become the cluster's if they were made before the first start of the node, or if the
    /// document has none, because the store was restored or the document lost.
    pub(super) fn share_store(&self, access: &Access) -> Result<(), String> {
        let is_new = !access.is_shared().map_err(|error| error.to_string())?;
        let others = Others { agent: std::sync::Arc::downgrade(&self.0), runtime: Handle::current() };
        access.share(&self.0.options.name, std::sync::Arc::new(others));
        let mut state = self.lock();
        let (shared, document) = (access.shared(), state.membership.document());
        if is_new || document.access().is_empty() || lacks_keys(document, &shared) {
            let me = self.0.id;
            let taken = state.membership.change(|document| import(document, me, &shared));
            taken.map_err(|error| error.to_string())?;
        }
        state.shares_store = true;
        self.settle(&mut state);
        self.follow_keys(&mut state);
        Ok(())
    }

    /// Adopts changed keys and limits of the document, so that a revoked key is refused from now
    /// on.
    pub(super) fn follow_keys(&self, state: &mut State) {
        let Some(access) = self.0.options.access.clone() else { return };
        let document = state.membership.document();
        if !state.shares_store || state.followed.as_ref() == Some(document.access()) {
            return;
        }
        // A gateway that requires keys must not become open: if the joined cluster has no keys, the
        // node's own keys become the cluster's.
        let own = access.shared();
        if has_keys(document) || !own.keys.is_empty() {
            access.need_keys();
        }
        if lacks_keys(document, &own) {
            let me = self.0.id;
            match state.membership.change(|document| import(document, me, &own)) {
                // The change is an event that leads here again.
                Ok(_) => {}
                Err(error) => tracing::error!("the node's keys cannot become the cluster's: {error}"),
            }
            return;
        }
        let shared = read(document);
        state.followed = Some(document.access().clone());
        access.adopt(shared);
        self.recount();
        // The store is for backups and the next start, so requests do not wait for the disk.
        tokio::task::spawn_blocking(move || {
            if let Err(error) = access.keep_shared() {
                tracing::error!("the cluster's keys are only in the cluster's document: {error}");
            }
        });
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
    use thunder_access::NewKey;

    use super::*;

    fn key(name: &str) -> StoredKey {
        let new = NewKey { name: name.into(), ..NewKey::default() };
        StoredKey::create(new, "abcdefgh", Time(1000)).unwrap().0
    }

    #[test]
    fn a_revoked_key_stays_revoked_whatever_another_node_changed_at_the_same_time() {
        let (a, b) = (NodeId([1; 32]), NodeId([2; 32]));
        let mut ours = Document::default();
        write(&mut ours, a, &of_key(&key("ci"))).unwrap();
        let mut theirs = ours.clone();
        let mut revoked = key("ci");
        revoked.key.revoked = Some(Time(5000));
        write(&mut ours, a, &of_key(&revoked)).unwrap();
        // The other node writes later, twice, and its key wins as a whole.
        for name in ["ci-2", "ci-3"] {
            write(&mut theirs, b, &of_key(&key(name))).unwrap();
        }
        let mut merged = theirs.clone();
        assert!(merged.merge(&ours));
        assert!(ours.merge(&theirs));
        assert_eq!(ours, merged);
        let Shared { keys, .. } = read(&merged);
        assert_eq!((keys[0].key.name.as_str(), keys[0].key.revoked), ("ci-3", Some(Time(5000))));
    }

    #[test]
    fn a_store_that_joins_brings_its_keys_and_leaves_the_clusters_limits() {
        let (a, b) = (NodeId([1; 32]), NodeId([2; 32]));
        let policy = |text: &str| serde_json::from_str::<Policy>(text).unwrap();
        let of_cluster = policy(r#"{"currency": "EUR", "teams": {"x": {"weight": 2}}}"#);
        let own = policy(r#"{"currency": "GBP", "teams": {"y": {"weight": 3}}}"#);
        let store = Shared { keys: vec![key("boss")], policy: own.clone(), keep: KeepPolicy::default() };
        let mut document = Document::default();
        write_policy(&mut document, a, &of_cluster).unwrap();
        import(&mut document, b, &store).unwrap();
        let Shared { keys, policy, .. } = read(&document);
        assert_eq!((keys.len(), policy), (1, of_cluster));
        // A document without any entry gets all of them.
        let mut lost = Document::default();
        import(&mut lost, b, &store).unwrap();
        assert_eq!(read(&lost).policy, own);
    }

    #[test]
    fn limits_of_different_teams_are_different_entries() {
        let (a, b) = (NodeId([1; 32]), NodeId([2; 32]));
        let policy = |text: &str| serde_json::from_str::<Policy>(text).unwrap();
        let first = policy(r#"{"currency": "EUR", "teams": {"x": {"weight": 2}, "y": {"weight": 3}}}"#);
        let mut ours = Document::default();
        write_policy(&mut ours, a, &first).unwrap();
        assert_eq!(read(&ours).policy, first);
        let mut theirs = ours.clone();
        let without_x = policy(r#"{"currency": "EUR", "teams": {"y": {"weight": 3}}}"#);
        write_policy(&mut ours, a, &without_x).unwrap();
        let with_z = policy(
            r#"{"currency": "EUR", "teams": {"x": {"weight": 2}, "y": {"weight": 3}, "z": {"weight": 4}}}"#,
        );
        write_policy(&mut theirs, b, &with_z).unwrap();
        ours.merge(&theirs);
        let merged = read(&ours).policy;
        assert_eq!(merged.teams.keys().collect::<Vec<_>>(), ["y", "z"]);
        assert_eq!(merged.currency.as_deref(), Some("EUR"));
    }

    #[test]
    fn what_cannot_be_read_is_left_out() {
        let mut document = Document::default();
        let me = NodeId([1; 32]);
        write(&mut document, me, &of_key(&key("ci"))).unwrap();
        document.set_access(me, "key/k_later", Some("{\"of\": \"a later version\"}".into())).unwrap();
        document.set_access(me, "team/x", Some("?".into())).unwrap();
        document.set_access(me, "keep", Some("{\"all\": true, \"of\": \"a later version\"}".into())).unwrap();
        let Shared { keys, policy, keep } = read(&document);
        assert_eq!((keys.len(), policy), (1, Policy::default()));
        assert_eq!(keep, KeepPolicy::unknown(), "nothing is kept, and nothing removed");
        let policy = KeepPolicy { teams: vec!["lab".into()], days: 7, ..KeepPolicy::default() };
        write(&mut document, me, &of_keep(&policy)).unwrap();
        assert_eq!(read(&document).keep, policy);
    }
}
