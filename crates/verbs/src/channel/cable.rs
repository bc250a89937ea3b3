//! Which of its addresses a cable's port faces the peer by, where it has several (VLANs, aliases).

use super::message::{put, take};
use crate::device::Context;
use crate::error::{Error, Result};
use std::cmp::Reverse;
use std::io::{Read, Write};
use std::net::Ipv4Addr;
use std::sync::Arc;

/// One cable to the peer. The two sides must list their cables in the same order, or the directions deadlock.
#[derive(Clone)]
pub struct Link {
    /// The device at this end.
    pub context: Arc<Context>,
    /// The address by which the device's interface faces the peer ([`Link::face_peer`] finds it); without it, the
    /// interface's own is used.
    pub facing: Option<Ipv4Addr>,
}

impl Link {
    /// Finds the address by which each link faces the peer, over a stream to it: of all pairs of addresses, one of each end,
    /// the two in the smallest common network. Both sides must call this. Links without an IPv4 address stay as they are.
    pub fn face_peer(links: &mut [Self], stream: &mut (impl Read + Write)) -> Result<()> {
        let ours = links.iter().map(|link| link.context.addresses()).collect::<Result<Vec<_>>>()?;
        put(stream, &ours)?;
        let theirs: Vec<Vec<Ipv4Addr>> = take(stream)?;
        if ours.len() != theirs.len() {
            let what = format!("cables here {}, there {}", ours.len(), theirs.len());
            return Err(Error::Mismatch { what });
        }
        for (link, (ours, theirs)) in links.iter_mut().zip(ours.iter().zip(&theirs)) {
            link.facing = nearest(ours, theirs).or(link.facing);
        }
        Ok(())
    }
}

/// Ours of the two addresses that have the most leading bits in common. Among equals both sides take the same two.
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
    fn both_sides_take_addresses_of_the_network_that_they_share() {
        let here = addresses(&["10.0.0.7", "10.9.0.7", "192.168.4.1"]);
        for (there, ours, theirs) in [
            (&["172.16.0.3", "10.9.0.3"][..], "10.9.0.7", "10.9.0.3"),
            (&["192.168.4.2", "192.168.5.1"], "192.168.4.1", "192.168.4.2"),
            // Two networks are shared, the pairs are as near in both.
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
