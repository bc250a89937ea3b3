//! The host files of a setup: one for `thunder launch`, one for `mlx.launch`. Both are MLX's JSON.

use serde_json::{Value, json};

use crate::graph::{Desk, ShapeKind};
use crate::network::Network;
use crate::plan::Link;
use crate::route::{self, Route, Way};

/// The file for `thunder launch`: addresses that all machines reach, the devices of each pair, and
/// the networks that ranks prefer for TCP: cables, Ethernet, Wi-Fi. Machines are in the shape's
/// order. `links` has the transport of each pair, for `thunder plan`; launchers do not read it.
pub fn thunder(desk: &Desk, links: &[Link]) -> String {
    let order = desk.shape().order;
    let routes = route::routes(desk, links);
    let common = route::common_addresses(desk);
    let address = |machine: usize| {
        common[machine].map(|address| address.to_string()).or_else(|| any_address(&routes, machine))
    };
    let hosts: Vec<Value> = order
        .iter()
        .map(|machine| {
            json!({
                "ssh": desk.machines[*machine].name,
                "ips": address(*machine).into_iter().collect::<Vec<_>>(),
                "rdma": device_row(&routes, &order, *machine),
            })
        })
        .collect();
    let networks = route::preferred_networks(desk, links);
    let preferred = networks.iter().map(Network::to_string).collect::<Vec<_>>().join(",");
    let rank = |machine: usize| order.iter().position(|ranked| *ranked == machine);
    let pairs: Vec<Value> = routes
        .iter()
        .map(|route| {
            let mut ranks = route.machines.map(rank);
            ranks.sort_unstable();
            json!({ "ranks": ranks, "over": route.way.name(), "gbits": route.gbits, "why": route.why })
        })
        .collect();
    let mut file = json!({ "envs": [format!("THUNDER_CABLES={preferred}")], "hosts": hosts, "links": pairs });
    if is_rdma_mesh(&routes) {
        file["backend"] = "jaccl".into();
    }
    pretty(&file)
}

/// The file for `mlx.launch`. In a mesh with RDMA: JACCL's devices, and an address that all reach.
/// Otherwise MLX's ring: the addresses at which the machine before it reaches each machine.
pub fn mlx(desk: &Desk, links: &[Link]) -> String {
    let shape = desk.shape();
    let order = &shape.order;
    let routes = route::routes(desk, links);
    if is_rdma_mesh(&routes) {
        return thunder(desk, links);
    }
    let is_rdma_ring = shape.kind == ShapeKind::Ring
        && order.iter().enumerate().all(|(index, machine)| {
            way(&routes, *machine, order[(index + 1) % order.len()]) == Some(Way::Rdma)
        });
    let hosts: Vec<Value> = order
        .iter()
        .enumerate()
        .map(|(index, machine)| {
            let before = order[(index + order.len() - 1) % order.len()];
            let reached = address_towards(&routes, *machine, before);
            json!({
                "ssh": desk.machines[*machine].name,
                "ips": reached.into_iter().collect::<Vec<_>>(),
                "rdma": if is_rdma_ring { device_row(&routes, order, *machine) } else { Vec::new() },
            })
        })
        .collect();
    let backend = if is_rdma_ring { "jaccl-ring" } else { "ring" };
    pretty(&json!({ "backend": backend, "envs": [], "hosts": hosts }))
}

fn pretty(value: &Value) -> String {
    // Serialization of strings and lists cannot fail.
    serde_json::to_string_pretty(value).map(|text| text + "\n").unwrap_or_default()
}

fn is_rdma_mesh(routes: &[Route]) -> bool {
    !routes.is_empty() && routes.iter().all(|route| route.way == Way::Rdma)
}

fn find(routes: &[Route], one: usize, other: usize) -> Option<(&Route, usize)> {
    let machines = [one.min(other), one.max(other)];
    routes.iter().find(|route| route.machines == machines).map(|route| (route, usize::from(one > other)))
}

fn way(routes: &[Route], one: usize, other: usize) -> Option<Way> {
    find(routes, one, other).map(|(route, _)| route.way)
}

/// The address of `machine` at which `from` reaches it.
fn address_towards(routes: &[Route], machine: usize, from: usize) -> Option<String> {
    let (route, side) = find(routes, machine, from)?;
    route.addresses.map(|addresses| addresses[side].to_string())
}

fn any_address(routes: &[Route], machine: usize) -> Option<String> {
    routes.iter().find(|route| route.machines.contains(&machine)).and_then(|route| {
        let side = usize::from(route.machines[1] == machine);
        route.addresses.map(|addresses| addresses[side].to_string())
    })
}

/// The devices of `machine` towards each machine of `order`; empty without any.
fn device_row(routes: &[Route], order: &[usize], machine: usize) -> Vec<Value> {
    let any = routes.iter().any(|route| route.way == Way::Rdma);
    let entry = |other: &usize| {
        let devices = find(routes, machine, *other).map(|(route, side)| route.devices[side].clone());
        match devices.unwrap_or_default().as_slice() {
            [] => Value::Null,
            [one] => json!(one),
            several => json!(several),
        }
    };
    if any { order.iter().map(entry).collect() } else { Vec::new() }
}

/// The networks of the cables with the machines that they join, for people.
pub fn described(desk: &Desk, links: &[Link]) -> Vec<(String, Network)> {
    let line = |link: &Link| {
        let [one, other] = link.ends.map(|end| desk.name(end));
        (
            format!("{one} ({}) → {other} ({})", link.addresses[0].address, link.addresses[1].address),
            link.network(),
        )
    };
    links.iter().map(line).collect()
}
