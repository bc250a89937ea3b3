//! This machine's addresses, as other machines may use them.

use std::net::{IpAddr, SocketAddr};

use crate::document::MOST_ADDRESSES;

/// The addresses at which a listener of this machine can be reached. Link-local IPv6 addresses are
/// left out: they mean nothing without the other machine's interface, which discovery knows.
pub fn own(listener: SocketAddr) -> Vec<String> {
    if !listener.ip().is_unspecified() {
        return vec![listener.to_string()];
    }
    let interfaces = if_addrs::get_if_addrs().unwrap_or_default();
    let usable = |ip: &IpAddr| match ip {
        IpAddr::V4(ip) => !ip.is_loopback(),
        IpAddr::V6(ip) => !ip.is_loopback() && !ip.is_unicast_link_local(),
    };
    let mut addresses: Vec<IpAddr> =
        interfaces.iter().map(|interface| interface.ip()).filter(usable).collect();
    addresses.sort();
    addresses.dedup();
    addresses.truncate(MOST_ADDRESSES);
    addresses.into_iter().map(|ip| SocketAddr::new(ip, listener.port()).to_string()).collect()
}
