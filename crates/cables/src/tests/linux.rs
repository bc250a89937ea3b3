//! Linux: a recorded tree of `/sys/bus/thunderbolt`, and real interfaces in namespaces.

use crate::graph::Desk;
use crate::machine::{Attached, Machine};
use crate::plan::{Action, Plan};

/// UUIDs of the controllers of two machines.
const UUIDS: [&str; 2] = ["d6030000-0080-7518-2391-a4e51a82e819", "c7010000-0070-6418-a3f5-1c0b52d1f102"];

/// The transcript of a machine with two cables to another one. `side` is `x` or `y`.
pub fn transcript(side: &str) -> String {
    let (own, other) = if side == "x" { (0, 1) } else { (1, 0) };
    let devices = "/sys/bus/thunderbolt/devices";
    // The cables cross: the first port of one leads to the second port of the other.
    let neighbour = |port: usize| format!("02:00:00:00:{other:02x}:{:02x}", 1 - port);
    let mut tree = format!(
        "{devices}/0-0/unique_id={}\n{devices}/0-0/generation=4\n{devices}/0-0/device_name=Host\n",
        UUIDS[own]
    );
    let (mut nets, mut interfaces, mut neighbours) = (String::new(), Vec::new(), Vec::new());
    for (port, route) in [1, 3].into_iter().enumerate() {
        tree += &format!(
            "{devices}/0-{route}/unique_id={}\n{devices}/0-{route}/device_name=peer\n{devices}/0-{route}/vendor_name=Linux\n\
             {devices}/0-{route}/rx_speed=20.0 Gb/s\n{devices}/0-{route}/tx_speed=20.0 Gb/s\n{devices}/0-{route}/rx_lanes=2\n\
             {devices}/0-{route}/tx_lanes=2\n{devices}/0-{route}.0/key=network\n",
            UUIDS[other]
        );
        nets += &format!("{devices}/0-{route}.0/net/thunderbolt{port}\n");
        interfaces.push(serde_json::json!({
            "ifname": format!("thunderbolt{port}"), "flags": ["BROADCAST", "MULTICAST", "UP", "LOWER_UP"], "mtu": 1500,
            "link_type": "ether", "address": format!("02:00:00:00:{own:02x}:{port:02x}"), "max_mtu": 65522, "addr_info": [],
        }));
        neighbours.push(serde_json::json!({ "dst": "fe80::1", "dev": format!("thunderbolt{port}"), "lladdr": neighbour(port) }));
    }
    let json = |values: Vec<serde_json::Value>| serde_json::Value::Array(values).to_string();
    format!(
        "@@ system 0\nLinux\n@@ name 0\n{side}\n@@ version 0\n6.12.0\n@@ memory 0\nMemTotal:       131072000 kB\n@@ bus 0\n\n\
         @@ tree 0\n{tree}@@ nets 0\n{nets}@@ module 0\n\n@@ interfaces 0\n{}\n@@ routes 0\n[{{\"dst\":\"default\"}},{{\"dst\":\"10.84.72.0/24\"}}]\n\
         @@ neighbours 0\n{}\n@@ systemd 0\n\n@@ end 0\n",
        json(interfaces),
        json(neighbours)
    )
}

fn desk() -> Desk {
    Desk::new(["x", "y"].map(|side| Machine::read(side, &transcript(side)).unwrap()).into())
}

#[test]
fn a_tree_names_ports_links_and_machines() {
    let machine = &desk().machines[0];
    let ports: Vec<_> = machine
        .ports
        .iter()
        .map(|port| (port.name.as_str(), port.interface.as_deref(), port.link_gbits))
        .collect();
    assert_eq!(ports, [("0-1", Some("thunderbolt0"), Some(40)), ("0-3", Some("thunderbolt1"), Some(40))]);
    assert!(
        matches!(&machine.ports[0].attached, Attached::Machine { uuid, .. } if *uuid == UUIDS[1].to_uppercase())
    );
    assert_eq!(machine.memory_bytes, Some(131_072_000 * 1024));
}

#[test]
fn neighbours_tell_two_cables_of_one_controller_apart() {
    let desk = desk();
    let cables: Vec<_> =
        desk.cables.iter().map(|cable| (cable.ends.map(|end| desk.name(end)), cable.certain)).collect();
    let name = |side: &str, port: &str| format!("{side} port 0-{port}");
    assert_eq!(cables, [([name("x", "1"), name("y", "3")], true), ([name("x", "3"), name("y", "1")], true)]);
    let silent = ["x", "y"].map(|side| {
        let mut machine = Machine::read(side, &transcript(side)).unwrap();
        machine.interfaces.iter_mut().for_each(|interface| interface.neighbours.clear());
        machine
    });
    let desk = Desk::new(silent.into());
    assert!(desk.cables.len() == 2 && desk.cables.iter().all(|cable| !cable.certain));
    assert!(Plan::new(&desk).unwrap().notes[0].contains("several cables"));
}

#[test]
fn a_plan_for_linux_uses_ip_and_systemd() {
    let desk = desk();
    let plan = Plan::new(&desk).unwrap();
    assert_eq!(plan.links[0].network().to_string(), "10.84.73.0/30", "the block of a route is left alone");
    assert_eq!(plan.links[0].mtu, Some(65_520));
    let shown: Vec<String> = plan.machines[0]
        .actions
        .iter()
        .flat_map(|action| action.commands(&desk.machines[0].system))
        .map(|command| command.shown())
        .collect();
    assert!(shown.contains(&"sudo ip address add 10.84.73.1/30 dev thunderbolt0".to_owned()), "{shown:#?}");
    assert_eq!(shown.last().unwrap(), "sudo systemctl enable --now thunderhead-cables.service");
    assert!(plan.machines[0].actions.contains(&Action::SetMtu {
        interface: "thunderbolt0".to_owned(),
        mtu: 65_520,
        before: 1500
    }));
}
