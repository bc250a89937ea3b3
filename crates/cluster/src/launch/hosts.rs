//! Where ranks run: lists of hosts, and which of them are this machine.

use super::LaunchError;
use crate::hostfile::{Host, is_host_name};

/// Where one rank runs.
pub type Place = Host;

/// Reads `a,b:2,user@c`: names separated by commas, with `:N` for N ranks on a host; `repeat` ranks
/// if no number is given.
///
/// # Errors
/// Names the entry that is not a host, or reports more ranks than a group may have.
pub fn parse_hosts(text: &str, repeat: usize) -> Result<Vec<Place>, LaunchError> {
    let mut places = Vec::new();
    for entry in text.split(',') {
        let malformed = || LaunchError::Host { entry: entry.to_owned() };
        let (name, count) = match entry.rsplit_once(':') {
            // IPv6 addresses contain colons: [::1]:2 has a number of ranks, plain ::1 has none.
            Some((name, count)) if !name.contains(':') || name.ends_with(']') => {
                (name, count.parse().ok().filter(|count| *count > 0).ok_or_else(malformed)?)
            }
            _ => (entry, repeat),
        };
        let name = name.strip_prefix('[').and_then(|name| name.strip_suffix(']')).unwrap_or(name);
        if !is_host_name(name) {
            return Err(malformed());
        }
        let ips = name.parse::<std::net::IpAddr>().is_ok().then(|| name.to_owned());
        let place = Place { ssh: name.to_owned(), ips: ips.into_iter().collect(), rdma: Vec::new() };
        check_count(places.len().saturating_add(count))?;
        places.extend(std::iter::repeat_n(place, count));
    }
    Ok(places)
}

/// `repeat` consecutive ranks for each host.
pub(super) fn repeated(hosts: &[Host], repeat: usize) -> Result<Vec<Place>, LaunchError> {
    check_count(hosts.len().saturating_mul(repeat))?;
    Ok(hosts.iter().flat_map(|host| std::iter::repeat_n(host.clone(), repeat)).collect())
}

fn check_count(count: usize) -> Result<(), LaunchError> {
    let most = thunder_collectives::MAX_RANKS;
    if count > most { Err(LaunchError::TooMany { count, most }) } else { Ok(()) }
}

/// Whether ranks on `host` are children of this process: loopback, or this machine's own name.
pub fn is_local(host: &str) -> bool {
    if host.eq_ignore_ascii_case("localhost") {
        return true;
    }
    if let Ok(address) = host.parse::<std::net::IpAddr>() {
        return address.is_loopback();
    }
    let name = rustix::system::uname();
    let name = name.nodename().to_string_lossy();
    let short = name.split('.').next().unwrap_or_default();
    !short.is_empty() && (host.eq_ignore_ascii_case(&name) || host.eq_ignore_ascii_case(short))
}
