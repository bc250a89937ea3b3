//! Errors of sign-in.

use std::path::PathBuf;

/// Why a sign-in cannot begin or end.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SignInError {
    /// Data sent to this address could be read on the way.
    #[error(
        "{what} \"{address}\" must be https:// with a host and perhaps a port, or http:// on this machine itself"
    )]
    Address {
        /// What the address is of.
        what: &'static str,
        /// The address, shortened.
        address: String,
    },
    /// The provider cannot be reached, or refuses.
    #[error("the sign-in provider at {address}: {why}")]
    Provider {
        /// Where it was asked.
        address: String,
        /// What is wrong.
        why: String,
    },
    /// The state does not belong to a sign-in of this process, or is too old.
    #[error("this sign-in was begun too long ago, or on another server: begin again")]
    State,
    /// Too many other sign-ins are waiting for the provider.
    #[error("too many people sign in at once: try again")]
    Busy,
    /// The provider's token is not valid.
    #[error("the provider's token is refused: {0}")]
    Token(#[from] BadToken),
    /// The file has no certificates.
    #[error("{path}: no certificate in PEM format ({why})")]
    Certificates {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        why: String,
    },
    /// No random numbers.
    #[error("the system's random source failed: {0}")]
    Random(String),
}

/// Why a token is refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BadToken {
    /// It is not a signed JSON web token.
    #[error("it is no signed JSON web token ({0})")]
    Form(&'static str),
    /// Its algorithm does not prove the token's author.
    #[error("its algorithm is \"{0}\", but must be RS256, PS256, ES256 or EdDSA")]
    Algorithm(String),
    /// The provider lists no key with which the token could be signed.
    #[error("the provider lists no key for it")]
    NoKey,
    /// No key fits.
    #[error("its signature is wrong")]
    Signature,
    /// A field is missing or has a wrong value.
    #[error("its field `{0}` is missing or wrong")]
    Claim(&'static str),
    /// The token has expired, or is from the future.
    #[error("it is not valid now: compare the clocks of this machine and the provider")]
    Time,
}
