//! Identity tokens: signed JSON web tokens of the provider.

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use ring::signature::{self, RsaPublicKeyComponents, UnparsedPublicKey};
use serde::Deserialize;
use serde_json::Value;

use crate::error::BadToken;

/// Seconds by which clocks may differ.
const SKEW_S: u64 = 60;
/// Maximum length of names, addresses and groups.
const LONGEST_TEXT: usize = 255;
/// Maximum number of groups of a person.
const MOST_GROUPS: usize = 1000;

/// A person with an account at the provider.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Person {
    /// The provider's name for the account, which never changes.
    pub subject: String,
    /// E-mail address, unless the provider says that it is not verified.
    pub email: Option<String>,
    /// Name for people.
    pub name: Option<String>,
    /// Groups, as the provider names them.
    pub groups: Vec<String>,
}

/// A public key of the provider (RFC 7517).
#[derive(Debug, Clone, Deserialize)]
pub(crate) struct JsonKey {
    kty: String,
    kid: Option<String>,
    #[serde(rename = "use")]
    purpose: Option<String>,
    crv: Option<String>,
    n: Option<String>,
    e: Option<String>,
    x: Option<String>,
    y: Option<String>,
}

/// What a token must say.
pub(crate) struct Expected<'a> {
    pub issuer: &'a str,
    pub client_id: &'a str,
    pub nonce: &'a str,
    pub now_s: u64,
    pub groups_claim: &'a str,
}

#[derive(Deserialize)]
struct Header {
    alg: String,
    kid: Option<String>,
    crit: Option<Value>,
}

/// How a token is signed.
#[derive(Clone, Copy)]
enum Algorithm {
    Rsa(&'static signature::RsaParameters),
    Es256,
    EdDsa,
}

impl Algorithm {
    /// Algorithms with a shared secret, and the algorithm `none`, prove nothing here.
    fn of(name: &str) -> Option<Self> {
        Some(match name {
            "RS256" => Self::Rsa(&signature::RSA_PKCS1_2048_8192_SHA256),
            "PS256" => Self::Rsa(&signature::RSA_PSS_2048_8192_SHA256),
            "ES256" => Self::Es256,
            "EdDSA" => Self::EdDsa,
            _ => return None,
        })
    }

    fn takes(self, key: &JsonKey) -> bool {
        let curve = key.crv.as_deref();
        match self {
            Self::Rsa(_) => key.kty == "RSA",
            Self::Es256 => key.kty == "EC" && curve == Some("P-256"),
            Self::EdDsa => key.kty == "OKP" && curve == Some("Ed25519"),
        }
    }

    fn verifies(self, key: &JsonKey, signed: &[u8], signature: &[u8]) -> bool {
        let part = |text: &Option<String>| decode(text.as_deref().unwrap_or_default());
        let verified = match self {
            Self::Rsa(parameters) => part(&key.n).zip(part(&key.e)).map(|(n, e)| {
                RsaPublicKeyComponents { n: &n, e: &e }.verify(parameters, signed, signature).is_ok()
            }),
            Self::Es256 => part(&key.x).zip(part(&key.y)).map(|(x, y)| {
                let point = [&[4][..], &x, &y].concat();
                let key = UnparsedPublicKey::new(&signature::ECDSA_P256_SHA256_FIXED, point);
                key.verify(signed, signature).is_ok()
            }),
            Self::EdDsa => part(&key.x)
                .map(|x| UnparsedPublicKey::new(&signature::ED25519, x).verify(signed, signature).is_ok()),
        };
        verified.unwrap_or(false)
    }
}

fn decode(text: &str) -> Option<Vec<u8>> {
    URL_SAFE_NO_PAD.decode(text).ok()
}

/// Checks a token (OpenID Connect Core, 3.1.3.7), and reads the person in it.
pub(crate) fn verify(token: &str, keys: &[JsonKey], expected: &Expected<'_>) -> Result<Person, BadToken> {
    let parts: Vec<&str> = token.split('.').collect();
    let [header, claims, signature] = parts[..] else { return Err(BadToken::Form("three parts")) };
    let signed = &token.as_bytes()[..header.len() + 1 + claims.len()];
    let header: Header = read(header).ok_or(BadToken::Form("header"))?;
    let signature = decode(signature).ok_or(BadToken::Form("signature"))?;
    let unknown = || BadToken::Algorithm(header.alg.chars().take(20).collect());
    let algorithm = Algorithm::of(&header.alg).ok_or_else(unknown)?;
    if header.crit.is_some() {
        return Err(BadToken::Form("critical extensions"));
    }
    let is_candidate = |key: &&JsonKey| {
        let is_named = header.kid.is_none() || header.kid == key.kid;
        is_named && key.purpose.as_deref().is_none_or(|purpose| purpose == "sig") && algorithm.takes(key)
    };
    let mut candidates = keys.iter().filter(is_candidate).peekable();
    candidates.peek().ok_or(BadToken::NoKey)?;
    if !candidates.any(|key| algorithm.verifies(key, signed, &signature)) {
        return Err(BadToken::Signature);
    }
    let claims: Value = read(claims).ok_or(BadToken::Form("claims"))?;
    check(&claims, expected)?;
    Ok(person(&claims, expected.groups_claim))
}

fn read<T: for<'de> Deserialize<'de>>(part: &str) -> Option<T> {
    serde_json::from_slice(&decode(part)?).ok()
}

fn check(claims: &Value, expected: &Expected<'_>) -> Result<(), BadToken> {
    let text = |name: &str| claims[name].as_str().unwrap_or_default();
    if text("iss") != expected.issuer {
        return Err(BadToken::Claim("iss"));
    }
    let is_us = |value: &Value| value.as_str() == Some(expected.client_id);
    let (for_us, for_others) = match &claims["aud"] {
        Value::Array(all) => (all.iter().any(is_us), all.len() > 1),
        one => (is_us(one), false),
    };
    if !for_us {
        return Err(BadToken::Claim("aud"));
    }
    let given_to = &claims["azp"];
    if (for_others || !given_to.is_null()) && !is_us(given_to) {
        return Err(BadToken::Claim("azp"));
    }
    if text("nonce") != expected.nonce {
        return Err(BadToken::Claim("nonce"));
    }
    let seconds = |name: &'static str| {
        let value = claims[name].as_f64().filter(|value| *value >= 0.0);
        value.map(|value| value as u64).ok_or(BadToken::Claim(name))
    };
    let is_early = |at: u64| at > expected.now_s + SKEW_S;
    if seconds("exp")? + SKEW_S <= expected.now_s || is_early(seconds("iat")?) {
        return Err(BadToken::Time);
    }
    if !claims["nbf"].is_null() && is_early(seconds("nbf")?) {
        return Err(BadToken::Time);
    }
    let subject = text("sub");
    if subject.is_empty() || subject.len() > LONGEST_TEXT {
        return Err(BadToken::Claim("sub"));
    }
    Ok(())
}

fn person(claims: &Value, groups_claim: &str) -> Person {
    let short = |value: &Value| {
        let text = value.as_str().unwrap_or_default().trim();
        let is_short = !text.is_empty() && text.len() <= LONGEST_TEXT && !text.contains(char::is_control);
        is_short.then(|| text.to_owned())
    };
    let groups = match &claims[groups_claim] {
        Value::Array(groups) => groups.iter().take(MOST_GROUPS).filter_map(short).collect(),
        one => short(one).into_iter().collect(),
    };
    let is_verified = claims["email_verified"] != Value::Bool(false);
    Person {
        subject: claims["sub"].as_str().unwrap_or_default().to_owned(),
        email: short(&claims["email"]).filter(|email| is_verified && email.contains('@')),
        name: short(&claims["name"]),
        groups,
    }
}

#[cfg(test)]
#[path = "token_tests.rs"]
mod tests;
