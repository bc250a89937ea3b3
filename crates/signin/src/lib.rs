//! Sign-in by OpenID Connect (authorization code flow with PKCE), for people with a browser.
//!
//! [`SignIn::begin`] says where to send the browser, [`SignIn::finish`] takes what the provider
//! sends back with it, asks the provider for the person's token, and checks the token: signature,
//! issuer, audience, time, and that it answers this sign-in. What the person may then do is the
//! caller's decision. Nothing is kept between the two calls: what belongs to a sign-in is in its
//! `state`, encrypted with a key of this process.
//!
//! This crate knows no server and no keys. Its calls wait for the network.

mod address;
mod error;
mod provider;
mod state;
mod token;

pub use error::{BadToken, SignInError};
pub use provider::{Begun, Options, SignIn};
pub use token::Person;
