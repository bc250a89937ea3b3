//! Connecting a channel. Each step is a type, and the last step needs a message that only a ready
//! peer can send.

use super::abort::Abort;
use super::cable::Cable;
use super::credit::MIN_SLOTS;
use super::lane::{Lane, LaneParts};
use super::message::{ChannelAddress, LaneAddress, Readiness, VERSION, put, take};
use super::options::{ChannelOptions, Mode};
use super::stream::Channel;
use crate::device::Context;
use crate::error::{Error, Result};
use crate::memory::ProtectionDomain;
use crate::profile::FRAME_BYTES;
use crate::queue::{Init, QueuePair, ReadyToSend};
use crate::random::random_u32;
use std::io::{Read, Write};
use std::sync::Arc;

/// A channel whose queue pairs exist. The peer's address is not known yet.
pub struct Prepared {
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

/// A channel that is connected, with posted receives. It may send only after the peer's
/// [`Readiness`] has arrived.
pub struct Connected {
    ports: Vec<(Arc<Context>, u8)>,
    lanes: Vec<(QueuePair<ReadyToSend>, LaneShape, LaneAddress)>,
    mode: Mode,
    sessions: (u32, u32),
    readiness: Readiness,
}

impl Channel {
    /// Makes the queue pairs of a channel over `cables`.
    pub fn prepare(cables: &[Cable], options: ChannelOptions) -> Result<Prepared> {
        options.check()?;
        let (mut ports, mut lanes) = (Vec::new(), Vec::new());
        for (index, cable) in cables.iter().enumerate() {
            let domain = ProtectionDomain::new(&cable.context)?;
            let port = cable.context.choose_port(cable.local_address)?;
            let equal_frames = cable.context.profile().equal_frames;
            let short = (index == 0).then_some((FRAME_BYTES, options.short_slots));
            let long = (options.long_slot_bytes > 0).then_some((options.long_slot_bytes, options.long_slots));
            for (slot_bytes, slots) in short.into_iter().chain(long) {
                let pair = QueuePair::create(&domain, options.queue(slot_bytes, slots))?.init(&port)?;
                lanes.push((pair, LaneShape { slot_bytes, slots, equal_frames }));
            }
            ports.push((Arc::clone(&cable.context), port.number));
        }
        if lanes.is_empty() {
            let rule = "a channel needs at least one".to_string();
            return Err(Error::BadSize { what: "the number of cables", value: 0, rule });
        }
        let addresses = lanes
            .iter()
            .map(|(pair, shape)| LaneAddress { slot_bytes: shape.slot_bytes, queue: pair.address() })
            .collect();
        let (mode, session) = (options.mode, random_u32()?);
        let address = ChannelAddress { version: VERSION, mode, session, lanes: addresses };
        Ok(Prepared { options, address, ports, lanes })
    }
}

impl Prepared {
    /// The address to send to the peer.
    pub fn address(&self) -> &ChannelAddress {
        &self.address
    }

    /// Connects to the peer and posts all receives.
    pub fn connect(self, peer: &ChannelAddress) -> Result<Connected> {
        self.address.check_peer(peer)?;
        let mut lanes = Vec::with_capacity(self.lanes.len());
        let mut slots = Vec::with_capacity(self.lanes.len());
        for ((pair, mut shape), peer) in self.lanes.into_iter().zip(&peer.lanes) {
            let mut pair = pair.connect(&peer.queue)?.activate()?;
            if self.options.mode != Mode::RcWrite {
                shape.slots = pair.post_receives()?;
            }
            if shape.slots < MIN_SLOTS {
                let rule = format!("the device accepted too few, credits need {MIN_SLOTS}");
                return Err(Error::BadSize { what: "posted receives", value: shape.slots as usize, rule });
            }
            slots.push(shape.slots);
            lanes.push((pair, shape, peer.clone()));
        }
        let sessions = (self.address.session, peer.session);
        let (ports, mode) = (self.ports, self.options.mode);
        Ok(Connected { ports, lanes, mode, sessions, readiness: Readiness { slots } })
    }

    /// Connects by exchanging addresses, then readiness, over a stream to the peer. Both sides must
    /// call this. The caller sets time limits on the stream.
    pub fn handshake(self, stream: &mut (impl Read + Write), abort: Abort) -> Result<Channel> {
        put(stream, self.address())?;
        let connected = self.connect(&take(stream)?)?;
        put(stream, connected.readiness())?;
        let peer: Readiness = take(stream)?;
        connected.start(&peer, abort)
    }
}

impl Connected {
    /// The readiness to send to the peer.
    pub fn readiness(&self) -> &Readiness {
        &self.readiness
    }

    /// Makes the channel, given the peer's readiness.
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
