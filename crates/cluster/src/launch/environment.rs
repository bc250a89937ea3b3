//! The variables by which a rank's program finds its group: Thunderhead's always, and MLX's for the backend.

use std::net::{IpAddr, Ipv4Addr, TcpListener, ToSocketAddrs, UdpSocket};

use serde::Serializer;

use super::place::is_local;
use super::{Backend, Launch, LaunchError, Place};
use crate::hostfile::Hostfile;

/// The first port when ranks are on several machines, MLX's too.
const FIRST_PORT: u16 = 32323;

/// What the launcher sets for some backend, so that an inherited value would mislead the ranks.
pub(super) const OWN: [&str; 14] = [
    "THUNDER_RANK",
    "THUNDER_WORLD_SIZE",
    "THUNDER_COORDINATOR",
    "THUNDER_SECRET",
    "THUNDER_LOCAL_RANKS",
    "THUNDER_LOCAL_RANK",
    "MLX_RANK",
    "MLX_WORLD_SIZE",
    "MLX_HOSTFILE",
    "MLX_IBV_DEVICES",
    "MLX_JACCL_COORDINATOR",
    "MLX_JACCL_RING",
    "NCCL_HOST_IP",
    "NCCL_PORT",
];

pub(super) struct Variables {
    pub backend: Backend,
    pub ranks: Vec<RankVariables>,
    pub notes: Vec<String>,
}

pub(super) struct RankVariables {
    pub environment: Vec<(String, String)>,
    pub files: Vec<(String, String)>,
}

/// Chooses backend, addresses and ports, and from them every rank's variables.
pub(super) fn settle(launch: &Launch) -> Result<Variables, LaunchError> {
    let places = &launch.places;
    let size = places.len();
    let mut notes = Vec::new();
    let backend = choose(launch.backend, places)?;
    let mut common: Vec<(String, String)> = Vec::new();
    let mut files = Vec::new();
    let mut set = |name: &str, value: String| common.push((name.to_owned(), value));

    let ring = matches!(backend, Backend::Ring | Backend::Tcp | Backend::Auto) && size > 1;
    let ring_addresses = if ring { addresses_of_all(places) } else { Ok(Vec::new()) };
    // Only MLX's programs need every rank's address; ours find each other through the coordinator.
    let ring_addresses = match ring_addresses {
        Err(error) if launch.backend == Backend::Auto || backend == Backend::Tcp => {
            notes.push(format!("MLX_HOSTFILE is not set, programs of MLX will not find each other: {error}"));
            Vec::new()
        }
        other => other?,
    };
    let links = launch.connections_per_ip.max(1);
    let ring_ports: usize = ring_addresses.iter().map(|addresses| addresses.len() * links).sum();
    let mut ports = ports(launch, 1 + ring_ports)?.into_iter();

    set("THUNDER_SECRET", random_hex()?);
    match backend {
        Backend::Shm => set("THUNDER_TRANSPORT", "shm".to_owned()),
        Backend::Tcp => set("THUNDER_TRANSPORT", "tcp".to_owned()),
        _ => {}
    }
    if let (Some(first), true) = (places.first(), size > 1) {
        let why = "runs rank 0 and is the coordinator";
        let host = address(first, places, why)?.into_iter().next().unwrap_or_default();
        let port = ports.next().unwrap_or(FIRST_PORT);
        set("THUNDER_COORDINATOR", with_port(&host, port));
        match backend {
            Backend::Jaccl | Backend::JacclRing => {
                set("MLX_JACCL_COORDINATOR", with_port(&host, port));
                if backend == Backend::JacclRing {
                    set("MLX_JACCL_RING", "1".to_owned());
                }
                let rows: Vec<_> = places.iter().map(|place| &place.rdma).collect();
                files.push(("MLX_IBV_DEVICES".to_owned(), json(&rows)));
            }
            Backend::Nccl => {
                set("NCCL_HOST_IP", host);
                set("NCCL_PORT", port.to_string());
                set("MLX_WORLD_SIZE", size.to_string());
            }
            _ => {}
        }
    }
    if !ring_addresses.is_empty() {
        let rows: Vec<Vec<String>> = ring_addresses
            .iter()
            .map(|addresses| {
                let each_link = addresses.iter().flat_map(|address| std::iter::repeat_n(address, links));
                each_link.zip(&mut ports).map(|(address, port)| with_port(address, port)).collect()
            })
            .collect();
        files.push(("MLX_HOSTFILE".to_owned(), json(&rows)));
    }

    let ranks = places.iter().enumerate().map(|(rank, place)| {
        let same_host = |other: &&Place| other.ssh == place.ssh;
        let mut environment = common.clone();
        let mut set = |name: &str, value: String| environment.push((name.to_owned(), value));
        set("THUNDER_LOCAL_RANKS", places.iter().filter(same_host).count().to_string());
        let local_rank = places[..rank].iter().filter(same_host).count().to_string();
        if backend == Backend::Nccl {
            set("CUDA_VISIBLE_DEVICES", local_rank.clone());
        }
        set("THUNDER_LOCAL_RANK", local_rank);
        for (name, value) in &launch.environment {
            set(name, value.clone());
        }
        // Last: nothing may give two ranks one number.
        set("THUNDER_RANK", rank.to_string());
        set("THUNDER_WORLD_SIZE", size.to_string());
        set("MLX_RANK", rank.to_string());
        RankVariables { environment: last_of_each(environment), files: files.clone() }
    });
    Ok(Variables { backend, ranks: ranks.collect(), notes })
}

/// Checks the backend against the places, and replaces `Auto` where the devices for JACCL are all there.
fn choose(backend: Backend, places: &[Place]) -> Result<Backend, LaunchError> {
    let devices = |ring| Hostfile { hosts: places.to_vec(), ..Hostfile::default() }.check_rdma(ring);
    match backend {
        Backend::Auto if places.len() > 1 && devices(false).is_ok() => Ok(Backend::Jaccl),
        Backend::Jaccl | Backend::JacclRing => {
            let ring = backend == Backend::JacclRing;
            let name = if ring { "jaccl-ring" } else { "jaccl" };
            let why = |error: crate::hostfile::HostfileError| error.to_string();
            devices(ring).map_err(|error| LaunchError::NoDevices { backend: name, why: why(error) })?;
            Ok(backend)
        }
        Backend::Shm => match places.iter().position(|place| place.ssh != places[0].ssh) {
            Some(rank) => Err(LaunchError::NotOneHost { rank, host: places[rank].ssh.clone() }),
            None => Ok(backend),
        },
        _ => Ok(backend),
    }
}

fn addresses_of_all(places: &[Place]) -> Result<Vec<Vec<String>>, LaunchError> {
    places.iter().map(|place| address(place, places, "a ring must reach")).collect()
}

/// The addresses of `place` for the other ranks: those of the host file, else what its name resolves to.
fn address(place: &Place, places: &[Place], why: &'static str) -> Result<Vec<String>, LaunchError> {
    let known = !place.ips.is_empty();
    let elsewhere = places.iter().find(|other| !is_local(&other.ssh));
    match (is_local(&place.ssh), elsewhere) {
        (true, None) if !known => Some(vec![Ipv4Addr::LOCALHOST.to_string()]),
        // `--hosts localhost,b`: loopback is of no use to b, so the address from which b is reached is taken.
        (true, Some(other)) if place.ips.iter().all(|ip| is_local(ip)) => {
            let facing = resolve(other).and_then(facing);
            facing.map(|ip| vec![ip.to_string()])
        }
        _ if known => Some(place.ips.clone()),
        _ => resolve(place).map(|ip| vec![ip.to_string()]),
    }
    .ok_or_else(|| LaunchError::NoAddress { host: place.ssh.clone(), why })
}

fn resolve(place: &Place) -> Option<IpAddr> {
    let name = place.ips.first().map_or_else(
        || place.ssh.rsplit_once('@').map_or(place.ssh.as_str(), |(_, host)| host),
        String::as_str,
    );
    let found: Vec<IpAddr> = (name, 0).to_socket_addrs().ok()?.map(|address| address.ip()).collect();
    found.iter().find(|ip| ip.is_ipv4()).or(found.first()).copied()
}

/// This machine's address on the way to `other`. Connecting a datagram socket sends nothing.
fn facing(other: IpAddr) -> Option<IpAddr> {
    let any: IpAddr = if other.is_ipv4() { [0, 0, 0, 0].into() } else { [0u16; 8].into() };
    let socket = UdpSocket::bind((any, 0)).ok()?;
    socket.connect((other, FIRST_PORT)).ok()?;
    Some(socket.local_addr().ok()?.ip())
}

/// Ports in a row from the first one, or free ones where all ranks are on this machine and none was given.
fn ports(launch: &Launch, needed: usize) -> Result<Vec<u16>, LaunchError> {
    let all_local = launch.places.iter().all(|place| is_local(&place.ssh));
    if let (None, true) = (launch.port, all_local) {
        let free = (0..needed)
            .map(|_| TcpListener::bind((Ipv4Addr::LOCALHOST, 0)))
            // All are held until the last is found, so that none comes twice.
            .collect::<Result<Vec<_>, _>>()
            .and_then(|listeners| listeners.iter().map(|held| Ok(held.local_addr()?.port())).collect());
        return free.map_err(LaunchError::system("find free ports on loopback"));
    }
    let first = launch.port.unwrap_or(FIRST_PORT);
    let ports: Vec<u16> = (first..=u16::MAX).take(needed).collect();
    if ports.len() < needed { Err(LaunchError::Ports { first, needed }) } else { Ok(ports) }
}

fn with_port(host: &str, port: u16) -> String {
    if host.contains(':') { format!("[{host}]:{port}") } else { format!("{host}:{port}") }
}

fn json(value: &impl serde::Serialize) -> String {
    // Strings and lists of strings: there is nothing in it that JSON cannot hold.
    serde_json::to_string(value).unwrap_or_default()
}

/// 256 random bits in hexadecimal.
pub(super) fn random_hex() -> Result<String, LaunchError> {
    let mut bytes = [0u8; 32];
    getrandom::fill(&mut bytes).map_err(|error| LaunchError::System {
        what: "get random bytes",
        why: std::io::Error::other(error),
    })?;
    Ok(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
}

fn last_of_each(variables: Vec<(String, String)>) -> Vec<(String, String)> {
    let mut kept: Vec<(String, String)> = Vec::with_capacity(variables.len());
    for (name, value) in variables {
        match kept.iter_mut().find(|(known, _)| *known == name) {
            Some(known) => known.1 = value,
            None => kept.push((name, value)),
        }
    }
    kept
}

/// The variables with what looks like a secret replaced, for anything that is printed.
pub(super) fn masked(variables: &[(String, String)]) -> Vec<(String, String)> {
    const SECRET: [&str; 5] = ["SECRET", "TOKEN", "PASSWORD", "KEY", "CREDENTIAL"];
    let hide = |name: &str| SECRET.iter().any(|word| name.to_ascii_uppercase().contains(word));
    let value = |name: &str, value: &str| if hide(name) { "(hidden)".to_owned() } else { value.to_owned() };
    variables.iter().map(|(name, text)| (name.clone(), value(name, text))).collect()
}

/// [`masked`] for serde.
pub(super) fn hidden<S: Serializer>(
    variables: &[(String, String)],
    serializer: S,
) -> Result<S::Ok, S::Error> {
    serializer.collect_map(masked(variables))
}
