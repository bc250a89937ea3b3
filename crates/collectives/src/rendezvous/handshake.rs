//! The handshake on every connection. Each side proves that it knows the secret, with an HMAC over
//! the other side's fresh nonce. Then the connecting side confirms that it has seen the proof:
//! until then it may have given up and connected again, so the accepting side must not rely on it.

use std::io::{self, Read, Write};

use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;

const NONCE_BYTES: usize = 32;
const TAG_BYTES: usize = 32;
/// A hello is an address list, which is far shorter.
const MESSAGE_LIMIT_BYTES: u32 = 64 << 10;
/// Changes with the wire format.
pub(crate) const GREETING: &[u8; 8] = b"thunder3";

const SECRETS_DIFFER: &str = "the secrets differ: give all ranks the same THUNDER_SECRET";

/// The last byte that the connecting side sends.
const CONFIRMATION: u8 = 1;

pub(crate) fn random<const N: usize>() -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    getrandom::fill(&mut bytes).map_err(io::Error::other)?;
    Ok(bytes)
}

fn tag(secret: &[u8], role: &[u8], nonces: [&[u8]; 2], message: &[u8]) -> io::Result<Hmac<Sha256>> {
    let mut mac = Hmac::<Sha256>::new_from_slice(secret).map_err(io::Error::other)?;
    for part in [role, nonces[0], nonces[1], message] {
        mac.update(part);
    }
    Ok(mac)
}

fn refused(why: &str) -> io::Error {
    io::Error::new(io::ErrorKind::PermissionDenied, why)
}

/// The connecting side: sends `hello`, proves that it knows the secret, and checks that the other
/// side knows it too.
pub(crate) fn connect(stream: &mut (impl Read + Write), secret: &[u8], hello: &[u8]) -> io::Result<()> {
    let mut greeting = [0; 8];
    stream.read_exact(&mut greeting)?;
    if &greeting != GREETING {
        let what = String::from_utf8_lossy(&greeting).escape_debug().to_string();
        return Err(refused(&format!("what listens there is no rank of this version (it says \"{what}\")")));
    }
    let mut theirs = [0; NONCE_BYTES];
    stream.read_exact(&mut theirs)?;
    let ours: [u8; NONCE_BYTES] = random()?;
    let proof = tag(secret, b"connect", [&theirs, &ours], hello)?.finalize().into_bytes();
    let mut message = Vec::with_capacity(NONCE_BYTES + TAG_BYTES + 4 + hello.len());
    message.extend_from_slice(&ours);
    message.extend_from_slice(&proof);
    write_message(&mut message, hello)?;
    stream.write_all(&message)?;
    let mut answer = [0; TAG_BYTES];
    stream.read_exact(&mut answer).map_err(|error| match error.kind() {
        io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset => refused(SECRETS_DIFFER),
        _ => error,
    })?;
    tag(secret, b"accept", [&ours, &theirs], hello)?
        .verify_slice(&answer)
        .map_err(|_| refused(SECRETS_DIFFER))?;
    stream.write_all(&[CONFIRMATION])
}

/// The accepting side: returns the hello of a peer that has proved that it knows the secret. The
/// connection counts only after [`await_confirmation`].
pub(crate) fn accept(stream: &mut (impl Read + Write), secret: &[u8]) -> io::Result<Vec<u8>> {
    let ours: [u8; NONCE_BYTES] = random()?;
    let mut opening = GREETING.to_vec();
    opening.extend_from_slice(&ours);
    stream.write_all(&opening)?;
    let mut theirs = [0; NONCE_BYTES];
    stream.read_exact(&mut theirs)?;
    let mut proof = [0; TAG_BYTES];
    stream.read_exact(&mut proof)?;
    let hello = read_message(stream)?;
    tag(secret, b"connect", [&ours, &theirs], &hello)?
        .verify_slice(&proof)
        .map_err(|_| refused(SECRETS_DIFFER))?;
    let answer = tag(secret, b"accept", [&theirs, &ours], &hello)?.finalize().into_bytes();
    stream.write_all(&answer)?;
    Ok(hello)
}

/// The accepting side's last step: the peer has seen that both know the secret, and will not
/// connect again.
pub(crate) fn await_confirmation(stream: &mut impl Read) -> io::Result<()> {
    let mut confirmation = [0];
    stream.read_exact(&mut confirmation)?;
    if confirmation == [CONFIRMATION] { Ok(()) } else { Err(refused("it does not confirm the connection")) }
}

pub(crate) fn write_message(stream: &mut impl Write, message: &[u8]) -> io::Result<()> {
    let length = u32::try_from(message.len()).map_err(io::Error::other)?;
    stream.write_all(&length.to_le_bytes())?;
    stream.write_all(message)
}

pub(crate) fn read_message(stream: &mut impl Read) -> io::Result<Vec<u8>> {
    let mut length = [0; 4];
    stream.read_exact(&mut length)?;
    let length = u32::from_le_bytes(length);
    if length > MESSAGE_LIMIT_BYTES {
        return Err(refused("the message is too long"));
    }
    let mut message = vec![0; length as usize];
    stream.read_exact(&mut message)?;
    Ok(message)
}
