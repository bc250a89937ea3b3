//! The provider, and a sign-in from its begin to its end.

use std::fmt;
use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use base64::Engine as _;
use base64::engine::general_purpose::{STANDARD, URL_SAFE_NO_PAD};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use sha2::{Digest, Sha256};
use ureq::tls::{Certificate, PemItem, RootCerts, TlsConfig};

use crate::address::{self, encode, fields};
use crate::error::{BadToken, SignInError};
use crate::state::{Pending, Sealer, random};
use crate::token::{self, Expected, JsonKey, Person};

/// Time limit for an answer of the provider.
const ANSWER_LIMIT: Duration = Duration::from_secs(10);
/// Maximum size of an answer.
const LONGEST_ANSWER_BYTES: u64 = 1 << 20;
/// The provider's metadata is requested again after this time.
const KNOWN_FOR: Duration = Duration::from_secs(3600);
/// Maximum number of parallel requests to the provider, because anybody can begin a sign-in.
const MOST_AT_ONCE: usize = 8;
/// Maximum length of codes and errors of a provider that are passed on.
const LONGEST_CODE: usize = 4096;

/// The provider, and this program's registration there.
#[derive(Clone)]
pub struct Options {
    /// Its address, as in its tokens: `https://login.example.org/realms/firm`.
    pub issuer: String,
    /// This program's client id at the provider.
    pub client_id: String,
    /// This program's client secret at the provider; `None` for a public client.
    pub client_secret: Option<String>,
    /// Scopes to request in addition to `openid`: `email profile`.
    pub scopes: String,
    /// The field of tokens with a person's groups.
    pub groups_claim: String,
    /// Authorities to trust, as a PEM file; `None`: those that browsers trust.
    pub certificates: Option<PathBuf>,
}

/// A sign-in that has begun.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Begun {
    /// The address to which to send the browser.
    pub url: String,
    /// The value that the provider must send back. The browser compares it, so that nobody can pass
    /// another person's sign-in to the browser.
    pub state: String,
}

/// Signs people in.
pub struct SignIn {
    options: Options,
    agent: ureq::Agent,
    sealer: Sealer,
    known: Mutex<Option<Known>>,
    asking: AtomicUsize,
}

/// The provider's metadata (OpenID Connect Discovery).
#[derive(Debug, Deserialize)]
struct Document {
    issuer: String,
    authorization_endpoint: String,
    token_endpoint: String,
    jwks_uri: String,
    #[serde(default)]
    token_endpoint_auth_methods_supported: Option<Vec<String>>,
}

#[derive(Clone)]
struct Known {
    document: Arc<Document>,
    keys: Arc<Vec<JsonKey>>,
    at: Instant,
}

#[derive(Deserialize)]
struct Keys {
    // A key of an unknown kind must not hide the others.
    keys: Vec<Value>,
}

/// Counts down when it is dropped.
struct Asking<'a>(&'a AtomicUsize);

impl Drop for Asking<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl fmt::Debug for SignIn {
    /// Without secrets.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SignIn").field("issuer", &self.options.issuer).finish_non_exhaustive()
    }
}

impl SignIn {
    /// Creates a sign-in for a provider, without contacting it.
    ///
    /// # Errors
    /// When its address is not safe, or the certificates cannot be read.
    pub fn new(options: Options) -> Result<Self, SignInError> {
        address::check("the issuer", &options.issuer)?;
        let mut tls = TlsConfig::builder();
        if let Some(file) = &options.certificates {
            tls = tls.root_certs(RootCerts::from(certificates(file)?));
        }
        let agent = ureq::Agent::config_builder()
            .http_status_as_error(false)
            // A redirection could send secrets to another address.
            .max_redirects(0)
            .tls_config(tls.build())
            .timeout_global(Some(ANSWER_LIMIT))
            .build()
            .into();
        let (sealer, known, asking) = (Sealer::new()?, Mutex::new(None), AtomicUsize::new(0));
        Ok(Self { options, agent, sealer, known, asking })
    }

    /// Asks the provider for its metadata, to see whether people could sign in now.
    ///
    /// # Errors
    /// When it cannot be reached, or its answer is not a provider's.
    pub fn reach(&self) -> Result<(), SignInError> {
        self.known(false).map(drop)
    }

    /// The provider's address.
    pub fn issuer(&self) -> &str {
        &self.options.issuer
    }

    /// Begins a sign-in. The provider then sends the browser to `redirect`, if that address is
    /// registered there.
    ///
    /// # Errors
    /// When the provider cannot be asked, or `redirect` is not safe.
    pub fn begin(&self, redirect: &str) -> Result<Begun, SignInError> {
        address::check("the address of this page", redirect)?;
        let document = self.known(false)?.document;
        let secret = || Ok::<_, SignInError>(URL_SAFE_NO_PAD.encode(random::<32>()?));
        let pending = Pending {
            began_s: now_s(),
            verifier: secret()?,
            nonce: secret()?,
            redirect: redirect.to_owned(),
        };
        let state = self.sealer.seal(&pending)?;
        let challenge = URL_SAFE_NO_PAD.encode(Sha256::digest(pending.verifier.as_bytes()));
        let scope = format!("openid {}", self.options.scopes);
        let query = fields(&[
            ("response_type", "code"),
            ("client_id", &self.options.client_id),
            ("redirect_uri", redirect),
            ("scope", scope.trim()),
            ("state", &state),
            ("nonce", &pending.nonce),
            ("code_challenge", &challenge),
            ("code_challenge_method", "S256"),
        ]);
        let page = &document.authorization_endpoint;
        let joint = if page.contains('?') { '&' } else { '?' };
        Ok(Begun { url: format!("{page}{joint}{query}"), state })
    }

    /// Ends a sign-in with the provider's answer.
    ///
    /// # Errors
    /// When the state is not of a sign-in that began here lately, or the provider or its token says
    /// no.
    pub fn finish(&self, state: &str, code: &str) -> Result<Person, SignInError> {
        let pending = self.sealer.open(state, now_s())?;
        let before = self.asking.fetch_add(1, Ordering::Relaxed);
        let _asking = Asking(&self.asking);
        if before >= MOST_AT_ONCE {
            return Err(SignInError::Busy);
        }
        if code.is_empty() || code.len() > LONGEST_CODE {
            return Err(SignInError::State);
        }
        let known = self.known(false)?;
        let token = self.fetch_token(&known.document, &pending, code)?;
        match self.verify(&token, &known, &pending) {
            // The provider may have a new key since the last request.
            Err(BadToken::NoKey | BadToken::Signature) => {
                Ok(self.verify(&token, &self.known(true)?, &pending)?)
            }
            verified => Ok(verified?),
        }
    }

    fn verify(&self, token: &str, known: &Known, pending: &Pending) -> Result<Person, BadToken> {
        let expected = Expected {
            issuer: &known.document.issuer,
            client_id: &self.options.client_id,
            nonce: &pending.nonce,
            now_s: now_s(),
            groups_claim: &self.options.groups_claim,
        };
        token::verify(token, &known.keys, &expected)
    }

    /// Exchanges the code for the identity token.
    fn fetch_token(&self, document: &Document, pending: &Pending, code: &str) -> Result<String, SignInError> {
        let Options { client_id, client_secret, .. } = &self.options;
        let mut form = vec![
            ("grant_type", "authorization_code"),
            ("code", code),
            ("redirect_uri", &pending.redirect),
            ("code_verifier", &pending.verifier),
        ];
        let url = &document.token_endpoint;
        let request = self.agent.post(url).header("accept", "application/json");
        let mut request = request.header("content-type", "application/x-www-form-urlencoded");
        let ways = document.token_endpoint_auth_methods_supported.as_deref();
        let takes = |way: &str| ways.is_none_or(|ways| ways.iter().any(|name| name == way));
        match client_secret {
            Some(secret) if takes("client_secret_basic") || !takes("client_secret_post") => {
                let pair = STANDARD.encode(format!("{}:{}", encode(client_id), encode(secret)));
                request = request.header("authorization", format!("Basic {pair}"));
            }
            Some(secret) => form.extend([("client_id", client_id.as_str()), ("client_secret", secret)]),
            None => form.push(("client_id", client_id)),
        }
        let answer: Value = read(url, request.send(fields(&form)))?;
        let token = answer["id_token"].as_str().map(str::to_owned);
        token.ok_or_else(|| failed(url, "it answers without an identity token"))
    }

    /// The provider's metadata.
    fn known(&self, anew: bool) -> Result<Known, SignInError> {
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = known.as_ref().filter(|known| !anew && known.at.elapsed() < KNOWN_FOR) {
            return Ok(known.clone());
        }
        let issuer = self.options.issuer.trim_end_matches('/');
        let url = format!("{issuer}/.well-known/openid-configuration");
        let document: Document = self.get(&url)?;
        if document.issuer.trim_end_matches('/') != issuer {
            return Err(failed(&url, &format!("it calls itself \"{}\"", document.issuer)));
        }
        for (what, address) in [
            ("the provider's page", &document.authorization_endpoint),
            ("the provider's address for tokens", &document.token_endpoint),
            ("the provider's address for keys", &document.jwks_uri),
        ] {
            address::check(what, address)?;
        }
        let keys: Keys = self.get(&document.jwks_uri)?;
        let keys = keys.keys.into_iter().filter_map(|key| serde_json::from_value(key).ok()).collect();
        let fresh = Known { document: Arc::new(document), keys: Arc::new(keys), at: Instant::now() };
        *known = Some(fresh.clone());
        Ok(fresh)
    }

    fn get<T: DeserializeOwned>(&self, url: &str) -> Result<T, SignInError> {
        read(url, self.agent.get(url).header("accept", "application/json").call())
    }
}

/// The JSON of an answer.
fn read<T: DeserializeOwned>(
    url: &str,
    answer: Result<ureq::http::Response<ureq::Body>, ureq::Error>,
) -> Result<T, SignInError> {
    let answer = answer.map_err(|error| failed(url, &error.to_string()))?;
    let status = answer.status();
    let mut bytes = Vec::new();
    let mut reader = answer.into_body().into_reader().take(LONGEST_ANSWER_BYTES);
    reader.read_to_end(&mut bytes).map_err(|error| failed(url, &error.to_string()))?;
    if !status.is_success() {
        // The standard's errors have names for programs (`invalid_grant`). Other errors may contain
        // any text.
        let error: Value = serde_json::from_slice(&bytes).unwrap_or_default();
        let name: String = error["error"].as_str().unwrap_or_default().chars().take(60).collect();
        let is_name = name.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_');
        return Err(failed(url, &format!("status {} {}", status.as_u16(), if is_name { &name } else { "" })));
    }
    serde_json::from_slice(&bytes).map_err(|error| failed(url, &format!("a strange answer: {error}")))
}

fn failed(url: &str, why: &str) -> SignInError {
    SignInError::Provider { address: url.to_owned(), why: why.trim_end().to_owned() }
}

fn certificates(file: &Path) -> Result<Vec<Certificate<'static>>, SignInError> {
    let wrong = |why: String| SignInError::Certificates { path: file.to_owned(), why };
    let pem = std::fs::read(file).map_err(|error| wrong(error.to_string()))?;
    let items = ureq::tls::parse_pem(&pem).filter_map(|item| match item {
        Ok(PemItem::Certificate(certificate)) => Some(certificate),
        _ => None,
    });
    let found: Vec<Certificate<'static>> = items.collect();
    if found.is_empty() { Err(wrong("it has none".to_owned())) } else { Ok(found) }
}

fn now_s() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs()
}
