//! How a node becomes a member: by a code that a person reads on the new node and types on a
//! member, or by a token that a member has issued.
//!
//! **The code** is a password of 40 bits for SPAKE2 (a password-authenticated key exchange, RFC
//! 9382's family). Both sides prove that they know it, bound to both public keys and to the TLS
//! connection between them. An attacker between them, or posing as either, learns nothing that
//! allows guessing offline: each attempt tests one of 2⁴⁰ codes and takes the new node's time,
//! which [`code::Attempts`] limits. Comparing a digest of both keys (as Bluetooth does) would let
//! the member recognise the new node, but not the new node the member, because nobody types
//! anything into the new node. If the code were derived from the new node's key alone, an attacker
//! could generate keys until one fits.
//!
//! **The token** contains the issuing member's key and 128 random bits. The new node connects to
//! that member only, and the member accepts each token once.

pub mod client;
pub mod code;
pub mod message;
pub mod proof;
pub mod server;
pub mod token;
