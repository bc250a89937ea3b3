//! Where a rank can be reached.

use std::cmp::Reverse;
use std::net::{IpAddr, Ipv4Addr};

use serde::{Deserialize, Serialize};

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
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_address_on_the_cable_comes_first() {
        let addresses = |texts: &[&str]| texts.iter().map(|text| text.parse().unwrap()).collect();
        let listed = ["fe80::1", "10.0.1.9", "10.0.7.2", "127.0.0.1"];
        let endpoint = Endpoint {
            host: String::new(),
            addresses: addresses(&listed),
            port: 1,
            connections: 1,
            local: String::new(),
            session: String::new(),
        };
        let sorted: Vec<IpAddr> = addresses(&["10.0.7.2", "10.0.1.9", "127.0.0.1", "fe80::1"]);
        let ours = ["192.168.3.1", "10.0.7.1"].map(|text| text.parse().unwrap());
        assert_eq!(endpoint.nearest_first(&ours).addresses, sorted);
        assert_eq!(endpoint.nearest_first(&[]).addresses, addresses(&listed), "the order without cables");
    }
}
