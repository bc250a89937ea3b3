//! A TCP connection whose bytes are encrypted and authenticated: records of AES-128-GCM with keys
//! that only the two ranks know.
//!
//! Each side sends a fresh X25519 key. The keys of both directions follow from the exchange and the
//! group's secret together, so that nobody without the secret can sit in between, and nobody who
//! learns the secret later can read what was recorded. A record is its length, the sealed bytes and
//! a tag of 16 bytes; its number is the nonce, so none can be left out, repeated or moved.

use std::io::{self, ErrorKind, Read, Write};
use std::net::TcpStream;
use std::ops::Range;
use std::os::fd::{AsRawFd, RawFd};

use hmac::{Hmac, KeyInit, Mac};
use ring::aead::{AES_128_GCM, Aad, LessSafeKey, NONCE_LEN, Nonce, UnboundKey};
use ring::agreement::{EphemeralPrivateKey, UnparsedPublicKey, X25519, agree_ephemeral};
use ring::rand::SystemRandom;
use sha2::Sha256;

use super::Connection;

/// Most bytes of a record. Longer ones need fewer calls, shorter ones reach the other side's
/// decryption sooner.
const RECORD_BYTES: usize = 32 << 10;
const LENGTH_BYTES: usize = 4;
const TAG_BYTES: usize = 16;
const SEALED_BYTES: usize = LENGTH_BYTES + RECORD_BYTES + TAG_BYTES;
/// Bytes that are received at once: several records.
const INPUT_BYTES: usize = 4 * SEALED_BYTES;
/// Records with one key. AES-GCM loses strength after about 2^24.5 records of this size
/// (RFC 8446, 5.5).
const RECORDS_PER_KEY: u64 = 1 << 24;
/// Bytes of an X25519 key.
const PUBLIC_BYTES: usize = 32;

/// One direction's key, and the number of its next record.
struct Direction {
    key: LessSafeKey,
    /// The secret from which the next key is derived.
    secret: [u8; 32],
    records: u64,
}

impl Direction {
    fn new(secret: [u8; 32]) -> io::Result<Self> {
        let key = UnboundKey::new(&AES_128_GCM, &derive(&secret, &[b"key"])?[..16]);
        let key = LessSafeKey::new(key.map_err(|_| io::Error::other("no AES-GCM"))?);
        Ok(Self { key, secret, records: 0 })
    }

    /// The nonce of the next record. The key changes before it has sealed too many.
    fn next(&mut self) -> io::Result<Nonce> {
        if self.records == RECORDS_PER_KEY {
            *self = Self::new(derive(&self.secret, &[b"next"])?)?;
        }
        let mut nonce = [0; NONCE_LEN];
        nonce[NONCE_LEN - 8..].copy_from_slice(&self.records.to_be_bytes());
        self.records += 1;
        Ok(Nonce::assume_unique_for_key(nonce))
    }
}

fn derive(secret: &[u8], parts: &[&[u8]]) -> io::Result<[u8; 32]> {
    let mut mac = Hmac::<Sha256>::new_from_slice(secret).map_err(io::Error::other)?;
    for part in parts {
        mac.update(&(part.len() as u64).to_le_bytes());
        mac.update(part);
    }
    Ok(mac.finalize().into_bytes().into())
}

/// A connection with sealed records.
pub(crate) struct Sealed {
    stream: TcpStream,
    sealing: Direction,
    opening: Direction,
    /// A sealed record that the system has not accepted completely.
    output: Vec<u8>,
    /// Number of its bytes that the system has accepted.
    written: usize,
    /// Number of its bytes before they were sealed; 0: there is no record.
    waiting: usize,
    input: Box<[u8]>,
    /// Opened bytes of `input` that were not read yet.
    opened: Range<usize>,
    /// Received bytes of `input` after them.
    received: Range<usize>,
}

impl Sealed {
    /// Agrees on keys over a connection on which both sides have proved that they know `secret`.
    /// One side is the one that has `dialed`. Blocks, within the stream's limits.
    pub fn agree(mut stream: TcpStream, secret: &[u8], dialed: bool) -> io::Result<Self> {
        let failed = |_| io::Error::new(ErrorKind::PermissionDenied, "the ranks agree on no key");
        let random = SystemRandom::new();
        let private = EphemeralPrivateKey::generate(&X25519, &random).map_err(failed)?;
        let public = private.compute_public_key().map_err(failed)?;
        stream.write_all(public.as_ref())?;
        let mut theirs = [0; PUBLIC_BYTES];
        stream.read_exact(&mut theirs)?;
        let (dialer, accepter) =
            if dialed { (public.as_ref(), &theirs[..]) } else { (&theirs[..], public.as_ref()) };
        let keys = agree_ephemeral(private, &UnparsedPublicKey::new(&X25519, theirs), |shared| {
            let both = derive(secret, &[b"thunder ranks", shared, dialer, accepter])?;
            Ok::<_, io::Error>([derive(&both, &[b"dialer"])?, derive(&both, &[b"accepter"])?])
        });
        let [of_dialer, of_accepter] = keys.map_err(failed)??;
        let (sealing, opening) = if dialed { (of_dialer, of_accepter) } else { (of_accepter, of_dialer) };
        Ok(Self {
            stream,
            sealing: Direction::new(sealing)?,
            opening: Direction::new(opening)?,
            output: Vec::with_capacity(SEALED_BYTES),
            written: 0,
            waiting: 0,
            input: vec![0; INPUT_BYTES].into_boxed_slice(),
            opened: 0..0,
            received: 0..0,
        })
    }

    /// Seals the first bytes of `first`, then `second`, as the next record.
    fn seal(&mut self, first: &[u8], second: &[u8]) -> io::Result<()> {
        let first = &first[..first.len().min(RECORD_BYTES)];
        let second = &second[..second.len().min(RECORD_BYTES - first.len())];
        let length = first.len() + second.len();
        let header = (length as u32).to_le_bytes();
        self.output.clear();
        self.output.extend_from_slice(&header);
        self.output.extend_from_slice(first);
        self.output.extend_from_slice(second);
        let nonce = self.sealing.next()?;
        let sealed = &mut self.output[LENGTH_BYTES..];
        let tag = self.sealing.key.seal_in_place_separate_tag(nonce, Aad::from(header), sealed);
        let tag = tag.map_err(|_| io::Error::other("a record cannot be sealed"))?;
        self.output.extend_from_slice(tag.as_ref());
        (self.written, self.waiting) = (0, length);
        Ok(())
    }

    /// The length of the first received record, if it has arrived completely.
    fn whole_record(&self) -> io::Result<Option<usize>> {
        let received = &self.input[self.received.clone()];
        let Some(header) = received.first_chunk::<LENGTH_BYTES>() else { return Ok(None) };
        let length = u32::from_le_bytes(*header) as usize;
        if length == 0 || length > RECORD_BYTES {
            return Err(forged());
        }
        Ok((received.len() >= LENGTH_BYTES + length + TAG_BYTES).then_some(length))
    }

    /// Opens the first received record, if it has arrived completely and all earlier ones were
    /// read.
    fn open(&mut self) -> io::Result<bool> {
        let Some(length) = self.whole_record()? else { return Ok(false) };
        let start = self.received.start + LENGTH_BYTES;
        let header = (length as u32).to_le_bytes();
        let nonce = self.opening.next()?;
        let sealed = &mut self.input[start..start + length + TAG_BYTES];
        self.opening.key.open_in_place(nonce, Aad::from(header), sealed).map_err(|_| forged())?;
        self.opened = start..start + length;
        self.received.start = start + length + TAG_BYTES;
        Ok(true)
    }
}

fn forged() -> io::Error {
    io::Error::new(ErrorKind::InvalidData, "a record was changed on the way")
}

impl Connection for Sealed {
    fn set_up(&self) -> io::Result<()> {
        self.stream.set_up()
    }

    fn read(&mut self, target: &mut [u8]) -> io::Result<usize> {
        let mut count = 0;
        loop {
            let from = &self.input[self.opened.clone()];
            let some = from.len().min(target.len() - count);
            target[count..count + some].copy_from_slice(&from[..some]);
            self.opened.start += some;
            count += some;
            if count == target.len() {
                return Ok(count);
            }
            if self.open()? {
                continue;
            }
            if count > 0 {
                return Ok(count);
            }
            // Less than a record is left, so moving it is cheap.
            self.input.copy_within(self.received.clone(), 0);
            self.received = 0..self.received.len();
            match Read::read(&mut self.stream, &mut self.input[self.received.end..])? {
                0 => return Ok(0),
                more => self.received.end += more,
            }
        }
    }

    /// Counts bytes only once their whole record is with the system: then nothing is left that
    /// would have to be sent later. Until then the caller passes the same bytes again.
    fn write(&mut self, first: &[u8], second: &[u8]) -> io::Result<usize> {
        let (mut count, all) = (0, first.len() + second.len());
        while count < all {
            if self.waiting == 0 {
                let (first, second) =
                    (&first[count.min(first.len())..], &second[count.saturating_sub(first.len())..]);
                self.seal(first, second)?;
            }
            while self.written < self.output.len() {
                match Write::write(&mut self.stream, &self.output[self.written..]) {
                    Ok(more) => self.written += more,
                    Err(error) if error.kind() == ErrorKind::Interrupted => {}
                    Err(error) if error.kind() == ErrorKind::WouldBlock && count > 0 => return Ok(count),
                    Err(error) => return Err(error),
                }
            }
            count += std::mem::take(&mut self.waiting);
        }
        Ok(count)
    }

    fn is_ready(&self) -> bool {
        !self.opened.is_empty() || !matches!(self.whole_record(), Ok(None))
    }

    fn descriptor(&self) -> RawFd {
        self.stream.as_raw_fd()
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    fn streams() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let one = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        (one, listener.accept().unwrap().0)
    }

    /// Both ends of a connection, and the middle where its bytes pass.
    fn pair(secrets: [&'static [u8]; 2]) -> (Sealed, Sealed) {
        let (near, far) = streams();
        let far = std::thread::spawn(move || Sealed::agree(far, secrets[1], false).unwrap());
        (Sealed::agree(near, secrets[0], true).unwrap(), far.join().unwrap())
    }

    #[test]
    fn bytes_arrive_as_they_were_sent_and_are_not_seen_on_the_way() {
        let (near, far) = streams();
        let (tap, out) = streams();
        let mut watched = near.try_clone().unwrap();
        let (mut middle_in, mut middle_out) = (far, tap);
        let relay = std::thread::spawn(move || {
            let mut back = (middle_in.try_clone().unwrap(), middle_out.try_clone().unwrap());
            std::thread::spawn(move || io::copy(&mut back.1, &mut back.0));
            let mut seen = Vec::new();
            let mut piece = [0; 4096];
            while let Ok(count @ 1..) = Read::read(&mut middle_in, &mut piece) {
                seen.extend_from_slice(&piece[..count]);
                middle_out.write_all(&piece[..count]).unwrap();
            }
            seen
        });
        let far = std::thread::spawn(move || Sealed::agree(out, b"s", false).unwrap());
        let mut near = Sealed::agree(near, b"s", true).unwrap();
        let mut far = far.join().unwrap();
        let text = b"nobody reads this sentence".repeat(10_000);
        let receive = std::thread::spawn(move || {
            let mut all = vec![0; 260_000];
            let mut count = 0;
            while count < all.len() {
                let end = (count + 10_001).min(all.len());
                count += far.read(&mut all[count..end]).unwrap();
            }
            all
        });
        assert_eq!(near.write(&text[..64], &text[64..]).unwrap(), text.len());
        assert!(receive.join().unwrap() == text);
        watched.flush().unwrap();
        watched.shutdown(std::net::Shutdown::Both).unwrap();
        let seen = relay.join().unwrap();
        assert!(seen.len() > text.len());
        assert!(!seen.windows(8).any(|bytes| bytes == b"sentence"));
    }

    #[test]
    fn what_was_changed_repeated_or_sealed_by_another_is_refused() {
        // Another secret.
        let (mut near, mut far) = pair([b"one", b"other"]);
        near.write(b"hello", b"").unwrap();
        assert_eq!(far.read(&mut [0; 5]).unwrap_err().kind(), ErrorKind::InvalidData);
        // A changed bit, of the length, the bytes or the tag.
        for place in [0, 6, 12] {
            let (mut near, mut far) = pair([b"s", b"s"]);
            near.seal(b"hello", b"").unwrap();
            near.output[place] ^= 1;
            near.stream.write_all(&near.output).unwrap();
            // A longer length would only wait for more bytes.
            near.stream.write_all(&[0; 64]).unwrap();
            assert_eq!(far.read(&mut [0; 5]).unwrap_err().kind(), ErrorKind::InvalidData, "{place}");
        }
        // A record that comes twice.
        let (mut near, mut far) = pair([b"s", b"s"]);
        near.write(b"hello", b"").unwrap();
        let again = near.output.clone();
        near.stream.write_all(&again).unwrap();
        assert_eq!(far.read(&mut [0; 5]).unwrap(), 5);
        assert_eq!(far.read(&mut [0; 5]).unwrap_err().kind(), ErrorKind::InvalidData);
        // A length that no record has.
        let (mut near, mut far) = pair([b"s", b"s"]);
        near.stream.write_all(&[0xff; 64]).unwrap();
        assert_eq!(far.read(&mut [0; 5]).unwrap_err().kind(), ErrorKind::InvalidData);
        near.stream.shutdown(std::net::Shutdown::Both).unwrap();
    }

    #[test]
    fn a_slow_receiver_makes_the_sender_wait_and_loses_nothing() {
        let (mut near, mut far) = pair([b"s", b"s"]);
        near.set_up().unwrap();
        far.set_up().unwrap();
        let message: Vec<u8> = (0..20_000_000u32).map(|index| (index / 3) as u8).collect();
        let (mut sent, mut got, mut waited) = (0, 0, 0);
        let mut received = vec![0; message.len()];
        while got < message.len() {
            match near.write(&message[sent..], b"") {
                Ok(count) => sent += count,
                Err(error) => {
                    assert_eq!(error.kind(), ErrorKind::WouldBlock);
                    waited += 1;
                }
            }
            let end = (got + 100_000).min(received.len());
            match far.read(&mut received[got..end]) {
                Ok(count) => got += count,
                Err(error) => assert_eq!(error.kind(), ErrorKind::WouldBlock),
            }
        }
        assert!(received == message && waited > 0);
    }

    #[test]
    fn the_key_changes_in_time_on_both_sides() {
        let (mut near, mut far) = pair([b"s", b"s"]);
        near.sealing.records = RECORDS_PER_KEY - 1;
        far.opening.records = RECORDS_PER_KEY - 1;
        let before = near.sealing.secret;
        for _ in 0..3 {
            near.write(b"hello", b"").unwrap();
            let mut five = [0; 5];
            assert_eq!((far.read(&mut five).unwrap(), &five), (5, b"hello"));
        }
        assert_ne!(near.sealing.secret, before);
        assert_eq!(near.sealing.records, 2);
    }
}
