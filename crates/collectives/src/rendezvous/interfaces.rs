//! The addresses of this machine's interfaces, for other ranks and for reaching theirs.

use std::net::{IpAddr, SocketAddr};

/// The addresses at which other machines can reach this one. Link-local IPv6 addresses are listed
/// only if there are no others: another machine may have to try them on several interfaces.
pub(crate) fn addresses() -> Vec<IpAddr> {
    let interfaces = if_addrs::get_if_addrs().unwrap_or_default();
    let usable = |ip: &IpAddr| !ip.is_loopback() && !ip.is_unspecified();
    let all = interfaces.iter().map(if_addrs::Interface::ip).filter(usable);
    let (local, routed): (Vec<IpAddr>, Vec<IpAddr>) = all.partition(is_link_local);
    if routed.is_empty() { local } else { routed }
}

/// The scopes (indices of interfaces) in which to try a link-local IPv6 address of another rank:
/// first the one in which the coordinator is reached.
pub(crate) fn scopes(coordinator: &str) -> Vec<u32> {
    let first = match coordinator.parse() {
        Ok(SocketAddr::V6(address)) if address.scope_id() != 0 => Some(address.scope_id()),
        _ => None,
    };
    let interfaces = if_addrs::get_if_addrs().unwrap_or_default();
    let mut scopes: Vec<u32> = first.into_iter().collect();
    for interface in interfaces.iter().filter(|interface| is_link_local(&interface.ip())) {
        scopes.extend(interface.index.filter(|index| !scopes.contains(index)));
    }
    scopes
}

/// True for an IPv6 address that means something on one network only.
pub(crate) fn is_link_local(address: &IpAddr) -> bool {
    matches!(address, IpAddr::V6(address) if address.is_unicast_link_local())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_coordinators_scope_comes_first_and_once() {
        let others = scopes("10.0.0.1:4000");
        assert_eq!(scopes("studio.local:4000"), others);
        for scope in others.iter().copied().chain([4_000_000]) {
            let found = scopes(&format!("[fe80::1%{scope}]:4000"));
            assert_eq!(found[0], scope);
            assert_eq!(found.iter().filter(|found| **found == scope).count(), 1);
            assert_eq!(found.len(), others.len() + usize::from(!others.contains(&scope)));
        }
    }
}
