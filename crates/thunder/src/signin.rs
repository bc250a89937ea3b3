//! Sign-in to the dashboard at an OpenID Connect provider: permissions, and keys for the people.
//!
//! A person who signs in gets a key for some hours, so that limits, usage and the audit log treat
//! the person like other keys' holders, on every node of a cluster.

use std::path::PathBuf;
use std::sync::Arc;

use anyhow::bail;
use clap::Args;
use serde::Deserialize;
use serde_json::json;
use sha2::{Digest, Sha256};
use thunder_access::{Access, AccessError, Actor, NewKey, Now, Role, Time, hex};
use thunder_dashboard::{Answer, Ask};
use thunder_signin::{Options, Person, SignIn, SignInError};

/// Prefix of the names of these keys.
const PREFIX: &str = "sso:";
/// Longer identities are replaced by a digest: names of keys have at most 100 characters.
const LONGEST_IDENTITY: usize = 90;

#[derive(Args, Clone)]
pub struct SignInArgs {
    /// Address of the OpenID Connect provider at which people sign in to the dashboard, e.g.
    /// https://login.example.org/realms/firm
    ///
    /// Every request then needs a key or a sign-in. At the provider, register this server's
    /// addresses for --oidc-client, e.g. https://models.example.org:8000/. http works only on this
    /// machine.
    #[arg(long, value_name = "URL", env = "THUNDER_OIDC_ISSUER", requires = "oidc_client")]
    oidc_issuer: Option<String>,
    /// This server's client id at the provider
    #[arg(long, value_name = "ID", env = "THUNDER_OIDC_CLIENT", requires = "oidc_issuer")]
    oidc_client: Option<String>,
    /// This server's client secret at the provider, if it has one
    ///
    /// Use THUNDER_OIDC_SECRET to keep the secret out of the process list.
    #[arg(
        long,
        value_name = "SECRET",
        env = "THUNDER_OIDC_SECRET",
        hide_env_values = true,
        requires = "oidc_issuer"
    )]
    oidc_secret: Option<String>,
    /// Who may sign in: an e-mail address, @DOMAIN, or a group of the provider; may be repeated
    /// [default: everybody with an account there]
    ///
    /// Use it if anybody can get an account at the provider.
    #[arg(long, value_name = "WHO", requires = "oidc_issuer")]
    oidc_allow: Vec<String>,
    /// Who becomes an administrator by signing in: an e-mail address, @DOMAIN, or a group; may be
    /// repeated [default: nobody]
    #[arg(long, value_name = "WHO", requires = "oidc_issuer")]
    oidc_admin: Vec<String>,
    /// Name of the field with a person's groups in the provider's tokens
    #[arg(long, value_name = "NAME", default_value = "groups")]
    oidc_groups: String,
    /// Scopes to request from the provider; some providers send groups only for the scope `groups`
    #[arg(long, value_name = "SCOPES", default_value = "email profile")]
    oidc_scopes: String,
    /// PEM file with the certificate authorities to trust for the provider [default: the public
    /// ones]
    #[arg(long, value_name = "FILE", requires = "oidc_issuer")]
    oidc_ca: Option<PathBuf>,
    /// Hours until a person must sign in again
    #[arg(long, value_name = "HOURS", default_value_t = 12, value_parser = clap::value_parser!(u32).range(1..=720))]
    oidc_hours: u32,
}

impl SignInArgs {
    /// The door for people who sign in, if there is a provider. Only [`Door::close`] closes it for
    /// others.
    ///
    /// # Errors
    /// When there is no store for keys, or an option cannot be used.
    pub fn open(&self, access: Option<&Access>) -> anyhow::Result<Option<Arc<Door>>> {
        let Some(sign_in) = self.sign_in()? else { return Ok(None) };
        let Some(access) = access.cloned() else {
            bail!("--oidc-issuer needs a store, for the keys of those who sign in: give --store FOLDER");
        };
        let life_ms = u64::from(self.oidc_hours) * 3_600_000;
        let (allow, admins) = (self.oidc_allow.clone(), self.oidc_admin.clone());
        Ok(Some(Arc::new(Door { sign_in, access, allow, admins, life_ms })))
    }

    /// Refuses what [`SignInArgs::open`] would refuse, without the provider and a store.
    ///
    /// # Errors
    /// Names the option.
    pub fn check(&self) -> anyhow::Result<()> {
        self.sign_in().map(drop)
    }

    /// The sign-in at the provider, if there is one; the provider is not asked.
    fn sign_in(&self) -> anyhow::Result<Option<SignIn>> {
        let (Some(issuer), Some(client_id)) = (self.oidc_issuer.clone(), self.oidc_client.clone()) else {
            return Ok(None);
        };
        for who in self.oidc_allow.iter().chain(&self.oidc_admin) {
            if who.trim().is_empty() || who == "@" {
                bail!("--oidc-allow and --oidc-admin take an address, @DOMAIN or a group, not \"{who}\"");
            }
        }
        let options = Options {
            issuer,
            client_id,
            client_secret: self.oidc_secret.clone().filter(|secret| !secret.is_empty()),
            scopes: self.oidc_scopes.clone(),
            groups_claim: self.oidc_groups.clone(),
            certificates: self.oidc_ca.clone(),
        };
        SignIn::new(options).map(Some).map_err(|error| {
            let of_file = matches!(error, SignInError::Certificates { .. });
            anyhow::Error::from(error).context(if of_file { "--oidc-ca" } else { "--oidc-issuer" })
        })
    }
}

/// Admits people who sign in at a provider.
#[derive(Debug)]
pub struct Door {
    sign_in: SignIn,
    access: Access,
    allow: Vec<String>,
    admins: Vec<String>,
    life_ms: u64,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct BeginBody {
    redirect: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct FinishBody {
    state: String,
    code: String,
}

/// Answers a request below `/auth`; `None` for other paths.
pub fn answer(door: Option<&Door>, ask: &Ask<'_>) -> Option<Answer> {
    let offer = door.map(|door| json!({"issuer": door.sign_in.issuer()}));
    match (ask.method, ask.path, door) {
        ("GET", "/auth", _) => Some(Answer::ok(json!({"sign_in": offer}))),
        ("POST", "/auth/begin", Some(door)) => Some(door.begin(ask.body)),
        ("POST", "/auth/finish", Some(door)) => Some(door.finish(ask.body, Now::read().time)),
        _ => None,
    }
}

impl Door {
    /// From now on every request needs a key.
    pub fn close(&self) {
        self.access.need_keys();
    }

    /// Closes the door, and looks for its provider.
    pub fn put_in_force(self: &Arc<Self>) {
        self.close();
        self.look();
    }

    /// Warns if the provider cannot be reached now. The server starts anyway: the provider may
    /// start later, and keys work without it.
    pub fn look(self: &Arc<Self>) {
        let door = self.clone();
        let looking = move || {
            if let Err(error) = door.sign_in.reach() {
                tracing::warn!("nobody can sign in now: {error}; see --oidc-issuer and --oidc-ca");
            }
        };
        // Without the thread, the first sign-in says what is wrong.
        let _ = std::thread::Builder::new().name("sign-in".into()).spawn(looking);
    }

    fn begin(&self, body: &[u8]) -> Answer {
        let body: BeginBody = match serde_json::from_slice(body) {
            Ok(body) => body,
            Err(error) => return malformed(&error),
        };
        match self.sign_in.begin(&body.redirect) {
            Ok(begun) => Answer::ok(json!({"url": begun.url, "state": begun.state})),
            Err(error) => refused(&error),
        }
    }

    fn finish(&self, body: &[u8], now: Time) -> Answer {
        let body: FinishBody = match serde_json::from_slice(body) {
            Ok(body) => body,
            Err(error) => return malformed(&error),
        };
        match self.sign_in.finish(&body.state, &body.code) {
            Ok(person) => self.admit(&person, now),
            Err(error) => refused(&error),
        }
    }

    /// Gives a person a key, if they may sign in.
    fn admit(&self, person: &Person, now: Time) -> Answer {
        let identity = person.email.as_deref().unwrap_or(&person.subject).to_owned();
        if !self.allow.is_empty() && !self.allow.iter().any(|who| is_of(who, person)) {
            tracing::warn!(identity, "signed in at the provider, but may not use this server");
            let message =
                format!("{identity} may not use this server: its operator says who may by --oidc-allow");
            return Answer::error(403, "not_allowed", &message);
        }
        let is_admin = self.admins.iter().any(|who| is_of(who, person));
        let new = NewKey {
            name: key_name(&identity),
            owner: Some(identity.chars().take(LONGEST_IDENTITY).collect()),
            role: if is_admin { Role::Admin } else { Role::User },
            expires: Some(Time(now.0.saturating_add(self.life_ms))),
            ..NewKey::default()
        };
        let actor = Actor { name: format!("sign-in at {}", self.sign_in.issuer()), remote: None };
        match self.access.sign_in(new, &actor, now) {
            Ok((key, secret)) => Answer::ok(json!({
                "secret": secret, "name": person.name.as_deref().unwrap_or(&identity), "key": key.name,
                "role": key.role, "expires": key.expires,
            })),
            Err(AccessError::Revoked(name)) => {
                let message = format!(
                    "an administrator has revoked \"{name}\"; `thunder keys create {name}` lets them in again"
                );
                Answer::error(403, "revoked", &message)
            }
            Err(error) => Answer::error(503, "store_failed", &error.to_string()),
        }
    }
}

/// The name of a person's key. Case in addresses is ignored.
fn key_name(identity: &str) -> String {
    let identity = identity.to_lowercase();
    if identity.chars().count() <= LONGEST_IDENTITY {
        return format!("{PREFIX}{identity}");
    }
    format!("{PREFIX}{}", hex(&Sha256::digest(identity.as_bytes())))
}

/// Whether an address, `@DOMAIN` or the name of a group includes a person.
fn is_of(who: &str, person: &Person) -> bool {
    let email = person.email.as_deref().unwrap_or_default().to_lowercase();
    match who.strip_prefix('@') {
        Some(domain) => email.rsplit_once('@').is_some_and(|(_, of)| of == domain.to_lowercase()),
        None if who.contains('@') => email == who.to_lowercase(),
        None => person.groups.iter().any(|group| group == who),
    }
}

fn malformed(error: &serde_json::Error) -> Answer {
    Answer::error(400, "invalid_request", &format!("the body is not as it must be: {error}"))
}

fn refused(error: &SignInError) -> Answer {
    let (status, code) = match error {
        SignInError::Address { .. } | SignInError::State => (400, "sign_in_refused"),
        SignInError::Token(_) => (403, "sign_in_refused"),
        SignInError::Busy => (429, "busy"),
        SignInError::Provider { .. } | SignInError::Certificates { .. } | SignInError::Random(_) => {
            (502, "sign_in_failed")
        }
    };
    if status != 400 {
        tracing::warn!("nobody was signed in: {error}");
    }
    Answer::error(status, code, &error.to_string())
}

#[cfg(test)]
mod tests {
    use serde_json::Value;
    use thunder_access::{Caller, Retention};

    use super::*;

    fn ann() -> Person {
        Person {
            subject: "7".into(),
            email: Some("Ann@Example.org".into()),
            name: Some("Ann".into()),
            groups: vec!["llm".into()],
        }
    }

    fn door(folder: &std::path::Path, allow: &[&str], admins: &[&str]) -> Door {
        let access = Access::open(folder, Retention::default(), None).expect("a store");
        let list = |list: &[&str]| list.iter().map(|who| (*who).to_owned()).collect();
        let args = SignInArgs {
            oidc_issuer: Some("https://login.example.org".into()),
            oidc_client: Some("thunder".into()),
            oidc_secret: None,
            oidc_allow: list(allow),
            oidc_admin: list(admins),
            oidc_groups: "groups".into(),
            oidc_scopes: String::new(),
            oidc_ca: None,
            oidc_hours: 12,
        };
        let door = args.open(Some(&access)).expect("usable options").expect("a provider");
        Arc::into_inner(door).expect("one owner")
    }

    #[test]
    fn people_get_a_key_of_their_own_for_some_hours() {
        let folder = tempfile::tempdir().expect("a folder");
        let mut door = door(folder.path(), &[], &[]);
        door.close();
        assert!(door.access.has_keys(), "a server with sign-in is never open to all");
        let now = Now::read().time;
        let first = door.admit(&ann(), now);
        assert_eq!(
            (first.status, &first.body["role"], &first.body["name"]),
            (200, &json!("user"), &json!("Ann"))
        );
        let role = |answer: &Answer, at: Time| {
            let caller = door.access.authenticate(answer.body["secret"].as_str().expect("a secret"), at);
            caller.map(|caller: Caller| caller.role())
        };
        assert_eq!(role(&first, now), Ok(Role::User));
        // A second browser does not end the first one's session, and there is still one key.
        let second = door.admit(&ann(), now);
        assert_eq!((role(&first, now), role(&second, now)), (Ok(Role::User), Ok(Role::User)));
        assert_eq!(door.access.keys().len(), 1);
        assert_eq!(door.access.keys()[0].owner.as_deref(), Some("Ann@Example.org"));
        let late = Time(now.0 + 12 * 3_600_000);
        assert!(role(&first, late).is_err() && role(&second, late).is_err());
        // The provider's groups decide on the role at each sign-in.
        let again = door.admit(&ann(), late);
        assert!(role(&second, late).is_err(), "a session that is over stays over");
        assert_eq!(role(&again, late), Ok(Role::User));
        door.admins = vec!["llm".into()];
        assert_eq!(door.admit(&ann(), late).body["role"], "admin");
        door.admins.clear();
        assert_eq!(door.admit(&ann(), late).body["role"], "user");
        // Signing in does not restore a revoked key.
        door.access.revoke_key("sso:ann@example.org", &Actor::local(), late).expect("revoked");
        let refused = door.admit(&ann(), late);
        assert_eq!((refused.status, &refused.body["error"]["code"]), (403, &json!("revoked")));
        let acts = door.access.audit(&Default::default(), None, 100).expect("the log");
        let texts: String = acts.iter().map(|(_, sealed)| sealed.text.as_str()).collect();
        assert!(
            texts.contains("key.sign_in") && texts.contains("sign-in at https://login.example.org"),
            "{texts}"
        );
        assert!(!texts.contains(first.body["secret"].as_str().expect("a secret")), "{texts}");
    }

    #[test]
    fn only_those_who_are_named_may_sign_in() {
        let folder = tempfile::tempdir().expect("a folder");
        let mut door = door(folder.path(), &["@example.org"], &["boss@example.org"]);
        let now = Now::read().time;
        assert_eq!(door.admit(&ann(), now).status, 200);
        let with = |email: Option<&str>| Person { email: email.map(str::to_owned), ..ann() };
        for stranger in [
            Some("ann@example.org.evil.example"),
            Some("ann@evilexample.org"),
            Some("@example.org@evil.example"),
            None,
        ] {
            let refused = door.admit(&with(stranger), now);
            assert_eq!(
                (refused.status, &refused.body["error"]["code"]),
                (403, &json!("not_allowed")),
                "{stranger:?}"
            );
        }
        assert_eq!(door.admit(&with(Some("BOSS@example.org")), now).body["role"], "admin");
        door.allow = vec!["llm".into()];
        assert_eq!(door.admit(&with(None), now).status, 200);
        door.allow = vec!["LLM".into()];
        assert_eq!(door.admit(&with(None), now).status, 403);
        // A subject that cannot be a key's name is refused with an error, not with a panic.
        door.allow.clear();
        let odd = Person { subject: "a\nb".into(), email: None, ..ann() };
        assert_eq!(door.admit(&odd, now).status, 503);
        let long = Person { subject: "x".repeat(255), email: None, ..ann() };
        assert_eq!(door.admit(&long, now).status, 200);
    }

    #[test]
    fn bodies_and_paths_are_checked() {
        let folder = tempfile::tempdir().expect("a folder");
        let door = door(folder.path(), &[], &[]);
        let ask = |method: &str, path: &str, body: &str| {
            let answer = answer(Some(&door), &Ask { method, path, body: body.as_bytes() });
            answer.map(|answer| (answer.status, answer.body["error"]["code"].clone()))
        };
        assert_eq!(ask("GET", "/auth", ""), Some((200, Value::Null)));
        assert_eq!(ask("POST", "/auth/begin", "{}"), Some((400, json!("invalid_request"))));
        let insecure = r#"{"redirect": "http://models.example.org/"}"#;
        assert_eq!(ask("POST", "/auth/begin", insecure), Some((400, json!("sign_in_refused"))));
        let unknown = r#"{"state": "x", "code": "y"}"#;
        assert_eq!(ask("POST", "/auth/finish", unknown), Some((400, json!("sign_in_refused"))));
        assert_eq!(ask("POST", "/auth/other", "{}"), None);
        let none = answer(None, &Ask { method: "GET", path: "/auth", body: b"" }).expect("an answer");
        assert_eq!(none.body, json!({"sign_in": null}));
        assert_eq!(answer(None, &Ask { method: "POST", path: "/auth/begin", body: b"{}" }), None);
    }
}
