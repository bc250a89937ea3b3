//! The network interface of an RDMA port, and its addresses.

use std::ffi::CStr;
use std::net::Ipv4Addr;

/// The IPv4 addresses of an interface; empty if it does not exist.
pub fn ipv4_of(interface: &str) -> Vec<Ipv4Addr> {
    let mut found = Vec::new();
    let mut head: *mut libc::ifaddrs = std::ptr::null_mut();
    // SAFETY: on success, the call writes to `head` a list that freeifaddrs frees. On failure,
    // `head` is not used.
    if unsafe { libc::getifaddrs(&mut head) } != 0 {
        return found;
    }
    let mut next = head;
    while !next.is_null() {
        // SAFETY: `next` is a node of the list, which lives until freeifaddrs below.
        let node = unsafe { &*next };
        // SAFETY: the name is a C string owned by the list; the address is null or at least a
        // sockaddr.
        let (name, family) = unsafe {
            (
                CStr::from_ptr(node.ifa_name),
                node.ifa_addr.as_ref().map(|address| i32::from(address.sa_family)),
            )
        };
        if family == Some(libc::AF_INET) && name.to_bytes() == interface.as_bytes() {
            // SAFETY: an AF_INET address is a sockaddr_in. The read is unaligned because the list
            // does not guarantee alignment.
            let address = unsafe { node.ifa_addr.cast::<libc::sockaddr_in>().read_unaligned() };
            found.push(Ipv4Addr::from(u32::from_be(address.sin_addr.s_addr)));
        }
        next = node.ifa_next;
    }
    // SAFETY: the list comes from getifaddrs above and is freed once.
    unsafe { libc::freeifaddrs(head) };
    found
}

/// The interface and the kind of a row of the GID table. Linux has both in sysfs; macOS names the
/// device after its interface.
pub(crate) fn of_gid(device: &str, port: u8, index: u8) -> (Option<String>, Option<String>) {
    if cfg!(target_os = "macos") {
        return (device.strip_prefix("rdma_").map(str::to_string), None);
    }
    let attribute = |what: &str| {
        let path = format!("/sys/class/infiniband/{device}/ports/{port}/gid_attrs/{what}/{index}");
        std::fs::read_to_string(path).ok().map(|text| text.trim().to_string())
    };
    (attribute("ndevs"), attribute("types"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loopback_has_its_address_and_an_unknown_interface_none() {
        let loopback = if cfg!(target_os = "macos") { "lo0" } else { "lo" };
        assert!(ipv4_of(loopback).contains(&Ipv4Addr::LOCALHOST));
        assert_eq!(ipv4_of("no-such-if0"), Vec::<Ipv4Addr>::new());
    }
}
