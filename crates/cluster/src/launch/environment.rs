//! The variables from which a rank's program reads its group: Thunderhead's always, and MLX's for
//! the backend.

use super::addresses::{FIRST_PORT, addresses, addresses_of_all, ports, with_port};
use super::hosts::Place;
use super::secret::random_hex;
use super::{Backend, Launch, LaunchError};
use crate::hostfile::{Devices, Hostfile};

/// Variable: the number of ranks on a rank's host. For programs that place themselves, as on
/// several GPUs.
const LOCAL_RANKS: &str = "THUNDER_LOCAL_RANKS";
/// Variable: a rank's index among the ranks on its host, from 0.
const LOCAL_RANK: &str = "THUNDER_LOCAL_RANK";

/// Variables that the launcher sets for some backend. An inherited value would mislead the ranks,
/// so all are removed first.
pub(super) const OWN: [&str; 14] = [
    "THUNDER_RANK",
    "THUNDER_WORLD_SIZE",
    "THUNDER_COORDINATOR",
    "THUNDER_SECRET",
    LOCAL_RANKS,
    LOCAL_RANK,
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

/// Variables in the order in which they are set; later ones win.
#[derive(Clone, Default)]
struct Pairs(Vec<(String, String)>);

impl Pairs {
    fn set(&mut self, name: &str, value: impl Into<String>) {
        self.0.push((name.to_owned(), value.into()));
    }
}

/// Chooses backend, addresses and ports, and from them every rank's variables.
pub(super) fn variables(launch: &Launch) -> Result<Variables, LaunchError> {
    let places = &launch.places;
    let backend = choose_backend(launch.backend, places)?;
    let (ring_addresses, notes) = ring_addresses(launch, backend)?;
    let links = launch.connections_per_ip.max(1);
    let ring_ports: usize = ring_addresses.iter().map(|addresses| addresses.len() * links).sum();
    let mut ports = ports(launch, 1 + ring_ports)?.into_iter();

    let mut common = Pairs::default();
    let mut files = Vec::new();
    common.set("THUNDER_SECRET", random_hex()?);
    match backend {
        Backend::Shm => common.set("THUNDER_TRANSPORT", "shm"),
        Backend::Tcp => common.set("THUNDER_TRANSPORT", "tcp"),
        _ => {}
    }
    if let (Some(first), true) = (places.first(), places.len() > 1) {
        let why = "runs rank 0 and is the coordinator";
        let host = addresses(first, launch, why)?.into_iter().next().unwrap_or_default();
        let port = ports.next().unwrap_or(FIRST_PORT);
        set_coordinator(&mut common, backend, &host, port, places.len());
        if matches!(backend, Backend::Jaccl | Backend::JacclRing) {
            let rows: Vec<_> = places.iter().map(|place| &place.rdma).collect();
            files.push(("MLX_IBV_DEVICES".to_owned(), json(&rows)));
        }
        // Not all pairs have a cable: Thunderhead's ranks use RDMA where there is one, and TCP.
        if matches!(backend, Backend::Auto | Backend::Ring) && has_device_rows(places) {
            let rows: Vec<_> = places.iter().map(|place| &place.rdma).collect();
            files.push(("THUNDER_RDMA_DEVICES".to_owned(), json(&rows)));
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
    let ranks = (0..places.len())
        .map(|rank| RankVariables {
            environment: rank_variables(launch, backend, common.clone(), rank),
            files: files.clone(),
        })
        .collect();
    Ok(Variables { backend, ranks, notes })
}

/// Checks the backend against the places, and replaces `Auto` by JACCL if all its devices are
/// there.
fn choose_backend(backend: Backend, places: &[Place]) -> Result<Backend, LaunchError> {
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

/// Every rank's addresses for MLX's ring, none where it is not used; and notes for the user.
fn ring_addresses(launch: &Launch, backend: Backend) -> Result<(Vec<Vec<String>>, Vec<String>), LaunchError> {
    let has_ring = matches!(backend, Backend::Ring | Backend::Tcp | Backend::Auto);
    if !has_ring || launch.places.len() < 2 {
        return Ok((Vec::new(), Vec::new()));
    }
    match addresses_of_all(launch) {
        // Only MLX's programs need every rank's address; Thunderhead's find each other through the
        // coordinator.
        Err(error) if launch.backend == Backend::Auto || backend == Backend::Tcp => {
            let note =
                format!("MLX_HOSTFILE is not set, so programs of MLX will not find each other: {error}");
            Ok((Vec::new(), vec![note]))
        }
        addresses => Ok((addresses?, Vec::new())),
    }
}

fn set_coordinator(common: &mut Pairs, backend: Backend, host: &str, port: u16, ranks: usize) {
    common.set("THUNDER_COORDINATOR", with_port(host, port));
    match backend {
        Backend::Jaccl | Backend::JacclRing => {
            common.set("MLX_JACCL_COORDINATOR", with_port(host, port));
            if backend == Backend::JacclRing {
                common.set("MLX_JACCL_RING", "1");
            }
        }
        Backend::Nccl => {
            common.set("NCCL_HOST_IP", host);
            common.set("NCCL_PORT", port.to_string());
            common.set("MLX_WORLD_SIZE", ranks.to_string());
        }
        _ => {}
    }
}

fn rank_variables(
    launch: &Launch,
    backend: Backend,
    mut variables: Pairs,
    rank: usize,
) -> Vec<(String, String)> {
    let places = &launch.places;
    let same_host = |other: &&Place| other.ssh == places[rank].ssh;
    variables.set(LOCAL_RANKS, places.iter().filter(same_host).count().to_string());
    let local_rank = places[..rank].iter().filter(same_host).count().to_string();
    if backend == Backend::Nccl {
        variables.set("CUDA_VISIBLE_DEVICES", local_rank.clone());
    }
    variables.set(LOCAL_RANK, local_rank);
    if let Some(ports) = &launch.data_ports {
        variables.set("THUNDER_PORTS", format!("{}-{}", ports.start(), ports.end()));
    }
    for (name, value) in &launch.environment {
        variables.set(name, value.clone());
    }
    // Last, so that the user's variables cannot give two ranks one number.
    variables.set("THUNDER_RANK", rank.to_string());
    variables.set("THUNDER_WORLD_SIZE", places.len().to_string());
    variables.set("MLX_RANK", rank.to_string());
    last_of_each(variables)
}

/// Whether the host file has a row of devices for each rank, at least one with a device.
fn has_device_rows(places: &[Place]) -> bool {
    let named = |place: &Place| place.rdma.iter().any(|devices| *devices != Devices::None);
    places.iter().all(|place| place.rdma.len() == places.len()) && places.iter().any(named)
}

fn json(value: &impl serde::Serialize) -> String {
    // Strings and lists of strings always serialise.
    serde_json::to_string(value).unwrap_or_default()
}

fn last_of_each(variables: Pairs) -> Vec<(String, String)> {
    let mut kept: Vec<(String, String)> = Vec::with_capacity(variables.0.len());
    for (name, value) in variables.0 {
        match kept.iter_mut().find(|(known, _)| *known == name) {
            Some(known) => known.1 = value,
            None => kept.push((name, value)),
        }
    }
    kept
}
