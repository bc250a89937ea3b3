//! A cable to the peer, and which of its port's addresses to use if it has several (VLANs,
//! aliases).

use super::message::{put, take};
use crate::device::Context;
use crate::error::{Error, Result};
use std::cmp::Reverse;
use std::io::{Read, Write};
use std::net::Ipv4Addr;
use std::sync::Arc;

/// One cable to the peer. Both sides must list their cables in the same order, or the two
/// directions deadlock.
#[derive(Clone)]
pub struct Cable {
    /// The device at this end.
    pub context: Arc<Context>,
    /// The port's address to use, found by [`Cable::find_addresses`]. `None`: the interface's own
    /// address.
    pub local_address: Option<Ipv4Addr>,
}

impl Cable {
    /// Sets each cable's `local_address`, after exchanging addresses with the peer over `stream`:
    /// of all pairs of a local and a remote address, the two in the smallest common network. Both
    /// sides must call this. A cable without an IPv4 address is not changed.
    pub fn find_addresses(cables: &mut [Self], stream: &mut (impl Read + Write)) -> Result<()> {
        let ours = cables.iter().map(|cable| cable.context.addresses()).collect::<Result<Vec<_>>>()?;
        put(stream, &ours)?;
        let theirs: Vec<Vec<Ipv4Addr>> = take(stream)?;
        if ours.len() != theirs.len() {
            let what = format!("cables here {}, there {}", ours.len(), theirs.len());
            return Err(Error::Mismatch { what });
        }
        for (cable, (ours, theirs)) in cables.iter_mut().zip(ours.iter().zip(&theirs)) {
            cable.local_address = nearest(ours, theirs).or(cable.local_address);
        }
        Ok(())
    }
}

/// The local address of the pair with the most leading bits in common. Both sides break ties alike,
/// so they choose the same pair.
fn nearest(ours: &[Ipv4Addr], theirs: &[Ipv4Addr]) -> Option<Ipv4Addr> {
    let pairs = ours.iter().flat_map(|own| theirs.iter().map(move |peer| (*own, *peer)));
    let rank = |(own, peer): &(Ipv4Addr, Ipv4Addr)| {
        let common = (own.to_bits() ^ peer.to_bits()).leading_zeros();
        (common, Reverse(*own.min(peer)), Reverse(*own.max(peer)))
    };
    pairs.max_by_key(rank).map(|(own, _)| own)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn addresses(texts: &[&str]) -> Vec<Ipv4Addr> {
        texts.iter().map(|text| text.parse().unwrap()).collect()
    }

    #[test]
    fn both_sides_choose_addresses_in_their_common_network() {
        let here = addresses(&["10.0.0.7", "10.9.0.7", "192.168.4.1"]);
        for (there, ours, theirs) in [
            (&["172.16.0.3", "10.9.0.3"][..], "10.9.0.7", "10.9.0.3"),
            (&["192.168.4.2", "192.168.5.1"], "192.168.4.1", "192.168.4.2"),
            // Two common networks, with equally many leading bits in common.
            (&["10.9.0.6", "10.0.0.6"], "10.0.0.7", "10.0.0.6"),
        ] {
            let there = addresses(there);
            assert_eq!(nearest(&here, &there), Some(ours.parse().unwrap()), "{there:?}");
            assert_eq!(nearest(&there, &here), Some(theirs.parse().unwrap()), "{there:?}");
        }
        assert_eq!(nearest(&here, &[]), None);
        assert_eq!(nearest(&[], &here), None);
    }
}
