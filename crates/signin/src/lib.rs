//! Sign-in by OpenID Connect (authorization code flow with PKCE), for people with a browser.
//!
//! [`SignIn::begin`] returns the address to which to send the browser. [`SignIn::finish`] takes the
//! provider's answer, requests the person's token from the provider, and checks the token:
//! signature, issuer, audience, time, and that it belongs to this sign-in. The caller decides what
//! the person may do. Nothing is stored between the two calls: the data of a sign-in is in its
//! `state`, encrypted with a key of this process.
//!
//! This crate knows no server and no API keys. Its calls wait for the network.

mod address;
mod error;
mod provider;
mod state;
mod token;

pub use error::{BadToken, SignInError};
pub use provider::{Begun, Options, SignIn};
pub use token::Person;
