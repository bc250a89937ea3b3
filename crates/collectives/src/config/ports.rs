//! Ranges of ports.

use std::io;
use std::net::{IpAddr, TcpListener};
use std::ops::RangeInclusive;

/// Reads `FIRST-LAST`, or a single port.
///
/// # Errors
/// What to write, if `text` is no range of ports.
pub fn parse_ports(text: &str) -> Result<RangeInclusive<u16>, String> {
    let (first, last) = text.split_once('-').unwrap_or((text, text));
    match (first.trim().parse(), last.trim().parse()) {
        (Ok(first @ 1..), Ok(last)) if first <= last => Ok(first..=last),
        _ => Err("use FIRST-LAST with ports from 1 to 65535, e.g. 42000-42063".to_owned()),
    }
}

/// Listens on `address`, at the first of `ports` that is free.
pub(crate) fn bind(address: IpAddr, ports: Option<&RangeInclusive<u16>>) -> io::Result<TcpListener> {
    let mut last = None;
    for port in ports.cloned().unwrap_or(0..=0) {
        match TcpListener::bind((address, port)) {
            Err(error) if error.kind() == io::ErrorKind::AddrInUse => last = Some(error),
            bound => return bound,
        }
    }
    Err(last.unwrap_or_else(|| io::ErrorKind::AddrInUse.into()))
}
