//! This machine's addresses, as other machines may use them.

use std::net::{IpAddr, SocketAddr};

use crate::document::MOST_ADDRESSES;

/// The addresses at which other machines can reach a listener of this machine: those of interfaces
/// that are up, or of all if none is, because one may come up in a moment. Link-local IPv6
/// addresses are omitted: they are useless without the other machine's interface, which discovery
/// knows.
pub fn own(listener: SocketAddr) -> Vec<String> {
    if !listener.ip().is_unspecified() {
        return vec![listener.to_string()];
    }
    let mut interfaces = if_addrs::get_if_addrs().unwrap_or_default();
    if interfaces.iter().any(|interface| interface.is_oper_up() && usable(&interface.ip())) {
        interfaces.retain(if_addrs::Interface::is_oper_up);
    }
    let mut addresses: Vec<IpAddr> =
        interfaces.iter().map(|interface| interface.ip()).filter(usable).collect();
    addresses.sort();
    addresses.dedup();
    addresses.truncate(MOST_ADDRESSES);
    addresses.into_iter().map(|ip| SocketAddr::new(ip, listener.port()).to_string()).collect()
}

/// Whether other machines can use an address unchanged.
fn usable(ip: &IpAddr) -> bool {
    match ip {
        IpAddr::V4(ip) => !ip.is_loopback(),
        IpAddr::V6(ip) => !ip.is_loopback() && !ip.is_unicast_link_local(),
    }
}
