//! Messages of the handshake, over a stream such as TCP.

use super::options::Mode;
use crate::error::{Error, Result};
use crate::queue::QueueAddress;
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use std::io::{Read, Write};

/// Protocol version. Increase it when frames or handshake messages change.
pub(super) const VERSION: u32 = 1;
/// Longest handshake message that is accepted.
const MAX_HANDSHAKE_BYTES: u32 = 64 * 1024;

/// What the peer needs to connect to a channel. Sent over TCP, as JSON or in any other form.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChannelAddress {
    /// Protocol version.
    pub version: u32,
    /// How frames travel.
    pub mode: Mode,
    /// A random number, sent in every frame of this side.
    pub session: u32,
    /// The lanes, in order.
    pub lanes: Vec<LaneAddress>,
}

/// A lane of a [`ChannelAddress`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LaneAddress {
    /// Bytes of a slot.
    pub slot_bytes: usize,
    /// The queue pair.
    pub queue: QueueAddress,
}

/// The number of frames that each lane can receive. A side sends it once its receives are posted.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Readiness {
    /// Slots of each lane.
    pub slots: Vec<u32>,
}

impl ChannelAddress {
    /// Checks that the peer's channel has the same version, mode and lanes.
    pub(super) fn check_peer(&self, peer: &Self) -> Result<()> {
        let shape = |address: &Self| address.lanes.iter().map(|lane| lane.slot_bytes).collect::<Vec<_>>();
        let differ = |what: &str, ours: String, theirs: String| {
            Err(Error::Mismatch { what: format!("{what} here {ours}, there {theirs}") })
        };
        if self.version != peer.version {
            return differ("version", self.version.to_string(), peer.version.to_string());
        }
        if self.mode != peer.mode {
            return differ("mode", format!("{:?}", self.mode), format!("{:?}", peer.mode));
        }
        if shape(self) != shape(peer) {
            return differ("slot sizes", format!("{:?}", shape(self)), format!("{:?}", shape(peer)));
        }
        let has_window = |lane: &LaneAddress| lane.queue.window.is_some();
        if self.mode == Mode::RcWrite && !peer.lanes.iter().all(has_window) {
            return differ("windows", "one per lane".to_string(), "fewer".to_string());
        }
        Ok(())
    }
}

/// Writes a message with its length in front.
pub(super) fn put(stream: &mut impl Write, message: &impl Serialize) -> Result<()> {
    let failed = |reason: String| Error::Handshake { reason };
    let body = serde_json::to_vec(message).map_err(|error| failed(error.to_string()))?;
    let mut bytes = (body.len() as u32).to_le_bytes().to_vec();
    bytes.extend(body);
    stream
        .write_all(&bytes)
        .and_then(|()| stream.flush())
        .map_err(|error| failed(format!("sending: {error}")))
}

/// Reads a message that [`put`] wrote.
pub(super) fn take<T: DeserializeOwned>(stream: &mut impl Read) -> Result<T> {
    let failed = |reason: String| Error::Handshake { reason };
    let mut len = [0; 4];
    stream.read_exact(&mut len).map_err(|error| failed(format!("receiving: {error}")))?;
    let len = u32::from_le_bytes(len);
    if len > MAX_HANDSHAKE_BYTES {
        return Err(failed(format!("a message of {len} bytes is above the limit of {MAX_HANDSHAKE_BYTES}")));
    }
    let mut body = vec![0; len as usize];
    stream.read_exact(&mut body).map_err(|error| failed(format!("receiving: {error}")))?;
    serde_json::from_slice(&body).map_err(|error| failed(format!("invalid message: {error}")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gid::Gid;

    fn address(mode: Mode, slot_bytes: usize) -> ChannelAddress {
        let gid = Gid::from_bytes([0; 16]);
        let queue = QueueAddress { qpn: 17, psn: 4711, gid, lid: 0, mtu_bytes: 4096, window: None };
        ChannelAddress { version: VERSION, mode, session: 9, lanes: vec![LaneAddress { slot_bytes, queue }] }
    }

    #[test]
    fn an_address_is_read_as_written() {
        let sent = address(Mode::Uc, 4096);
        let mut wire = Vec::new();
        put(&mut wire, &sent).unwrap();
        assert_eq!(take::<ChannelAddress>(&mut wire.as_slice()).unwrap(), sent);
    }

    #[test]
    fn bytes_that_are_no_message_are_an_error() {
        for wire in [&b"GET / HTTP/1.1\r\n"[..], &[9, 0, 0, 0, b'{'], &[2, 0, 0, 0, b'{', b'}'], &[]] {
            let error = take::<ChannelAddress>(&mut &wire[..]).unwrap_err();
            assert!(matches!(error, Error::Handshake { .. }), "{error}");
        }
    }

    #[test]
    fn a_mismatch_names_what_differs() {
        let ours = address(Mode::Uc, 4096);
        assert!(ours.check_peer(&ours).is_ok());
        let newer = ChannelAddress { version: VERSION + 1, ..ours.clone() };
        for (peer, word) in
            [(newer, "version"), (address(Mode::Rc, 4096), "mode"), (address(Mode::Uc, 8192), "slot sizes")]
        {
            let text = ours.check_peer(&peer).unwrap_err().to_string();
            assert!(text.contains(word), "{text}");
        }
        let no_window = address(Mode::RcWrite, 4096);
        assert!(no_window.check_peer(&no_window).unwrap_err().to_string().contains("windows"));
    }
}
