//! Tokens: a member issues one, and its holder may join once before it expires.
//!
//! Only the issuing member accepts a token, so it is used only once even while the network is cut
//! in two. A list shared by the members could not guarantee this.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;

use crate::base32;
use crate::id::NodeId;

/// Prefix of every token, by which people and secret scanners recognise it.
const PREFIX: &str = "thunder-join-";
/// Random bytes of a token.
const SECRET_BYTES: usize = 16;
/// Maximum tokens of one member that have not expired.
const MOST_TOKENS: usize = 100;
/// Maximum life of a token.
pub const LONGEST_LIFE: Duration = Duration::from_secs(30 * 24 * 3600);
/// Maximum addresses in a token.
const MOST_ADDRESSES: usize = 8;

/// The content of a token.
#[derive(Clone, PartialEq, Eq)]
pub struct Token {
    /// The member that issued it.
    pub issuer: NodeId,
    /// The secret that allows joining.
    pub secret: [u8; SECRET_BYTES],
    /// `HOST:PORT` at which the issuer may be reached.
    pub addresses: Vec<String>,
}

/// Text that is not a token.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("not a token: give all of what `thunder cluster token` printed, which begins with {PREFIX}")]
pub struct BadToken;

impl fmt::Display for Token {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let bytes = [&self.issuer.0[..], &self.secret].concat();
        write!(formatter, "{PREFIX}{}", base32::encode(&bytes).to_ascii_lowercase())?;
        let separators = std::iter::once('@').chain(std::iter::repeat(','));
        self.addresses
            .iter()
            .zip(separators)
            .try_for_each(|(address, separator)| write!(formatter, "{separator}{address}"))
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "Token(of {})", self.issuer.short())
    }
}

impl FromStr for Token {
    type Err = BadToken;

    fn from_str(text: &str) -> Result<Self, BadToken> {
        let text = text.trim().strip_prefix(PREFIX).ok_or(BadToken)?;
        let (key, addresses) = text.split_once('@').unwrap_or((text, ""));
        let bytes = base32::decode(key).filter(|bytes| bytes.len() == 32 + SECRET_BYTES).ok_or(BadToken)?;
        let (issuer, secret) = bytes.split_at(32);
        let addresses: Vec<String> =
            addresses.split(',').filter(|address| !address.is_empty()).map(str::to_owned).collect();
        if addresses.len() > MOST_ADDRESSES {
            return Err(BadToken);
        }
        let issuer = NodeId(issuer.try_into().map_err(|_| BadToken)?);
        Ok(Self { issuer, secret: secret.try_into().map_err(|_| BadToken)?, addresses })
    }
}

/// Why a token is not accepted. A stranger only learns that it is not.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum TokenRefusal {
    /// The token was not issued here, or was dropped after it expired.
    #[error(
        "this member has not issued the token, or it has expired: `thunder cluster token` here makes another"
    )]
    Unknown,
    /// It was used before.
    #[error(
        "the token was used before, and each is for one node: `thunder cluster token` here makes another"
    )]
    Used,
}

/// Why a token cannot be issued.
#[derive(Debug, thiserror::Error)]
pub enum IssueError {
    /// Too many are open.
    #[error("{MOST_TOKENS} tokens are open already: use them or wait until they expire")]
    TooMany,
    /// The life asked for is too long.
    #[error("a token lives for at most 30 days, but {0:?} were asked for")]
    TooLong(Duration),
    /// The system gives no random numbers.
    #[error("the system gives no random numbers: {0}")]
    NoRandom(#[from] getrandom::Error),
}

/// What the issuer keeps of a token: enough to recognise it, but not to recreate it.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct Issued {
    expires_unix_s: u64,
    used_by: Option<NodeId>,
}

/// The tokens that a member has issued. It keeps them on its disk.
#[derive(Debug, Default, Serialize, Deserialize)]
pub struct IssuedTokens {
    /// Keyed by the SHA-256 of the secret, in hexadecimal.
    tokens: BTreeMap<String, Issued>,
}

impl IssuedTokens {
    /// Issues a token.
    ///
    /// # Errors
    /// When too many are open or its life is too long.
    pub fn issue(
        &mut self,
        issuer: NodeId,
        addresses: Vec<String>,
        now_unix_s: u64,
        life: Duration,
    ) -> Result<Token, IssueError> {
        self.forget_expired(now_unix_s);
        if life > LONGEST_LIFE {
            return Err(IssueError::TooLong(life));
        }
        if self.tokens.len() >= MOST_TOKENS {
            return Err(IssueError::TooMany);
        }
        let mut secret = [0; SECRET_BYTES];
        getrandom::fill(&mut secret)?;
        let issued = Issued { expires_unix_s: now_unix_s + life.as_secs(), used_by: None };
        self.tokens.insert(fingerprint(&secret), issued);
        let addresses = addresses.into_iter().take(MOST_ADDRESSES).collect();
        Ok(Token { issuer, secret, addresses })
    }

    /// Uses a token for `node`. The same node may use it again, in case it did not get the reply.
    ///
    /// # Errors
    /// If it is unknown, expired, or used by another node.
    pub fn redeem(&mut self, secret: &[u8], node: NodeId, now_unix_s: u64) -> Result<(), TokenRefusal> {
        self.forget_expired(now_unix_s);
        let wanted = fingerprint(secret);
        let found =
            self.tokens.iter_mut().find(|(known, _)| bool::from(known.as_bytes().ct_eq(wanted.as_bytes())));
        let (_, token) = found.ok_or(TokenRefusal::Unknown)?;
        match token.used_by {
            Some(user) if user != node => Err(TokenRefusal::Used),
            _ => {
                token.used_by = Some(node);
                Ok(())
            }
        }
    }

    fn forget_expired(&mut self, now_unix_s: u64) {
        self.tokens.retain(|_, token| token.expires_unix_s > now_unix_s);
    }
}

fn fingerprint(secret: &[u8]) -> String {
    Sha256::digest(secret).iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
    use proptest::prelude::*;

    use super::*;

    const ISSUER: NodeId = NodeId([3; 32]);
    const HOUR: Duration = Duration::from_secs(3600);

    #[test]
    fn a_token_is_used_once_and_expires() {
        let mut tokens = IssuedTokens::default();
        let (one, two) = (NodeId([4; 32]), NodeId([5; 32]));
        let token = tokens.issue(ISSUER, vec!["10.0.0.1:7470".into()], 1000, HOUR).unwrap();
        let late = tokens.issue(ISSUER, Vec::new(), 1000, HOUR).unwrap();
        assert_eq!(token.to_string().parse(), Ok(token.clone()));
        assert_eq!(tokens.redeem(&token.secret, one, 1001), Ok(()));
        assert_eq!(tokens.redeem(&token.secret, one, 1002), Ok(()), "the reply was lost");
        assert_eq!(tokens.redeem(&token.secret, two, 1002), Err(TokenRefusal::Used));
        assert_eq!(tokens.redeem(&late.secret, two, 1000 + 3600), Err(TokenRefusal::Unknown));
        assert_eq!(tokens.redeem(&[0; 16], two, 1001), Err(TokenRefusal::Unknown));
        let kept = serde_json::to_string(&tokens).unwrap();
        let secret: String = token.secret.iter().map(|byte| format!("{byte:02x}")).collect();
        assert!(!kept.contains(&secret), "the disk holds no secret");
    }

    #[test]
    fn open_tokens_are_bounded() {
        let mut tokens = IssuedTokens::default();
        for _ in 0..MOST_TOKENS {
            tokens.issue(ISSUER, Vec::new(), 0, HOUR).unwrap();
        }
        assert!(matches!(tokens.issue(ISSUER, Vec::new(), 0, HOUR), Err(IssueError::TooMany)));
        assert!(matches!(
            tokens.issue(ISSUER, Vec::new(), 0, LONGEST_LIFE + HOUR),
            Err(IssueError::TooLong(_))
        ));
        tokens.issue(ISSUER, Vec::new(), 3600, HOUR).unwrap();
    }

    proptest! {
        #[test]
        fn any_text_is_a_token_or_refused(text in "(thunder-join-)?[0-9a-z@,:.]{0,120}") {
            if let Ok(token) = text.parse::<Token>() {
                prop_assert_eq!(token.to_string().parse::<Token>(), Ok(token));
            }
        }
    }
}
