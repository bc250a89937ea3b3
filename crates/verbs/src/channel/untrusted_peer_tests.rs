//! Malformed messages and frames from a peer must give an error, never a panic, a huge allocation
//! or a credit that does not exist.

use super::credit::{Credits, MIN_SLOTS};
use super::frame::{FrameKind, HEADER_BYTES, Header};
use super::lane::check_header;
use super::message::{ChannelAddress, LaneAddress, Readiness, VERSION, put, take};
use super::options::Mode;
use crate::gid::Gid;
use crate::queue::{QueueAddress, RemoteWindow};
use proptest::prelude::*;

fn cases() -> ProptestConfig {
    ProptestConfig { cases: 1000, failure_persistence: None, ..ProptestConfig::default() }
}

fn address() -> ChannelAddress {
    let window = Some(RemoteWindow { address: u64::MAX - 100_000, rkey: 1, len: 32 * 4096 + 64 });
    let queue =
        QueueAddress { qpn: 17, psn: 4711, gid: Gid::from_bytes([7; 16]), lid: 0, mtu_bytes: 4096, window };
    let lanes = vec![
        LaneAddress { slot_bytes: 4096, queue: queue.clone() },
        LaneAddress { slot_bytes: 65_536, queue },
    ];
    ChannelAddress { version: VERSION, mode: Mode::RcWrite, session: 9, lanes }
}

/// A handshake message with some bytes changed, and perhaps its end cut off.
fn damaged(
    message: Vec<u8>,
    changes: &[(prop::sample::Index, u8)],
    cut: Option<prop::sample::Index>,
) -> Vec<u8> {
    let mut wire = message;
    for (at, by) in changes {
        let at = at.index(wire.len());
        wire[at] ^= by;
    }
    if let Some(cut) = cut {
        wire.truncate(cut.index(wire.len()));
    }
    wire
}

fn wire(message: &impl serde::Serialize) -> Vec<u8> {
    let mut wire = Vec::new();
    put(&mut wire, message).unwrap();
    wire
}

proptest! {
    #![proptest_config(cases())]

    #[test]
    fn a_damaged_handshake_is_refused_or_harmless(
        noise in prop::collection::vec(any::<u8>(), 0..200),
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..4),
        cut in prop::option::of(any::<prop::sample::Index>()),
    ) {
        let whole = wire(&address());
        prop_assert_eq!(take::<ChannelAddress>(&mut &whole[..]).unwrap(), address());
        for wire in [noise, damaged(whole, &changes, cut)] {
            let Ok(peer) = take::<ChannelAddress>(&mut &wire[..]) else { continue };
            let _ = address().check_peer(&peer);
            for window in peer.lanes.iter().filter_map(|lane| lane.queue.window) {
                for (offset, len) in [(0, 1), (window.len - window.len.min(8), window.len.min(8)), (usize::MAX, 8)] {
                    if let Ok(at) = window.locate(offset, len) {
                        prop_assert!(at >= window.address, "{:?} wraps around", window);
                    }
                }
            }
        }
        let ready = damaged(wire(&Readiness { slots: vec![32, 16] }), &changes, cut);
        if let Ok(ready) = take::<Readiness>(&mut &ready[..]) {
            prop_assert!(ready.slots.len() < 100);
        }
    }

    #[test]
    fn a_headers_length_never_exceeds_its_frame(mut frame in prop::collection::vec(any::<u8>(), 0..100), kind in 0u8..5, len in 0u8..100) {
        if frame.len() >= HEADER_BYTES {
            frame[16..24].copy_from_slice(&[len, 0, 0, 0, kind, 0, 0, 0]);
        }
        if let Ok(header) = Header::read(&frame) {
            prop_assert!(header.len as usize <= frame.len() - HEADER_BYTES);
        }
    }

    /// Whatever totals of freed slots arrive, there are never more credits than slots.
    #[test]
    fn credits_are_never_more_than_slots(
        frames in prop::collection::vec((any::<u32>(), 0u32..20, 0u32..20, any::<bool>()), 0..60),
    ) {
        let mut credits = Credits::new(MIN_SLOTS, MIN_SLOTS, true);
        let (mut sent, mut expected) = (0u32, 0u32);
        for (wild, ahead, freed, tame) in frames {
            while credits.allow_data() {
                credits.on_sent();
                sent += 1;
            }
            let (lane_seq, freed) = if tame { (expected + ahead % 2, freed) } else { (wild, wild.rotate_left(9)) };
            let header = Header { session: 9, lane_seq, stream_seq: wild, freed, len: 0, kind: FrameKind::Data };
            match check_header(&header, 9, expected, &mut credits) {
                Ok(missing) => {
                    prop_assert_eq!(missing, lane_seq.wrapping_sub(expected));
                    expected += u32::from(missing == 0);
                }
                Err(why) => prop_assert!(!why.is_empty()),
            }
            prop_assert!(credits.available() <= MIN_SLOTS, "{} of {MIN_SLOTS}", credits.available());
        }
        prop_assert!(credits.next_seq() == sent);
    }
}
