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

#[test]
fn the_verbs_driver_makes_a_cable_one_for_rdma() {
    let with_devices = |side: &str| {
        let class = "/sys/class/infiniband";
        let device = |number: usize| {
            let device = format!("{class}/usb4_rdma{number}/ports/1");
            format!("{device}/state=4: ACTIVE\n{device}/gid_attrs/ndevs/0=thunderbolt{number}\n")
        };
        // A card of another network is no device of a cable.
        let card = format!(
            "{class}/mlx5_0/ports/1/state=4: ACTIVE\n{class}/mlx5_0/ports/1/gid_attrs/ndevs/0=eth0\n"
        );
        let section = format!("@@ rdma-devices 0\n{card}{}{}@@ neighbours 0", device(0), device(1));
        Machine::read(side, &transcript(side).replace("@@ neighbours 0", &section)).unwrap()
    };
    let desk = Desk::new(["x", "y"].map(with_devices).into());
    let plan = Plan::new(&desk).unwrap();
    assert!(plan.links.iter().all(|link| link.rdma && link.mtu.is_none()), "{:?}", plan.links);
    let cables = plan.machines[0].actions.iter().find_map(|action| match action {
        Action::WriteFile { path, content, .. } if path.ends_with("/cables") => Some(content.as_str()),
        _ => None,
    });
    assert_eq!(cables, Some("10.84.73.0/30=usb4_rdma0,10.84.73.4/30=usb4_rdma1\n"));
    let half = Desk::new(vec![with_devices("x"), Machine::read("y", &transcript("y")).unwrap()]);
    assert!(half.text().contains("  TCP\n") && !half.text().contains("  RDMA\n"), "{}", half.text());
    let why = half.rdma_obstacles(&half.cables[0]);
    assert_eq!(why, ["y has no RDMA over Thunderbolt"]);
}

#[test]
fn a_linux_machine_and_a_mac_share_two_cables() {
    use crate::tests::fake::{FakeMac, FakePort};
    let mac_uuid = |port: usize| format!("0000000A-0000-4000-8000-{port:012X}");
    let plug = || Some((UUIDS[1].to_uppercase(), 40, "Linux"));
    let port = |port: usize| FakePort { uuid: mac_uuid(port), most: 120, plug: plug() };
    let mac = FakeMac::new("mac", 0, "Apple M4 Pro", &[port(0), port(1)]);
    let mut linux = transcript("y");
    for (route, port) in [(1, 1), (3, 0)] {
        let line = |uuid: &str| format!("0-{route}/unique_id={uuid}");
        linux = linux.replace(&line(UUIDS[0]), &line(&mac_uuid(port).to_lowercase()));
    }
    let read = |name: &str, text: &str| Machine::read(name, text).unwrap();
    let desk = Desk::new(vec![read("mac", &mac.transcript()), read("pc", &linux)]);
    let cables: Vec<_> = desk.cables.iter().map(|cable| cable.ends.map(|end| desk.name(end))).collect();
    let name = |port: &str, route: &str| [format!("mac port {port}"), format!("pc port 0-{route}")];
    assert_eq!(cables, [name("1", "3"), name("2", "1")]);
    assert!(desk.cables.iter().all(|cable| cable.certain && desk.slow_cable(cable).is_none()));
    let plan = Plan::new(&desk).unwrap();
    assert!(plan.links.iter().all(|link| !link.rdma && link.mtu == Some(9000)), "as much as a Mac takes");
    let shown: Vec<String> = plan
        .machines
        .iter()
        .zip(&desk.machines)
        .flat_map(|(plan, machine)| plan.actions.iter().flat_map(|action| action.commands(&machine.system)))
        .map(|command| command.shown())
        .collect();
    for wanted in [
        "sudo ifconfig en2 inet 10.84.73.1 netmask 255.255.255.252 alias",
        "sudo ip address add 10.84.73.2/30 dev thunderbolt1",
    ] {
        assert!(shown.iter().any(|command| command == wanted), "{wanted}: {shown:#?}");
    }
}

/// Two machines as network namespaces, with veth pairs for cables.
#[cfg(target_os = "linux")]
mod namespaces {
    use std::fs;
    use std::path::Path;
    use std::process::{Child, Command, Stdio};

    use super::UUIDS;
    use crate::apply::{self, Host, Hosts, Sudo};
    use crate::graph::Desk;
    use crate::machine::Machine;
    use crate::plan::Plan;
    use crate::record::Record;
    use crate::shell::{ProcessShell, Shell};

    struct Namespace(Child);

    impl Drop for Namespace {
        fn drop(&mut self) {
            // Fails if it has ended by itself.
            let _ = self.0.kill();
            let _ = self.0.wait();
        }
    }

    impl Namespace {
        fn new() -> Self {
            let child = Command::new("unshare")
                .args(["--net", "cat"])
                .stdin(Stdio::piped())
                .stdout(Stdio::null())
                .spawn();
            let namespace = Self(child.unwrap());
            // `cat` runs once unshare has made the namespace.
            let own = || fs::read_link("/proc/self/ns/net").unwrap();
            let its = || fs::read_link(format!("/proc/{}/ns/net", namespace.0.id()));
            for _ in 0..500 {
                if its().is_ok_and(|its| its != own()) {
                    break;
                }
                std::thread::sleep(std::time::Duration::from_millis(10));
            }
            namespace
        }

        fn shell(&self, name: &str, root: &Path) -> ProcessShell {
            let enter =
                ["nsenter".to_owned(), format!("--net=/proc/{}/ns/net", self.0.id()), "env".to_owned()];
            let root = format!("THUNDER_ROOT={}", root.display());
            // The host's name comes first, as with ssh.
            let run = ["sh", "-c", "eval \"$2\"", "sh"].map(str::to_owned);
            ProcessShell::through(&enter.into_iter().chain([root]).chain(run).collect::<Vec<_>>(), name)
        }
    }

    fn run(shell: &ProcessShell, script: &str) -> String {
        let output = shell.run(script, "", std::time::Duration::from_secs(30)).unwrap();
        assert_eq!(output.status, 0, "{script}: {}", output.err);
        output.out
    }

    /// The tree of a machine with two cables; their interfaces are `cable0` and `cable1`.
    fn write_tree(root: &Path, own: &str, other: &str) {
        let devices = root.join("sys/bus/thunderbolt/devices");
        let write = |name: &str, text: &str| {
            fs::create_dir_all(devices.join(name).parent().unwrap()).unwrap();
            fs::write(devices.join(name), text).unwrap();
        };
        write("0-0/unique_id", own);
        write("0-0/generation", "4\n");
        for (route, interface) in [(1, "cable0"), (3, "cable1")] {
            write(&format!("0-{route}/unique_id"), other);
            write(&format!("0-{route}/rx_speed"), "20.0 Gb/s\n");
            write(&format!("0-{route}/rx_lanes"), "2\n");
            fs::create_dir_all(devices.join(format!("0-{route}.0/net/{interface}"))).unwrap();
        }
        fs::create_dir_all(root.join("sys/module/thunderbolt_net")).unwrap();
        fs::create_dir_all(root.join("etc")).unwrap();
    }

    #[test]
    fn cables_between_namespaces_are_set_up_used_and_undone() {
        let can = Command::new("unshare").args(["--net", "sh", "-c", "ping -V && ip -json link"]).output();
        if !can.is_ok_and(|output| output.status.success()) {
            let test = "cables_between_namespaces_are_set_up_used_and_undone";
            thunder_testing::skip(test, "needs root, ip and ping to make network namespaces");
            return;
        }
        let folder = tempfile::tempdir().unwrap();
        let namespaces = [Namespace::new(), Namespace::new()];
        let roots = ["x", "y"].map(|name| folder.path().join(name));
        write_tree(&roots[0], UUIDS[0], UUIDS[1]);
        write_tree(&roots[1], UUIDS[1], UUIDS[0]);
        let shells = [namespaces[0].shell("x", &roots[0]), namespaces[1].shell("y", &roots[1])];
        let other = namespaces[1].0.id();
        // A new interface else looks for its own address for two seconds before it sends.
        shells
            .iter()
            .for_each(|shell| drop(run(shell, "echo 0 >/proc/sys/net/ipv6/conf/default/accept_dad")));
        // They cross, which the tree does not tell.
        for (one, peer) in [("cable0", "cable1"), ("cable1", "cable0")] {
            run(
                &shells[0],
                &format!(
                    "ip link add {one} type veth peer name {peer} netns {other} && ip link set {one} up"
                ),
            );
            run(&shells[1], &format!("ip link set {peer} up"));
        }
        // One of them is in a bridge, as a distribution may set it up.
        run(&shells[0], "ip link add br0 type bridge && ip link set cable0 master br0");
        let state = || {
            shells.each_ref().map(|shell| {
                run(shell, "ip -o -4 address show; ip -o link show | sed 's/NO-CARRIER,//;s/state [A-Z]*//'")
            })
        };
        let files = || roots.each_ref().map(|root| root.join("etc/thunderhead").exists());
        let read = || {
            Desk::new(
                shells
                    .iter()
                    .zip(["x", "y"])
                    .map(|(shell, name)| Machine::read(name, &apply::probe(shell).unwrap()).unwrap())
                    .collect(),
            )
        };
        let before = state();
        // Links come up a moment after both ends are.
        std::thread::sleep(std::time::Duration::from_millis(500));

        let desk = read();
        let certain: Vec<bool> = desk.cables.iter().map(|cable| cable.certain).collect();
        assert_eq!(certain, [true, true], "an answer to a ping tells which cable is which");
        let plan = Plan::new(&desk).unwrap();
        let hosts: Hosts<'_> = ["x", "y"]
            .into_iter()
            .zip(&shells)
            .map(|(name, shell)| (name.to_owned(), Host { shell: shell as &dyn Shell, sudo: Sudo::Root }))
            .collect();
        let mut record = Record::default();
        apply::apply(&plan.machines, &desk.machines, &hosts, &mut record, &mut |_| Ok(()), &mut |_| {})
            .unwrap();
        assert!(Plan::new(&read()).unwrap().is_done());
        for link in &plan.links {
            let there = link.addresses[1].address;
            // Jumbo frames pass whole.
            run(&shells[0], &format!("ping -c 1 -W 5 -M do -s 9000 {there}"));
        }
        assert_eq!(files(), [true, true]);

        assert_eq!(
            apply::undo(&hosts, &mut record, &mut |_| Ok(()), &mut |_| {}).unwrap(),
            Vec::<String>::new()
        );
        assert_eq!((state(), files()), (before, [false, false]));
    }
}
