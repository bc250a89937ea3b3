//! Acts of administrators: keys, limits, reports. The audit log has each act.

use std::sync::{Arc, PoisonError};

use serde_json::{Value, json};

use super::{Access, lock};
use crate::audit::{Actor, Chain, Sealed};
use crate::error::AccessError;
use crate::key::{BadKey, Key, KeyChange, KeyState, LONGEST_GRACE_S, NewKey, Role, StoredKey};
use crate::limits::Policy;
use crate::meter::Scope;
use crate::secret;
use crate::store::{Act, AuditFilter};
use crate::time::Time;
use crate::usage::{By, Filter, Groups, UsageRecord};

impl Access {
    /// Creates a key. Returns it with its secret, which is not stored.
    ///
    /// # Errors
    /// When a field is wrong, the name is taken, or the disk fails.
    pub fn create_key(&self, new: NewKey, actor: &Actor, now: Time) -> Result<(Key, String), AccessError> {
        let _changing = lock(&self.0.changing);
        if let Some(expires) = new.expires.filter(|expires| *expires <= now) {
            return Err(BadKey::Over(expires).into());
        }
        let keys = self.keys();
        check_name(keys.iter(), &new.name, None)?;
        let mut lookup = secret::new_lookup()?;
        while keys.iter().any(|key| key.lookup() == lookup) {
            lookup = secret::new_lookup()?;
        }
        let (stored, secret) = StoredKey::create(new, &lookup, now)?;
        stored.key.check()?;
        self.give_key(&stored)?;
        let act = act(actor, now, "key.create", &stored.key.id, details(&stored.key));
        self.0.store.put_keys(&[&stored], &act)?;
        let key = stored.key.clone();
        self.0.keys.write().unwrap_or_else(PoisonError::into_inner).insert(lookup, Arc::new(stored));
        Ok((key, secret))
    }

    /// All keys, the newest first.
    pub fn keys(&self) -> Vec<Key> {
        let keys = self.0.keys.read().unwrap_or_else(PoisonError::into_inner);
        let mut keys: Vec<Key> = keys.values().map(|stored| stored.key.clone()).collect();
        keys.sort_by(|a, b| b.created.cmp(&a.created).then_with(|| a.id.cmp(&b.id)));
        keys
    }

    /// A key by its id or its name. If several keys have the name, the active one.
    ///
    /// # Errors
    /// When there is none.
    pub fn key(&self, name: &str, now: Time) -> Result<Key, AccessError> {
        let keys = self.keys();
        let named = || keys.iter().filter(|key| key.name == name);
        let found = keys.iter().find(|key| key.id == name);
        let found = found.or_else(|| named().find(|key| key.works(now))).or_else(|| named().next());
        found.cloned().ok_or_else(|| AccessError::NoKey(name.chars().take(100).collect()))
    }

    /// Changes a key.
    ///
    /// # Errors
    /// When there is no such key, it was revoked, or a field is wrong.
    pub fn change_key(
        &self,
        name: &str,
        change: KeyChange,
        actor: &Actor,
        now: Time,
    ) -> Result<Key, AccessError> {
        if let Some(expires) = change.expires.flatten().filter(|expires| *expires <= now) {
            return Err(BadKey::Over(expires).into());
        }
        let ends_admin = change.role == Some(Role::User) || change.expires.flatten().is_some();
        let details = serde_json::to_value(&change).unwrap_or_default();
        self.with_key(name, "key.update", actor, now, |access, stored| {
            if let Some(name) = &change.name {
                check_name(access.keys().iter(), name, Some(&stored.key.id))?;
            }
            let is_admin = stored.key.role == Role::Admin && stored.key.works(now);
            if is_admin && ends_admin && !access.has_other_admin(&stored.key.id, now) {
                return Err(AccessError::LastAdmin(stored.key.name.clone()));
            }
            stored.change(change);
            stored.key.check()?;
            Ok(((), details))
        })
        .map(|(key, ())| key)
    }

    /// Gives a key a new secret. The former secret works for another `grace_s` seconds.
    ///
    /// # Errors
    /// When there is no such key, or it was revoked.
    pub fn rotate_key(
        &self,
        name: &str,
        grace_s: u64,
        actor: &Actor,
        now: Time,
    ) -> Result<(Key, String), AccessError> {
        if grace_s > LONGEST_GRACE_S {
            return Err(BadKey::Grace(grace_s).into());
        }
        self.with_key(name, "key.rotate", actor, now, |_, stored| {
            Ok((stored.rotate(grace_s, now)?, json!({"name": stored.key.name, "grace_s": grace_s})))
        })
    }

    /// Revokes a key, at once and permanently.
    ///
    /// # Errors
    /// When there is no such key, or nobody could administer the server any more.
    pub fn revoke_key(&self, name: &str, actor: &Actor, now: Time) -> Result<Key, AccessError> {
        self.with_key(name, "key.revoke", actor, now, |access, stored| {
            let is_admin = stored.key.role == Role::Admin && stored.key.works(now);
            // The server's own user needs no key.
            if is_admin && *actor != Actor::local() && !access.has_other_admin(&stored.key.id, now) {
                return Err(AccessError::LastAdmin(stored.key.name.clone()));
            }
            stored.key.revoked = Some(now);
            Ok(((), json!({"name": stored.key.name})))
        })
        .map(|(key, ())| key)
    }

    /// Gives a person who signed in at a provider a secret that works until `new.expires`. A person
    /// has one key; its former secret keeps working, for a second browser. Role, owner and expiry
    /// come from `new`; limits and models of an existing key stay.
    ///
    /// # Errors
    /// When an administrator has revoked the person's key, or the disk fails.
    pub fn sign_in(&self, new: NewKey, actor: &Actor, now: Time) -> Result<(Key, String), AccessError> {
        let found = match self.key(&new.name, now) {
            Ok(found) => found,
            Err(AccessError::NoKey(_)) => return self.create_key(new, actor, now),
            Err(error) => return Err(error),
        };
        let grace_s = new.expires.map_or(0, |expires| expires.0.saturating_sub(now.0) / 1000);
        let grace_s = grace_s.min(LONGEST_GRACE_S);
        self.with_key(&found.id, "key.sign_in", actor, now, |_, stored| {
            let key = &mut stored.key;
            let former_works = key.works(now);
            (key.owner, key.role, key.expires) = (new.owner, new.role, new.expires);
            let details = json!({"name": key.name, "role": key.role, "expires": key.expires});
            Ok((stored.rotate(if former_works { grace_s } else { 0 }, now)?, details))
        })
    }

    fn with_key<T>(
        &self,
        name: &str,
        action: &str,
        actor: &Actor,
        now: Time,
        change: impl FnOnce(&Self, &mut StoredKey) -> Result<(T, Value), AccessError>,
    ) -> Result<(Key, T), AccessError> {
        // Only one change at a time runs, from its check to its end. Requests continue.
        let _changing = lock(&self.0.changing);
        let key = self.key(name, now)?;
        if key.state(now) == KeyState::Revoked {
            return Err(AccessError::Revoked(key.name));
        }
        let read = |keys: &super::KeyRing| keys.get(key.lookup()).cloned();
        let stored = read(&self.0.keys.read().unwrap_or_else(PoisonError::into_inner));
        let mut stored =
            stored.map(Arc::unwrap_or_clone).ok_or_else(|| AccessError::NoKey(key.id.clone()))?;
        let before = stored.clone();
        let (value, details) = change(self, &mut stored)?;
        if stored == before {
            return Ok((key, value));
        }
        self.give_key(&stored)?;
        self.0.store.put_keys(&[&stored], &act(actor, now, action, &key.id, details))?;
        let changed = stored.key.clone();
        let mut keys = self.0.keys.write().unwrap_or_else(PoisonError::into_inner);
        keys.insert(key.lookup().to_owned(), Arc::new(stored));
        drop(keys);
        if changed.revoked.is_some() {
            lock(&self.0.meter).forget(&Scope::Key(changed.id.clone()));
        }
        Ok((changed, value))
    }

    /// Replaces all limits except those of single keys. With `based_on`, only if that version is in
    /// force ([`Policy::version`]).
    ///
    /// # Errors
    /// When a value is wrong, somebody else has changed them, or the disk fails.
    pub fn set_policy(
        &self,
        policy: Policy,
        based_on: Option<&str>,
        actor: &Actor,
        now: Time,
    ) -> Result<(), AccessError> {
        policy.check()?;
        let _changing = lock(&self.0.changing);
        let current = self.policy();
        if based_on.is_some_and(|version| version != current.version()) {
            return Err(AccessError::PolicyChanged);
        }
        if policy.changes_nothing_in(&current) {
            return Ok(());
        }
        if let Some(peers) = self.peers() {
            peers.put_policy(&policy).map_err(AccessError::Peers)?;
        }
        let details = serde_json::to_value(&policy).unwrap_or_default();
        let act = Act { actor, time: now, action: "limits.set", subject: None, details };
        self.0.store.put_policy(&policy, &act)?;
        *self.0.policy.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(policy);
        Ok(())
    }

    /// Writes an administrative act of another part to the audit log.
    ///
    /// # Errors
    /// When the disk fails.
    pub fn note_act(
        &self,
        actor: &Actor,
        action: &str,
        subject: Option<&str>,
        details: Value,
        now: Time,
    ) -> Result<(), AccessError> {
        self.0.store.note(&Act { actor, time: now, action, subject, details })
    }

    /// Sums of usage in whole hours, divided by these.
    ///
    /// # Errors
    /// When the disk fails.
    pub fn sums(&self, filter: &Filter, by: &[By]) -> Result<Groups, AccessError> {
        self.move_records()?;
        self.0.store.sums(filter, by)
    }

    /// At most `limit` usage records with numbers below `before`, the newest first.
    ///
    /// # Errors
    /// When the disk fails.
    pub fn records(
        &self,
        filter: &Filter,
        before: Option<u64>,
        limit: usize,
    ) -> Result<Vec<UsageRecord>, AccessError> {
        self.move_records()?;
        let mut records = Vec::new();
        self.0.store.each_record(filter, before.unwrap_or(u64::MAX), |record| {
            records.push(record);
            records.len() < limit
        })?;
        Ok(records)
    }

    /// At most `limit` entries of the audit log with numbers below `before`, the newest first.
    ///
    /// # Errors
    /// When the disk fails.
    pub fn audit(
        &self,
        filter: &AuditFilter,
        before: Option<u64>,
        limit: usize,
    ) -> Result<Vec<(u64, Sealed)>, AccessError> {
        let mut entries = Vec::new();
        self.0.store.each_entry(filter, before.unwrap_or(u64::MAX), |number, sealed| {
            entries.push((number, sealed));
            entries.len() < limit
        })?;
        Ok(entries)
    }

    /// Checks the audit log from its first entry to its last.
    ///
    /// # Errors
    /// When it was changed ([`AccessError::Audit`]), or the disk fails.
    pub fn verify_audit(&self) -> Result<Chain, AccessError> {
        self.0.store.verify()
    }

    /// Usage records in the store, and entries of the audit log.
    ///
    /// # Errors
    /// When the disk fails.
    pub fn counts(&self) -> Result<(u64, u64), AccessError> {
        self.0.store.counts()
    }
}

/// Refuses the name of a key that is not revoked.
fn check_name<'a>(
    mut keys: impl Iterator<Item = &'a Key>,
    name: &str,
    own: Option<&str>,
) -> Result<(), AccessError> {
    let taken = |key: &Key| {
        let is_name = key.name == name && key.revoked.is_none();
        (is_name || key.id == name) && own != Some(key.id.as_str())
    };
    if keys.any(taken) { Err(AccessError::KeyExists(name.chars().take(100).collect())) } else { Ok(()) }
}

/// Details of a new key for the audit log.
fn details(key: &Key) -> Value {
    json!({
        "name": key.name, "owner": key.owner, "team": key.team, "role": key.role, "expires": key.expires,
        "models": key.models, "limits": key.limits,
    })
}

fn act<'a>(actor: &'a Actor, time: Time, action: &'a str, subject: &'a str, details: Value) -> Act<'a> {
    Act { actor, time, action, subject: Some(subject), details }
}
