//! Where a rank can be reached.

use std::cmp::Reverse;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, SocketAddrV6};

use serde::{Deserialize, Serialize};

use super::interfaces::is_link_local;
use crate::CableNetwork;

/// A rank's address, as all ranks get it. The field names are part of the wire format.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Endpoint {
    /// Equal for ranks that can share memory.
    pub host: String,
    pub addresses: Vec<IpAddr>,
    pub port: u16,
    /// TCP connections that this rank wants to each other rank.
    pub connections: usize,
    /// Name of its local socket.
    pub local: String,
    /// Name of the group that the ranks form; all use the lowest rank's.
    pub session: String,
    /// It wants TCP links to be encrypted.
    pub sealed: bool,
}

impl Endpoint {
    /// The same endpoint, with its addresses sorted by the number of leading bits that they share
    /// with one of `ours`. Keeps the order if `ours` is empty.
    pub fn nearest_first(&self, ours: &[Ipv4Addr]) -> Self {
        let shared = |address: &IpAddr| match address {
            IpAddr::V4(address) => {
                ours.iter().map(|own| (own.to_bits() ^ address.to_bits()).leading_zeros()).max()
            }
            IpAddr::V6(_) => None,
        };
        let mut sorted = self.clone();
        sorted.addresses.sort_by_key(|address| Reverse(shared(address)));
        sorted
    }

    /// The same endpoint, beginning with its addresses in the first of `networks` in which `own`
    /// has an address too. The other addresses keep their order.
    pub fn preferring(&self, own: &Self, networks: &[CableNetwork]) -> Self {
        let place = |address: &IpAddr| {
            networks.iter().position(|network| network.contains(address) && own.is_in(network))
        };
        let mut sorted = self.clone();
        sorted.addresses.sort_by_key(|address| place(address).unwrap_or(usize::MAX));
        sorted
    }

    /// Where to connect to, in order. Link-local IPv6 addresses do not say on which of this
    /// machine's networks they are, so each is tried in all of `scopes`.
    pub fn sockets(&self, scopes: &[u32]) -> Vec<SocketAddr> {
        let sockets = |address: &IpAddr| match address {
            IpAddr::V6(local) if is_link_local(address) => {
                let scoped = |scope: &u32| SocketAddrV6::new(*local, self.port, 0, *scope).into();
                scopes.iter().map(scoped).collect()
            }
            _ => vec![SocketAddr::new(*address, self.port)],
        };
        self.addresses.iter().flat_map(sockets).collect()
    }

    /// A rank that has these addresses, and nothing else that matters.
    #[cfg(test)]
    pub fn at(addresses: &[&str]) -> Self {
        Self {
            host: String::new(),
            addresses: addresses.iter().map(|text| text.parse().unwrap()).collect(),
            port: 1,
            connections: 1,
            local: String::new(),
            session: String::new(),
            sealed: false,
        }
    }

    /// True when one of the addresses is in `network`.
    pub fn is_in(&self, network: &CableNetwork) -> bool {
        self.addresses.iter().any(|address| network.contains(address))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn networks_that_both_ranks_are_in_come_first() {
        let networks: Vec<CableNetwork> =
            ["10.0.7.0/30=rdma_en2", "10.0.7.4/30", "10.0.1.0/24"].map(|text| text.parse().unwrap()).into();
        let peer = Endpoint::at(&["192.168.1.9", "10.0.1.9", "10.0.7.6", "10.0.7.2"]);
        let sorted = |own: &[&str]| {
            let sorted = peer.preferring(&Endpoint::at(own), &networks).addresses;
            sorted.iter().map(IpAddr::to_string).collect::<Vec<_>>()
        };
        let at_the_first_cable = ["10.0.7.2", "10.0.1.9", "192.168.1.9", "10.0.7.6"];
        assert_eq!(sorted(&["10.0.1.3", "10.0.7.1"]), at_the_first_cable, "the second is another rank's");
        let without = ["192.168.1.9", "10.0.1.9", "10.0.7.6", "10.0.7.2"];
        assert_eq!(sorted(&["192.168.1.3"]), without, "networks that this rank is not in");
    }

    #[test]
    fn link_local_addresses_are_tried_in_every_scope() {
        let endpoint = Endpoint::at(&["fe80::1", "10.0.1.9", "::ffff:10.0.1.9"]);
        let sockets =
            |scopes: &[u32]| endpoint.sockets(scopes).iter().map(SocketAddr::to_string).collect::<Vec<_>>();
        let others = ["10.0.1.9:1", "[::ffff:10.0.1.9]:1"];
        assert_eq!(sockets(&[]), others);
        assert_eq!(sockets(&[7, 2]), [&["[fe80::1%7]:1", "[fe80::1%2]:1"], &others[..]].concat());
    }

    #[test]
    fn the_address_on_the_cable_comes_first() {
        let addresses = |texts: &[&str]| texts.iter().map(|text| text.parse().unwrap()).collect();
        let listed = ["fe80::1", "10.0.1.9", "10.0.7.2", "127.0.0.1"];
        let endpoint = Endpoint::at(&listed);
        let sorted: Vec<IpAddr> = addresses(&["10.0.7.2", "10.0.1.9", "127.0.0.1", "fe80::1"]);
        let ours = ["192.168.3.1", "10.0.7.1"].map(|text| text.parse().unwrap());
        assert_eq!(endpoint.nearest_first(&ours).addresses, sorted);
        assert_eq!(endpoint.nearest_first(&[]).addresses, addresses(&listed), "the order without cables");
    }
}
