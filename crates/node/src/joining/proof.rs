//! The key exchange for a code: SPAKE2, and a proof from each side that both have the same key.

use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;
use spake2::{Ed25519Group, Identity, Password, Spake2};

use super::code::Code;
use crate::id::NodeId;

/// Bytes of a TLS connection that only its two ends know (RFC 5705's exported keying material).
pub type Binding = [u8; 32];
/// Label under which the binding is exported.
pub const BINDING_LABEL: &[u8] = b"EXPORTER-thunder-join/1";

/// The two sides of the exchange. A proof of one side is not valid for the other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    /// The side where the code was typed.
    Member,
    /// The side that shows the code.
    Newcomer,
}

/// An exchange that waits for the other side's element.
pub struct Exchange {
    side: Side,
    state: Spake2<Ed25519Group>,
    context: Vec<u8>,
}

/// Both sides' proofs.
pub struct Proofs {
    own: [u8; 32],
    expected: Hmac<Sha256>,
}

impl Exchange {
    /// Begins an exchange between `member` and `newcomer` on the connection of `binding`. Returns
    /// the element to send.
    pub fn start(
        side: Side,
        code: &Code,
        member: &NodeId,
        newcomer: &NodeId,
        binding: &Binding,
    ) -> (Self, Vec<u8>) {
        let password = Password::new(code.password());
        let (first, second) = (Identity::new(&member.0), Identity::new(&newcomer.0));
        let (state, element) = match side {
            Side::Member => Spake2::<Ed25519Group>::start_a(&password, &first, &second),
            Side::Newcomer => Spake2::<Ed25519Group>::start_b(&password, &first, &second),
        };
        let context = [&member.0[..], &newcomer.0, binding].concat();
        (Self { side, state, context }, element)
    }

    /// The proofs, computed from the other side's element. `None` if the element is invalid.
    pub fn finish(self, element: &[u8]) -> Option<Proofs> {
        let key = self.state.finish(element).ok()?;
        let mac = |side: Side| {
            let mut mac = Hmac::<Sha256>::new_from_slice(&key).ok()?;
            mac.update(match side {
                Side::Member => b"thunder join: member",
                Side::Newcomer => b"thunder join: newcomer",
            });
            mac.update(&self.context);
            Some(mac)
        };
        let (own, other) = match self.side {
            Side::Member => (Side::Member, Side::Newcomer),
            Side::Newcomer => (Side::Newcomer, Side::Member),
        };
        Some(Proofs { own: mac(own)?.finalize().into_bytes().into(), expected: mac(other)? })
    }
}

impl Proofs {
    /// The proof to send.
    pub fn own(&self) -> [u8; 32] {
        self.own
    }

    /// Whether the other side has proved that it knows the code. Takes the same time for any wrong
    /// proof.
    pub fn accepts(self, proof: &[u8]) -> bool {
        self.expected.verify_slice(proof).is_ok()
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
    use super::*;

    const MEMBER: NodeId = NodeId([1; 32]);
    const NEWCOMER: NodeId = NodeId([2; 32]);

    fn exchange(codes: [&Code; 2], members: [&NodeId; 2], bindings: [&Binding; 2]) -> [bool; 2] {
        let (a, to_b) = Exchange::start(Side::Member, codes[0], members[0], &NEWCOMER, bindings[0]);
        let (b, to_a) = Exchange::start(Side::Newcomer, codes[1], members[1], &NEWCOMER, bindings[1]);
        let (a, b) = (a.finish(&to_a).unwrap(), b.finish(&to_b).unwrap());
        let (of_a, of_b) = (a.own(), b.own());
        [a.accepts(&of_b), b.accepts(&of_a)]
    }

    #[test]
    fn both_sides_prove_the_code_the_keys_and_the_connection() {
        let (code, other) = (Code::draw(&NEWCOMER).unwrap(), Code::draw(&NEWCOMER).unwrap());
        let (one, two) = ([5; 32], [6; 32]);
        assert_eq!(exchange([&code, &code], [&MEMBER, &MEMBER], [&one, &one]), [true, true]);
        assert_eq!(exchange([&code, &other], [&MEMBER, &MEMBER], [&one, &one]), [false, false]);
        // An attacker in the middle has a separate connection and key on each side.
        assert_eq!(exchange([&code, &code], [&MEMBER, &MEMBER], [&one, &two]), [false, false]);
        assert_eq!(exchange([&code, &code], [&MEMBER, &NodeId([9; 32])], [&one, &one]), [false, false]);
    }

    #[test]
    fn a_proof_cannot_be_reflected_and_garbage_is_no_element() {
        let code = Code::draw(&NEWCOMER).unwrap();
        let start = |side| Exchange::start(side, &code, &MEMBER, &NEWCOMER, &[5; 32]);
        let (member, to_newcomer) = start(Side::Member);
        // The member gets its own element back.
        assert!(member.finish(&to_newcomer).is_none());
        let ((member, _), (_, to_member)) = (start(Side::Member), start(Side::Newcomer));
        let proofs = member.finish(&to_member).unwrap();
        let own = proofs.own();
        assert!(!proofs.accepts(&own));
        for garbage in [&b""[..], &[0; 33], &[0x42; 32], &[0xff; 200]] {
            assert!(start(Side::Newcomer).0.finish(garbage).is_none(), "{garbage:?}");
        }
    }
}
