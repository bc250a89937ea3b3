//! Addresses and ports at which ranks reach each other.

use std::net::{IpAddr, Ipv4Addr, TcpListener, ToSocketAddrs, UdpSocket};
use std::path::Path;
use std::process::{Command, Stdio};

use super::hosts::{Place, is_local};
use super::{Launch, LaunchError};

/// First port when ranks are on several machines; the same as MLX's.
pub(super) const FIRST_PORT: u16 = 32323;

/// The addresses of every place.
pub(super) fn addresses_of_all(launch: &Launch) -> Result<Vec<Vec<String>>, LaunchError> {
    launch.places.iter().map(|place| addresses(place, launch, "a ring must reach")).collect()
}

/// The addresses at which other ranks reach `place`: those of the host file, otherwise those to
/// which its name resolves, otherwise the address in ssh's configuration.
pub(super) fn addresses(
    place: &Place,
    launch: &Launch,
    why: &'static str,
) -> Result<Vec<String>, LaunchError> {
    let resolve = |place: &Place| resolve(place, &launch.ssh);
    let known = !place.ips.is_empty();
    let elsewhere = launch.places.iter().find(|other| !is_local(&other.ssh));
    match (is_local(&place.ssh), elsewhere) {
        (true, None) if !known => Some(vec![Ipv4Addr::LOCALHOST.to_string()]),
        // `--hosts localhost,b`: b cannot reach loopback, so this machine's address on the way to b
        // is used.
        (true, Some(other)) if place.ips.iter().all(|ip| is_local(ip)) => {
            let facing = resolve(other).and_then(facing);
            facing.map(|ip| vec![ip.to_string()])
        }
        _ if known => Some(place.ips.clone()),
        _ => resolve(place).map(|ip| vec![ip.to_string()]),
    }
    .ok_or_else(|| LaunchError::NoAddress { host: place.ssh.clone(), why })
}

fn resolve(place: &Place, ssh: &[String]) -> Option<IpAddr> {
    if let Some(ip) = place.ips.first() {
        return look_up(ip);
    }
    let name = place.ssh.rsplit_once('@').map_or(place.ssh.as_str(), |(_, host)| host);
    look_up(name).or_else(|| look_up(&ssh_host_name(ssh, &place.ssh)?))
}

fn look_up(name: &str) -> Option<IpAddr> {
    let found: Vec<IpAddr> = (name, 0).to_socket_addrs().ok()?.map(|address| address.ip()).collect();
    found.iter().find(|ip| ip.is_ipv4()).or(found.first()).copied()
}

/// The `HostName` of an alias in ssh's configuration. `ssh -G` prints the configuration without
/// connecting; programs other than OpenSSH's are not called.
fn ssh_host_name(ssh: &[String], host: &str) -> Option<String> {
    let (program, arguments) = ssh.split_first()?;
    if Path::new(program).file_name()? != "ssh" {
        return None;
    }
    let output =
        Command::new(program).args(arguments).args(["-G", host]).stdin(Stdio::null()).output().ok()?;
    let text = String::from_utf8(output.stdout).ok()?;
    text.lines().find_map(|line| line.strip_prefix("hostname ")).map(str::to_owned)
}

/// This machine's address on the way to `other`. Connecting a datagram socket sends nothing.
fn facing(other: IpAddr) -> Option<IpAddr> {
    let any: IpAddr = if other.is_ipv4() { [0, 0, 0, 0].into() } else { [0u16; 8].into() };
    let socket = UdpSocket::bind((any, 0)).ok()?;
    socket.connect((other, FIRST_PORT)).ok()?;
    Some(socket.local_addr().ok()?.ip())
}

/// `needed` consecutive ports from the first one; or free ports if all ranks are on this machine
/// and no port was given.
pub(super) fn ports(launch: &Launch, needed: usize) -> Result<Vec<u16>, LaunchError> {
    let all_local = launch.places.iter().all(|place| is_local(&place.ssh));
    if let (None, true) = (launch.port, all_local) {
        let free = (0..needed)
            .map(|_| TcpListener::bind((Ipv4Addr::LOCALHOST, 0)))
            // All listeners are held until the last one is bound, so that no port comes twice.
            .collect::<Result<Vec<_>, _>>()
            .and_then(|listeners| listeners.iter().map(|held| Ok(held.local_addr()?.port())).collect());
        return free.map_err(LaunchError::system("find free ports on loopback"));
    }
    let first = launch.port.unwrap_or(FIRST_PORT);
    let ports: Vec<u16> = (first..=u16::MAX).take(needed).collect();
    if ports.len() < needed { Err(LaunchError::Ports { first, needed }) } else { Ok(ports) }
}

/// `host:port`, with brackets around an IPv6 address.
pub(super) fn with_port(host: &str, port: u16) -> String {
    if host.contains(':') { format!("[{host}]:{port}") } else { format!("{host}:{port}") }
}
