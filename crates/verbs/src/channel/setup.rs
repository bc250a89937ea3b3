//! Connecting a channel: each step is a type, and the last one needs what only a ready peer can have sent.

use super::credit::MIN_SLOTS;
use super::lane::{CREDIT_BYTES, Lane, LaneParts};
use super::{Abort, Channel};
use crate::device::Context;
use crate::error::{Error, Result};
use crate::memory::ProtectionDomain;
use crate::profile::FRAME_BYTES;
use crate::queue::{Connection, Init, QueueAddress, QueueOptions, QueuePair, ReadyToSend};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use std::io::{Read, Write};
use std::net::Ipv4Addr;
use std::sync::Arc;

/// Raised whenever frames or addresses change their meaning.
pub(super) const VERSION: u32 = 1;
/// The longest message of the handshake that is believed.
const MAX_HANDSHAKE_BYTES: u32 = 64 * 1024;

/// How a channel's frames travel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Mode {
    /// Sends into posted receives, unreliable: the only mode on Apple's devices.
    Uc,
    /// Sends into posted receives, reliable.
    Rc,
    /// Reliable RDMA WRITEs into the peer's memory, with a flag behind each: no receive to post, no completion to
    /// wait for, the lowest latency.
    RcWrite,
}

impl Mode {
    fn connection(self) -> Connection {
        match self {
            Self::Uc => Connection::Uc,
            Self::Rc | Self::RcWrite => Connection::Rc,
        }
    }
}

/// One cable to the peer. The two sides must list their cables in the same order, or the directions deadlock.
#[derive(Clone)]
pub struct Link {
    /// The device at this end.
    pub context: Arc<Context>,
    /// The address by which the device's interface faces the peer ([`Link::face_peer`] finds it); without it, the
    /// interface's own is used.
    pub facing: Option<Ipv4Addr>,
}

/// What a channel is made of. Both sides must use the same.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ChannelOptions {
    /// How frames travel.
    pub mode: Mode,
    /// Slots of one frame (4 KiB) for short writes. More allow more short messages under way, each takes 8 KiB. One-sided, a
    /// power of two, as `long_slots`.
    pub short_slots: u32,
    /// Bytes of a slot for long writes, a multiple of 4 KiB; 0 for no such lanes, which halves the queue pairs. Longer
    /// ones cost less per byte, and on Apple more padding at the end of a write.
    pub long_slot_bytes: usize,
    /// Slots for long writes on each link.
    pub long_slots: u32,
}

impl ChannelOptions {
    /// Values that suit every device known: two queue pairs and four regions a link.
    pub fn new(mode: Mode) -> Self {
        Self { mode, short_slots: 32, long_slot_bytes: 64 * 1024, long_slots: 16 }
    }

    fn check(&self) -> Result<()> {
        for (what, value) in [("short_slots", self.short_slots), ("long_slots", self.long_slots)] {
            if value < MIN_SLOTS {
                let rule = format!("credits need at least {MIN_SLOTS}");
                return Err(Error::BadSize { what, value: value as usize, rule });
            }
            // A frame's slot is its number's remainder, and numbers begin anew after 2^32.
            if self.mode == Mode::RcWrite && !value.is_power_of_two() {
                let rule = "one-sided slots must be a power of two".to_string();
                return Err(Error::BadSize { what, value: value as usize, rule });
            }
        }
        if !self.long_slot_bytes.is_multiple_of(FRAME_BYTES) {
            let rule = format!("it must be a multiple of {FRAME_BYTES}");
            return Err(Error::BadSize { what: "long_slot_bytes", value: self.long_slot_bytes, rule });
        }
        Ok(())
    }

    fn queue(&self, slot_bytes: usize, slots: u32) -> QueueOptions {
        let one_sided = self.mode == Mode::RcWrite;
        QueueOptions {
            connection: self.mode.connection(),
            slot_bytes,
            // One-sided, a credit return takes a send slot beside those of the frames.
            sends: if one_sided { slots + 1 } else { slots },
            receives: if one_sided { 1 } else { slots },
            window_bytes: if one_sided { slots as usize * slot_bytes + CREDIT_BYTES } else { 0 },
        }
    }
}

/// What the peer must know of a channel before it can connect. Goes over TCP, as JSON or any other form.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChannelAddress {
    /// The version of the protocol.
    pub version: u32,
    /// How frames travel.
    pub mode: Mode,
    /// A random number that every frame of this side carries.
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

/// How many frames each lane can take: what a side says once its receives are posted.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Readiness {
    /// Per lane.
    pub slots: Vec<u32>,
}

/// Queue pairs made and bound; the peer is not known yet.
pub struct Pending {
    options: ChannelOptions,
    address: ChannelAddress,
    ports: Vec<(Arc<Context>, u8)>,
    lanes: Vec<(QueuePair<Init>, LaneShape)>,
}

#[derive(Clone, Copy)]
struct LaneShape {
    slot_bytes: usize,
    slots: u32,
    equal_frames: bool,
}

/// Connected, receives posted. Nothing may be sent until the peer is as far, and it says so by its [`Readiness`].
pub struct Armed {
    ports: Vec<(Arc<Context>, u8)>,
    lanes: Vec<(QueuePair<ReadyToSend>, LaneShape, LaneAddress)>,
    mode: Mode,
    sessions: (u32, u32),
    readiness: Readiness,
}

impl Channel {
    /// Makes the queue pairs of a channel over `links`.
    pub fn prepare(links: &[Link], options: ChannelOptions) -> Result<Pending> {
        options.check()?;
        let (mut ports, mut lanes) = (Vec::new(), Vec::new());
        for (index, link) in links.iter().enumerate() {
            let domain = ProtectionDomain::new(&link.context)?;
            let port = link.context.choose_port(link.facing)?;
            let equal_frames = link.context.profile().equal_frames;
            let short = (index == 0).then_some((FRAME_BYTES, options.short_slots));
            let long = (options.long_slot_bytes > 0).then_some((options.long_slot_bytes, options.long_slots));
            for (slot_bytes, slots) in short.into_iter().chain(long) {
                let pair = QueuePair::create(&domain, options.queue(slot_bytes, slots))?.init(&port)?;
                lanes.push((pair, LaneShape { slot_bytes, slots, equal_frames }));
            }
            ports.push((Arc::clone(&link.context), port.number));
        }
        if lanes.is_empty() {
            let rule = "a channel needs at least one".to_string();
            return Err(Error::BadSize { what: "the number of links", value: 0, rule });
        }
        let addresses = lanes
            .iter()
            .map(|(pair, shape)| LaneAddress { slot_bytes: shape.slot_bytes, queue: pair.address() })
            .collect();
        let (mode, session) = (options.mode, crate::random_u32()?);
        let address = ChannelAddress { version: VERSION, mode, session, lanes: addresses };
        Ok(Pending { options, address, ports, lanes })
    }
}

impl Pending {
    /// What to tell the peer.
    pub fn address(&self) -> &ChannelAddress {
        &self.address
    }

    /// Connects to the peer and posts all receives.
    pub fn connect(self, peer: &ChannelAddress) -> Result<Armed> {
        self.address.check_peer(peer)?;
        let mut lanes = Vec::with_capacity(self.lanes.len());
        let mut slots = Vec::with_capacity(self.lanes.len());
        for ((pair, mut shape), peer) in self.lanes.into_iter().zip(&peer.lanes) {
            let mut pair = pair.connect(&peer.queue)?.activate()?;
            if self.options.mode != Mode::RcWrite {
                shape.slots = pair.post_receives()?;
            }
            if shape.slots < MIN_SLOTS {
                let rule = format!("the device took too few, credits need {MIN_SLOTS}");
                return Err(Error::BadSize { what: "posted receives", value: shape.slots as usize, rule });
            }
            slots.push(shape.slots);
            lanes.push((pair, shape, peer.clone()));
        }
        let sessions = (self.address.session, peer.session);
        let (ports, mode) = (self.ports, self.options.mode);
        Ok(Armed { ports, lanes, mode, sessions, readiness: Readiness { slots } })
    }

    /// Connects by exchanging addresses, then readiness, over a stream to the peer, whose time limits are the
    /// caller's. Both sides must call this.
    pub fn handshake(self, stream: &mut (impl Read + Write), abort: Abort) -> Result<Channel> {
        put(stream, self.address())?;
        let armed = self.connect(&take(stream)?)?;
        put(stream, armed.readiness())?;
        let peer: Readiness = take(stream)?;
        armed.start(&peer, abort)
    }
}

impl ChannelAddress {
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

impl Armed {
    /// What to tell the peer now.
    pub fn readiness(&self) -> &Readiness {
        &self.readiness
    }

    /// The channel, given that the peer is ready too.
    pub fn start(self, peer: &Readiness, abort: Abort) -> Result<Channel> {
        if peer.slots.len() != self.lanes.len() || peer.slots.iter().any(|slots| *slots < MIN_SLOTS) {
            let what = format!("slots here {:?}, there {:?}", self.readiness.slots, peer.slots);
            return Err(Error::Mismatch { what });
        }
        let (mode, sessions) = (self.mode, self.sessions);
        let lanes = self.lanes.into_iter().zip(&peer.slots).map(|((pair, shape, peer), peer_slots)| {
            Lane::new(LaneParts {
                pair,
                remote: if mode == Mode::RcWrite { peer.queue.window } else { None },
                sessions,
                slot_bytes: shape.slot_bytes,
                slots: shape.slots,
                peer_slots: *peer_slots,
                equal_frames: shape.equal_frames,
            })
        });
        Ok(Channel::new(self.ports, lanes.collect(), abort))
    }
}

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

pub(super) fn take<T: DeserializeOwned>(stream: &mut impl Read) -> Result<T> {
    let failed = |reason: String| Error::Handshake { reason };
    let mut len = [0; 4];
    stream.read_exact(&mut len).map_err(|error| failed(format!("receiving: {error}")))?;
    let len = u32::from_le_bytes(len);
    if len > MAX_HANDSHAKE_BYTES {
        return Err(failed(format!("a message of {len} bytes, the most is {MAX_HANDSHAKE_BYTES}")));
    }
    let mut body = vec![0; len as usize];
    stream.read_exact(&mut body).map_err(|error| failed(format!("receiving: {error}")))?;
    serde_json::from_slice(&body).map_err(|error| failed(format!("not understood: {error}")))
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
    fn an_address_survives_the_side_channel() {
        let sent = address(Mode::Uc, 4096);
        let mut wire = Vec::new();
        put(&mut wire, &sent).unwrap();
        assert_eq!(take::<ChannelAddress>(&mut wire.as_slice()).unwrap(), sent);
    }

    #[test]
    fn a_strangers_bytes_are_refused_not_believed() {
        for wire in [&b"GET / HTTP/1.1\r\n"[..], &[9, 0, 0, 0, b'{'], &[2, 0, 0, 0, b'{', b'}'], &[]] {
            let error = take::<ChannelAddress>(&mut &wire[..]).unwrap_err();
            assert!(matches!(error, Error::Handshake { .. }), "{error}");
        }
    }

    #[test]
    fn peers_that_differ_are_told_in_what() {
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

    #[test]
    fn options_that_cannot_work_are_refused() {
        let good = ChannelOptions::new(Mode::Uc);
        assert!(good.check().is_ok());
        assert!(ChannelOptions { short_slots: MIN_SLOTS - 1, ..good }.check().is_err());
        assert!(ChannelOptions { long_slot_bytes: 5000, ..good }.check().is_err());
        // 2^32 frames are sent within hours: then frame 0 must have the slot behind that of frame 2^32 - 1.
        let odd = ChannelOptions { long_slots: 12, ..good };
        assert!(odd.check().is_ok());
        assert!(ChannelOptions { mode: Mode::RcWrite, ..odd }.check().is_err());
        assert!(ChannelOptions::new(Mode::RcWrite).check().is_ok());
    }
}
