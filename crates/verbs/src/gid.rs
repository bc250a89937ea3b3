//! Global identifiers (GIDs): a port's addresses, and the choice of one.

use crate::interface;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::net::{Ipv4Addr, Ipv6Addr};

/// A global identifier. It has the format of an IPv6 address.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Gid(Ipv6Addr);

impl Gid {
    /// A GID from its bytes, in network order.
    pub fn from_bytes(raw: [u8; 16]) -> Self {
        Self(Ipv6Addr::from(raw))
    }

    /// The bytes, in network order.
    pub fn bytes(self) -> [u8; 16] {
        self.0.octets()
    }

    /// The IPv4 address, if the GID is an IPv4-mapped one.
    pub fn ipv4(self) -> Option<Ipv4Addr> {
        self.0.to_ipv4_mapped()
    }

    /// True if the GID is link-local (fe80::/10).
    pub fn is_link_local(self) -> bool {
        self.0.is_unicast_link_local()
    }

    /// True if the GID is zero, as in an empty row of the table.
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

/// A row of a port's GID table.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct GidEntry {
    /// The row's number. A queue pair refers to the GID by it.
    pub index: u8,
    /// The GID.
    pub gid: Gid,
    /// "IB/RoCE v1" or "RoCE v2", if the system reports it (Linux).
    pub kind: Option<String>,
    /// The GID's network interface, if the system reports it.
    pub interface: Option<String>,
}

impl GidEntry {
    /// True for RoCE v1, which cannot be routed and which many devices disable. The v1 and v2 rows
    /// of a port have the same addresses.
    fn is_v1(&self) -> bool {
        self.kind.as_deref().is_some_and(|kind| kind.contains("v1"))
    }
}

/// The row to use. With `wanted`: the row with that address, or none. Otherwise the first of: an
/// IPv4 address that the row's interface has, any IPv4 address, a link-local address, any row. RoCE
/// v2 is preferred to v1.
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

    /// The table of a ConnectX port on Linux: each address has a row for RoCE v1 and one for v2.
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
    fn the_v2_row_of_the_interfaces_ipv4_address_is_chosen() {
        assert_eq!(choose_among(&connectx(), None, addresses).unwrap().index, 3);
    }

    #[test]
    fn only_the_row_with_the_wanted_address_is_chosen() {
        let vlan = Some(Ipv4Addr::new(10, 9, 0, 7));
        assert_eq!(choose_among(&connectx(), vlan, addresses).unwrap().index, 4);
        assert_eq!(choose_among(&connectx(), Some(Ipv4Addr::LOCALHOST), addresses), None);
    }

    /// JACCL always uses row 1 and fails on a Mac whose address is in another row.
    #[test]
    fn the_address_is_found_in_any_row_of_apples_table() {
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
