//! API keys: their owners, permissions, limits and expiry.

use serde::{Deserialize, Serialize};

use crate::limits::Limits;
use crate::secret::{self, RandomError, SecretHash};
use crate::time::Time;

/// Longest name, owner, team or model of a key, in characters.
pub const LONGEST_NAME: usize = 100;
/// Maximum number of models that a key names.
const MOST_MODELS: usize = 100;
/// Longest grace time of a rotation: 90 days.
pub const LONGEST_GRACE_S: u64 = 90 * 24 * 3600;

/// What a key may do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// Uses models, and sees its own usage.
    #[default]
    User,
    /// Also makes keys, sets limits and sees everything.
    Admin,
}

/// Whether a key works.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum KeyState {
    /// It works.
    Active,
    /// The key works, and its former secret still works for some time.
    Rotating,
    /// Its time is over.
    Expired,
    /// It was revoked.
    Revoked,
}

/// A key without its secret.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Key {
    /// `k_` and eight letters; never reused.
    pub id: String,
    /// Unique among the keys that are not revoked.
    pub name: String,
    /// A person or service.
    pub owner: Option<String>,
    /// Team that it counts for.
    pub team: Option<String>,
    /// What it may do.
    pub role: Role,
    /// When it was made.
    pub created: Time,
    /// The key is refused from this time on.
    pub expires: Option<Time>,
    /// When it was revoked.
    pub revoked: Option<Time>,
    /// The former secret works until this time.
    pub grace_until: Option<Time>,
    /// Models that it may use, by full name or last part; `*` is any.
    pub models: Vec<String>,
    /// Its own limits.
    pub limits: Limits,
}

/// The properties of a new key.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NewKey {
    /// Its name.
    pub name: String,
    /// A person or service.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub owner: Option<String>,
    /// Its team.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub team: Option<String>,
    /// What it may do.
    #[serde(default)]
    pub role: Role,
    /// When it ends.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expires: Option<Time>,
    /// Models that it may use; absent: any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub models: Option<Vec<String>>,
    /// Its own limits.
    #[serde(default)]
    pub limits: Limits,
}

/// A change of a key: an absent field stays unchanged, `null` clears it.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KeyChange {
    /// A new name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// Another owner.
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "present")]
    pub owner: Option<Option<String>>,
    /// Another team.
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "present")]
    pub team: Option<Option<String>>,
    /// Another role.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub role: Option<Role>,
    /// Another end.
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "present")]
    pub expires: Option<Option<Time>>,
    /// Other models; `null`: any.
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "present")]
    pub models: Option<Option<Vec<String>>>,
    /// Limits that replace all previous ones.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limits: Option<Limits>,
}

/// A present field, even if it is `null`.
fn present<'de, T, D>(deserializer: D) -> Result<Option<Option<T>>, D::Error>
where
    T: Deserialize<'de>,
    D: serde::Deserializer<'de>,
{
    Option::<T>::deserialize(deserializer).map(Some)
}

/// Why the properties of a key are refused.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum BadKey {
    /// A text is empty, too long, or has control characters.
    #[error(
        "`{field}` is \"{value}\", but must be 1 to {LONGEST_NAME} characters without control characters"
    )]
    Text {
        /// The field.
        field: &'static str,
        /// Its value, shortened.
        value: String,
    },
    /// No models, or too many.
    #[error("`models` has {0} names, but must have 1 to {MOST_MODELS}; [\"*\"] allows any model")]
    Models(usize),
    /// The key would expire before it begins.
    #[error("`expires` is {0}, which is over already")]
    Over(Time),
    /// The grace time is too long.
    #[error("`grace_s` is {0}, but must be at most {LONGEST_GRACE_S} (90 days)")]
    Grace(u64),
    /// A limit is not valid.
    #[error("{0}")]
    Limits(#[from] crate::limits::BadLimit),
}

impl BadKey {
    /// The field that is wrong.
    pub fn field(&self) -> &'static str {
        match self {
            Self::Text { field, .. } => field,
            Self::Models(_) => "models",
            Self::Over(_) => "expires",
            Self::Grace(_) => "grace_s",
            Self::Limits(_) => "limits",
        }
    }
}

/// A key with the hashes of its secrets, as it is stored.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct StoredKey {
    /// The key.
    pub key: Key,
    current: SecretHash,
    /// The former secret, which works until `key.grace_until`.
    former: Option<SecretHash>,
}

impl StoredKey {
    /// A new key and its secret, which is not stored.
    ///
    /// # Errors
    /// When the system has no random numbers.
    pub fn create(new: NewKey, lookup: &str, now: Time) -> Result<(Self, String), RandomError> {
        let secret = secret::new_secret(lookup)?;
        let key = Key {
            id: format!("k_{lookup}"),
            name: new.name,
            owner: new.owner,
            team: new.team,
            role: new.role,
            created: now,
            expires: new.expires,
            revoked: None,
            grace_until: None,
            models: new.models.unwrap_or_else(|| vec!["*".into()]),
            limits: new.limits,
        };
        Ok((Self { key, current: SecretHash::of(&secret), former: None }, secret))
    }

    /// Gives the key a new secret. The former secret works for another `grace_s` seconds.
    ///
    /// # Errors
    /// When the system has no random numbers.
    pub fn rotate(&mut self, grace_s: u64, now: Time) -> Result<String, RandomError> {
        let secret = secret::new_secret(self.key.lookup())?;
        let former = std::mem::replace(&mut self.current, SecretHash::of(&secret));
        self.former = (grace_s > 0).then_some(former);
        self.key.grace_until =
            (grace_s > 0).then(|| Time(now.0.saturating_add(grace_s.saturating_mul(1000))));
        Ok(secret)
    }

    /// Whether a secret is this key's.
    pub fn opens(&self, secret: &SecretHash, now: Time) -> bool {
        let in_grace = self.key.grace_until.is_some_and(|until| now < until);
        let former = self.former.as_ref().is_some_and(|former| former.matches(secret));
        self.current.matches(secret) | (former & in_grace)
    }

    /// Applies a change.
    pub fn change(&mut self, change: KeyChange) {
        let key = &mut self.key;
        let KeyChange { name, owner, team, role, expires, models, limits } = change;
        key.name = name.unwrap_or_else(|| std::mem::take(&mut key.name));
        key.owner = owner.unwrap_or_else(|| key.owner.take());
        key.team = team.unwrap_or_else(|| key.team.take());
        key.role = role.unwrap_or(key.role);
        key.expires = expires.unwrap_or(key.expires);
        if let Some(models) = models {
            key.models = models.unwrap_or_else(|| vec!["*".into()]);
        }
        key.limits = limits.unwrap_or_else(|| std::mem::take(&mut key.limits));
    }
}

impl Key {
    /// The part of its secrets by which the key is found.
    pub fn lookup(&self) -> &str {
        self.id.strip_prefix("k_").unwrap_or(&self.id)
    }

    /// Whether it works.
    pub fn state(&self, now: Time) -> KeyState {
        if self.revoked.is_some() {
            KeyState::Revoked
        } else if self.expires.is_some_and(|expires| expires <= now) {
            KeyState::Expired
        } else if self.grace_until.is_some_and(|until| now < until) {
            KeyState::Rotating
        } else {
            KeyState::Active
        }
    }

    /// Whether requests with this key are answered.
    pub fn works(&self, now: Time) -> bool {
        matches!(self.state(now), KeyState::Active | KeyState::Rotating)
    }

    /// Whether the key may use a model.
    pub fn allows(&self, model: &str) -> bool {
        let last = model.rsplit('/').next();
        self.models.iter().any(|name| name == "*" || name == model || Some(name.as_str()) == last)
    }

    /// Refuses a model that the key does not name, in words for its holder.
    ///
    /// # Errors
    /// Names the key and its models.
    pub fn check_model(&self, model: &str) -> Result<(), String> {
        if self.allows(model) {
            return Ok(());
        }
        let (name, allowed) = (&self.name, self.models.join(", "));
        Err(format!("the key \"{name}\" may not use \"{model}\", only {allowed}: ask an administrator"))
    }

    /// Checks what people type.
    ///
    /// # Errors
    /// The first field that is wrong.
    pub fn check(&self) -> Result<(), BadKey> {
        check_text("name", &self.name)?;
        self.owner.as_deref().map_or(Ok(()), |owner| check_text("owner", owner))?;
        self.team.as_deref().map_or(Ok(()), |team| check_text("team", team))?;
        if !(1..=MOST_MODELS).contains(&self.models.len()) {
            return Err(BadKey::Models(self.models.len()));
        }
        self.models.iter().try_for_each(|model| check_text("models", model))?;
        Ok(self.limits.check()?)
    }
}

/// Terminals, tables and headers show names.
fn check_text(field: &'static str, value: &str) -> Result<(), BadKey> {
    let length = value.chars().count();
    if (1..=LONGEST_NAME).contains(&length) && !value.chars().any(char::is_control) && value.trim() == value {
        return Ok(());
    }
    Err(BadKey::Text { field, value: value.chars().filter(|letter| !letter.is_control()).take(40).collect() })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key() -> (StoredKey, String) {
        let new = NewKey { name: "ci".into(), ..NewKey::default() };
        StoredKey::create(new, "abcdefgh", Time(1000)).unwrap()
    }

    #[test]
    fn a_former_secret_works_until_its_grace_ends() {
        let (mut stored, first) = key();
        let second = stored.rotate(10, Time(1000)).unwrap();
        let opens = |stored: &StoredKey, secret: &str, ms| stored.opens(&SecretHash::of(secret), Time(ms));
        assert!(opens(&stored, &first, 10_999) && opens(&stored, &second, 10_999));
        assert!(!opens(&stored, &first, 11_000) && opens(&stored, &second, 11_000));
        assert_eq!(stored.key.state(Time(5000)), KeyState::Rotating);
        assert_eq!(stored.key.state(Time(11_000)), KeyState::Active);
        // Without grace the former secret ends at once. An even earlier one is removed for good.
        let third = stored.rotate(0, Time(2000)).unwrap();
        assert!(opens(&stored, &third, 2000));
        assert!(!opens(&stored, &first, 2000) && !opens(&stored, &second, 2000));
    }

    #[test]
    fn a_key_allows_the_models_that_it_names() {
        let (mut stored, _) = key();
        assert!(stored.key.allows("any/model"));
        stored.change(serde_json::from_str(r#"{"models": ["small", "org/large"]}"#).unwrap());
        assert!(stored.key.allows("org/small") && stored.key.allows("org/large"));
        assert!(!stored.key.allows("other/larger") && !stored.key.allows("large"));
    }

    #[test]
    fn a_change_keeps_what_it_does_not_name() {
        let (mut stored, _) = key();
        stored.change(
            serde_json::from_str(r#"{"owner": "ann", "team": "a", "expires": "2030-01-01"}"#).unwrap(),
        );
        stored.change(serde_json::from_str(r#"{"team": null}"#).unwrap());
        assert_eq!((stored.key.owner.as_deref(), stored.key.team.as_deref()), (Some("ann"), None));
        assert_eq!(stored.key.state("2030-01-01".parse().unwrap()), KeyState::Expired);
        assert!(serde_json::from_str::<KeyChange>(r#"{"secret": "x"}"#).is_err());
    }

    #[test]
    fn names_are_checked() {
        for bad in ["", " ci", "a\nb", "\u{1b}[31m", &"x".repeat(101)] {
            let (mut stored, _) = key();
            stored.key.name = bad.into();
            let error = stored.key.check().unwrap_err();
            assert_eq!(error.field(), "name");
            assert!(!error.to_string().contains(char::is_control), "{error}");
        }
        let (mut stored, _) = key();
        stored.key.models.clear();
        assert_eq!(stored.key.check(), Err(BadKey::Models(0)));
    }
}
