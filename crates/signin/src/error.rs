//! Why somebody is not signed in.

use std::path::PathBuf;

/// Why a sign-in cannot begin or end.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SignInError {
    /// What is sent there could be read on the way.
    #[error("{what} \"{address}\" must begin with https://, or with http:// on this machine itself")]
    Address {
        /// What the address is of.
        what: &'static str,
        /// The address, shortened.
        address: String,
    },
    /// The provider cannot be asked, or refuses.
    #[error("the sign-in provider at {address}: {why}")]
    Provider {
        /// Where it was asked.
        address: String,
        /// What is wrong.
        why: String,
    },
    /// The state is of no sign-in of this process, or too old.
    #[error("this sign-in was begun too long ago, or on another server: begin again")]
    State,
    /// The provider is asked for other people already.
    #[error("too many people sign in at once: try again")]
    Busy,
    /// The provider's token is not right.
    #[error("the provider's token is refused: {0}")]
    Token(#[from] BadToken),
    /// The file of certificates is none.
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
    /// It is no signed JSON web token.
    #[error("it is no signed JSON web token ({0})")]
    Form(&'static str),
    /// Its algorithm is none of those that prove who made it.
    #[error("its algorithm is \"{0}\", but must be RS256, PS256, ES256 or EdDSA")]
    Algorithm(String),
    /// The provider lists no key that it could be made with.
    #[error("the provider lists no key for it")]
    NoKey,
    /// No key fits.
    #[error("its signature is wrong")]
    Signature,
    /// A field is missing, or another than it must be.
    #[error("its field `{0}` is missing or wrong")]
    Claim(&'static str),
    /// It is over, or of the future.
    #[error("it is not valid now: compare the clocks of this machine and the provider")]
    Time,
}
