//! The data of a sign-in, encrypted in its `state`, so that nothing is stored for browsers that
//! never return.

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use ring::aead::{AES_256_GCM, Aad, LessSafeKey, NONCE_LEN, Nonce, UnboundKey};

use crate::error::SignInError;

/// Time limit for the person at the provider.
pub(crate) const LIMIT_S: u64 = 15 * 60;
/// Longer texts cannot be states of this program.
const LONGEST: usize = 4096;

/// A sign-in under way.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Pending {
    /// When it began, in seconds since 1970.
    pub began_s: u64,
    /// Proves to the provider that the sign-in is ended by the client that began it (PKCE).
    pub verifier: String,
    /// The value that the token must contain to belong to this sign-in.
    pub nonce: String,
    /// The address to which the provider sends the browser.
    pub redirect: String,
}

/// Encrypts and decrypts states.
pub(crate) struct Sealer(LessSafeKey);

/// Random bytes.
pub(crate) fn random<const N: usize>() -> Result<[u8; N], SignInError> {
    let mut bytes = [0; N];
    getrandom::fill(&mut bytes).map_err(|error| SignInError::Random(error.to_string()))?;
    Ok(bytes)
}

impl Sealer {
    /// With a key of its own.
    pub fn new() -> Result<Self, SignInError> {
        let unusable = |_| SignInError::Random("it gave no usable key".to_owned());
        let key = UnboundKey::new(&AES_256_GCM, &random::<32>()?).map_err(unusable)?;
        Ok(Self(LessSafeKey::new(key)))
    }

    /// A sign-in as encrypted text for a browser.
    pub fn seal(&self, pending: &Pending) -> Result<String, SignInError> {
        let Pending { began_s, verifier, nonce, redirect } = pending;
        let mut bytes = format!("{began_s}\n{verifier}\n{nonce}\n{redirect}").into_bytes();
        let number = random::<NONCE_LEN>()?;
        let sealed =
            self.0.seal_in_place_append_tag(Nonce::assume_unique_for_key(number), Aad::empty(), &mut bytes);
        sealed.map_err(|_| SignInError::State)?;
        Ok(URL_SAFE_NO_PAD.encode([&number[..], &bytes].concat()))
    }

    /// The sign-in of a state.
    ///
    /// # Errors
    /// When it was made by another process, changed, or too long ago.
    pub fn open(&self, state: &str, now_s: u64) -> Result<Pending, SignInError> {
        let bytes = Some(state).filter(|state| state.len() <= LONGEST);
        let bytes = bytes.and_then(|state| URL_SAFE_NO_PAD.decode(state).ok()).ok_or(SignInError::State)?;
        let (number, sealed) = bytes.split_at_checked(NONCE_LEN).ok_or(SignInError::State)?;
        let number = Nonce::try_assume_unique_for_key(number).map_err(|_| SignInError::State)?;
        let mut sealed = sealed.to_vec();
        let text = self.0.open_in_place(number, Aad::empty(), &mut sealed).map_err(|_| SignInError::State)?;
        let mut lines = std::str::from_utf8(text).map_err(|_| SignInError::State)?.split('\n');
        let mut line = || lines.next().map(str::to_owned).ok_or(SignInError::State);
        let began_s: u64 = line()?.parse().map_err(|_| SignInError::State)?;
        let pending = Pending { began_s, verifier: line()?, nonce: line()?, redirect: line()? };
        if now_s.saturating_sub(began_s) > LIMIT_S { Err(SignInError::State) } else { Ok(pending) }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
    use super::*;

    #[test]
    fn a_state_opens_here_in_time_and_unchanged() {
        let (sealer, other) = (Sealer::new().unwrap(), Sealer::new().unwrap());
        let pending = Pending {
            began_s: 1000,
            verifier: "v".into(),
            nonce: "n".into(),
            redirect: "https://a.example/".into(),
        };
        let state = sealer.seal(&pending).unwrap();
        assert_eq!(sealer.open(&state, 1000 + LIMIT_S), Ok(pending.clone()));
        assert_eq!(sealer.open(&state, 1001 + LIMIT_S), Err(SignInError::State));
        assert_eq!(other.open(&state, 1000), Err(SignInError::State));
        assert_ne!(sealer.seal(&pending).unwrap(), state);
        for at in 0..state.len() {
            let mut changed = state.clone().into_bytes();
            changed[at] = if changed[at] == b'A' { b'B' } else { b'A' };
            let changed = String::from_utf8(changed).unwrap();
            assert_eq!(sealer.open(&changed, 1000), Err(SignInError::State), "{at}");
        }
        for bad in ["", "x", "ä", &"A".repeat(LONGEST + 1), &state[1..]] {
            assert_eq!(sealer.open(bad, 1000), Err(SignInError::State), "{bad}");
        }
    }
}
