//! Global identifiers: a port's addresses, and the choice among them.

use crate::interface;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::net::{Ipv4Addr, Ipv6Addr};

/// A global identifier: an IPv6 address in all but name. Written as one.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Gid(Ipv6Addr);

impl Gid {
    /// The identifier with these bytes, in network order.
    pub fn from_bytes(raw: [u8; 16]) -> Self {
        Self(Ipv6Addr::from(raw))
    }

    /// Its bytes, in network order.
    pub fn bytes(self) -> [u8; 16] {
        self.0.octets()
    }

    /// The IPv4 address that it maps, if it does.
    pub fn ipv4(self) -> Option<Ipv4Addr> {
        self.0.to_ipv4_mapped()
    }

    /// It starts with fe80.
    pub fn is_link_local(self) -> bool {
        self.0.is_unicast_link_local()
    }

    /// An empty row of the table.
    pub fn is_zero(self) -> bool {
        self.0.is_unspecified()
    }
}

impl fmt::Display for Gid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl fmt::Debug for Gid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// A row of a port's table of identifiers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct GidEntry {
    /// The row, which is what a queue pair is given.
    pub index: u8,
    /// The identifier.
    pub gid: Gid,
    /// "IB/RoCE v1" or "RoCE v2", where the system tells (Linux).
    pub kind: Option<String>,
    /// The network interface that it belongs to, where the system tells.
    pub interface: Option<String>,
}

impl GidEntry {
    /// RoCE v1 cannot be routed and many devices have it switched off; the rows of both kinds have the same address.
    fn is_v1(&self) -> bool {
        self.kind.as_deref().is_some_and(|kind| kind.contains("v1"))
    }
}

/// The row to use: the one with the address `wanted`; without a wish, the one with an IPv4 address that an interface
/// of the port has, then any with an IPv4 address, then a link-local one, then what there is. RoCE v2 goes first.
pub fn choose(entries: &[GidEntry], wanted: Option<Ipv4Addr>) -> Option<&GidEntry> {
    choose_among(entries, wanted, interface::ipv4_of)
}

fn choose_among(
    entries: &[GidEntry],
    wanted: Option<Ipv4Addr>,
    ipv4_of: impl Fn(&str) -> Vec<Ipv4Addr>,
) -> Option<&GidEntry> {
    let rank = |entry: &GidEntry| -> Option<u8> {
        let mapped = entry.gid.ipv4();
        if wanted.is_some() {
            return (mapped == wanted).then_some(0);
        }
        let on_interface = |ip| entry.interface.as_deref().is_some_and(|name| ipv4_of(name).contains(&ip));
        Some(match mapped {
            Some(ip) if on_interface(ip) => 0,
            Some(_) => 1,
            None if entry.gid.is_link_local() => 2,
            None => 3,
        })
    };
    let ranked = entries.iter().filter_map(|entry| Some((rank(entry)?, entry.is_v1(), entry.index, entry)));
    ranked.min_by_key(|(rank, v1, index, _)| (*rank, *v1, *index)).map(|(.., entry)| entry)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(index: u8, gid: &str, kind: Option<&str>, interface: &str) -> GidEntry {
        GidEntry {
            index,
            gid: Gid(gid.parse().unwrap()),
            kind: kind.map(str::to_string),
            interface: Some(interface.to_string()),
        }
    }

    /// A ConnectX port as Linux lists it: each address once for RoCE v1, once for v2.
    fn connectx() -> Vec<GidEntry> {
        vec![
            entry(0, "fe80::e42:a1ff:fe2a:1", Some("IB/RoCE v1"), "ens1"),
            entry(1, "fe80::e42:a1ff:fe2a:1", Some("RoCE v2"), "ens1"),
            entry(2, "::ffff:10.0.0.7", Some("IB/RoCE v1"), "ens1"),
            entry(3, "::ffff:10.0.0.7", Some("RoCE v2"), "ens1"),
            entry(4, "::ffff:10.9.0.7", Some("RoCE v2"), "ens1.9"),
        ]
    }

    fn addresses(name: &str) -> Vec<Ipv4Addr> {
        match name {
            "ens1" => vec![Ipv4Addr::new(10, 0, 0, 7)],
            "en3" => vec![Ipv4Addr::new(192, 168, 0, 2)],
            _ => vec![],
        }
    }

    #[test]
    fn the_mapped_address_of_the_interface_in_its_v2_form_is_chosen() {
        assert_eq!(choose_among(&connectx(), None, addresses).unwrap().index, 3);
    }

    #[test]
    fn a_wanted_address_wins_and_a_missing_one_is_not_replaced() {
        let vlan = Some(Ipv4Addr::new(10, 9, 0, 7));
        assert_eq!(choose_among(&connectx(), vlan, addresses).unwrap().index, 4);
        assert_eq!(choose_among(&connectx(), Some(Ipv4Addr::LOCALHOST), addresses), None);
    }

    /// JACCL takes row 1 always and fails on a Mac whose address is in another.
    #[test]
    fn apples_table_is_searched_not_assumed() {
        let rows = [
            entry(0, "fe80::1", None, "en3"),
            entry(1, "fe80::2", None, "en3"),
            entry(2, "::ffff:192.168.0.2", None, "en3"),
        ];
        assert_eq!(choose_among(&rows, None, addresses).unwrap().index, 2);
        assert_eq!(choose_among(&rows[..2], None, addresses).unwrap().index, 0);
        assert_eq!(choose_among(&[], None, addresses), None);
    }
}
