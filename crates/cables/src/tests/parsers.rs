//! Recorded outputs, and outputs that nobody has ever printed.

use proptest::prelude::*;

use super::fake::FakeMac;
use super::setups;
use super::simulation::Simulation;
use crate::check::{self, Recovery, Severity, findings};
use crate::graph::{Desk, ShapeKind};
use crate::hostfile;
use crate::machine::{Attached, Generation, Kind, Machine, RdmaState};
use crate::plan::Plan;
use crate::read::{self, ReadError};
use crate::route::{self, Way};
use crate::tune;

/// A Mac of which some outputs are recorded and the others are missing.
fn machine(sections: &[(&str, &str)]) -> Machine {
    let text: String = sections.iter().map(|(name, out)| format!("@@ {name} 0\n{out}\n")).collect();
    Machine::read("mac", &format!("@@ system 0\nDarwin\n{text}@@ end 0\n")).unwrap()
}

#[test]
fn recorded_ports_name_links_docks_and_machines() {
    let mac = machine(&[
        ("thunderbolt", include_str!("recorded/m5-local.json")),
        ("ports", include_str!("recorded/m5.hardware-ports.txt")),
    ]);
    let ports: Vec<_> = mac
        .ports
        .iter()
        .map(|port| (port.name.as_str(), port.interface.as_deref(), port.link_gbits, port.most_gbits))
        .collect();
    assert_eq!(
        ports,
        [
            ("1", Some("en1"), None, Some(120)),
            ("2", Some("en6"), Some(80), None),
            ("3", Some("en2"), Some(80), None)
        ]
    );
    assert_eq!(mac.ports[0].attached, Attached::Nothing);
    let Attached::Machine { uuid, name, model, via, offers_ip } = &mac.ports[1].attached else {
        panic!("{:?}", mac.ports[1])
    };
    assert_eq!(
        (uuid.as_str(), name.as_str(), model.as_deref()),
        ("00000003-0000-4000-8000-000000000003", "MacBook Pro", Some("Mac17,6"))
    );
    assert!(via.is_none() && *offers_ip);
    assert_eq!(mac.ports[2].attached, Attached::Device { name: "SB-XTM5".to_owned() });
    assert_eq!(mac.generation(), Some(Generation::Five));
}

#[test]
fn recorded_rdma_devices_have_states() {
    let (list, states) =
        (include_str!("recorded/m5-peer.ibv_devices.txt"), include_str!("recorded/m5-peer.ibv_devinfo.txt"));
    let mac = machine(&[("devices", list), ("device-states", states), ("rdma", "enabled")]);
    let devices: Vec<_> = mac
        .devices
        .iter()
        .map(|device| (device.name.as_str(), device.interface.as_deref(), device.active))
        .collect();
    let down = Some(false);
    assert_eq!(
        devices,
        [("rdma_en1", Some("en1"), down), ("rdma_en6", Some("en6"), down), ("rdma_en2", Some("en2"), down)]
    );
    assert_eq!(mac.rdma, RdmaState::Enabled);
    let header = list.lines().take(2).collect::<Vec<_>>().join("\n");
    assert!(machine(&[("devices", &header)]).devices.is_empty(), "the list of a Mac with RDMA off");
}

#[test]
fn recorded_interfaces_have_addresses_bridges_and_kinds() {
    let mac = machine(&[
        ("interfaces", include_str!("recorded/ifconfig.txt")),
        ("ports", "Hardware Port: Wi-Fi\nDevice: en0\n\nHardware Port: Thunderbolt 1\nDevice: en2\n"),
    ]);
    let wifi = mac.interface("en0").unwrap();
    assert_eq!(
        (wifi.kind, wifi.active, wifi.addresses[0].to_string().as_str()),
        (Kind::WiFi, true, "192.168.3.227/24")
    );
    let cable = mac.interface("en2").unwrap();
    assert_eq!((cable.kind, cable.up, cable.active, cable.mtu), (Kind::Thunderbolt, true, false, 1500));
    assert_eq!(cable.bridge.as_deref(), Some("bridge0"));
    assert_eq!(mac.interface("lo0").unwrap().addresses[0].prefix, 8);
    assert!(mac.interface("utun0").unwrap().addresses.is_empty());
}

#[test]
fn routes_of_all_notations_are_read() {
    let text = "Destination Gateway Flags Netif\ndefault 192.168.1.1 UGScg en0\n127 127.0.0.1 UCS lo0\n169.254 link#6 UCS en0\n\
                192.168.1 link#6 UCS en0\n192.168.1.7/32 link#6 UCS en0\n10.84.72/30 link#8 UCS en2\n224.0.0/4 link#6 UmCS en0\n";
    let routes: Vec<_> = machine(&[("routes", text)]).routes.iter().map(ToString::to_string).collect();
    assert_eq!(routes, ["127.0.0.0/8", "169.254.0.0/16", "192.168.1.0/24", "10.84.72.0/30"]);
}

#[test]
fn recorded_power_and_services() {
    let mac = machine(&[
        ("power", include_str!("recorded/pmset-custom.txt")),
        ("firewall", "Firewall is enabled. (State = 1)"),
        ("services", "\tdisabled services = {\n\t\t\"com.openssh.sshd\" => disabled\n\t}"),
        ("sysctl", "hw.model: Mac14,12\nhw.memsize: 34359738368\niogpu.wired_limit_mb: 0"),
        ("version", "26.5.1"),
    ]);
    assert_eq!(mac.power.low_power.get("AC Power"), Some(&true));
    assert_eq!(mac.power.sleep_minutes.get("AC Power"), Some(&1));
    assert_eq!((mac.firewall, mac.remote_login, mac.gpu_limit_mib), (Some(true), Some(false), Some(0)));
    assert_eq!(check::is_new_enough(&mac), Some(true));
}

#[test]
fn a_transcript_that_was_cut_or_is_of_windows_is_refused() {
    let whole = setups::pair()[0].transcript();
    let cut = &whole[..whole.len() / 2];
    assert!(matches!(Machine::read("book", cut), Err(ReadError::Unfinished { .. })));
    let other = Machine::read("pc", "@@ system 0\nMINGW64_NT\n@@ end 0\n").unwrap_err();
    assert!(other.to_string().contains("MINGW64_NT"), "{other}");
}

#[test]
fn the_probe_is_a_script_that_sh_can_read() {
    let output = std::process::Command::new("sh").args(["-n", "-c", read::script()]).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

fn desk(macs: Vec<FakeMac>) -> Desk {
    Simulation::new(macs).desk()
}

fn setup(name: &str) -> Desk {
    desk(setups::all().into_iter().find(|(known, _)| *known == name).unwrap().1)
}

#[test]
fn shapes_and_what_one_more_cable_gives() {
    let kinds: Vec<_> = setups::all().into_iter().map(|(_, macs)| desk(macs).shape().kind).collect();
    use ShapeKind::{Line, Mesh, Pair};
    assert_eq!(kinds, [Pair, Pair, Pair, Line, Mesh, Mesh, Line, Pair, Pair, Mesh, Mesh, Line, Pair, Pair]);
    let line = setup("line");
    assert_eq!(line.shape().order, [0, 1, 2]);
    let advice = line.advice().join("\n");
    assert!(advice.contains("--parallel pipeline in the order a, b, c"), "{advice}");
    assert!(advice.contains("one more cable, a port 2 → c port 2, makes a mesh"), "{advice}");
    assert_eq!(setup("two cables").shape().doubled, [[0, 1]]);
    let ring = desk(setups::composed(
        &["a", "b", "c", "d"].map(|name| (name, 6, 120)),
        &[((0, 0), (2, 0), 80), ((2, 1), (1, 1), 80), ((1, 0), (3, 0), 80), ((3, 1), (0, 1), 80)],
    ));
    assert_eq!((ring.shape().kind, ring.shape().order), (ShapeKind::Ring, vec![0, 2, 1, 3]));
    let apart = desk(setups::composed(&["a", "b", "c"].map(|name| (name, 3, 120)), &[((0, 0), (1, 0), 80)]));
    assert_eq!(apart.shape().islands, [vec![0, 1], vec![2]]);
    assert!(apart.advice().join("\n").contains("a, b  |  c"));
}

#[test]
fn slow_cables_are_named_unless_a_machine_is_the_reason() {
    let mesh = setup("mesh of three");
    let slow: Vec<_> = mesh.cables.iter().filter_map(|cable| mesh.slow_cable(cable)).collect();
    assert_eq!(
        slow,
        ["b port 3 → c port 1: 40 Gbit/s where both ends have Thunderbolt 5: a Thunderbolt 4 cable?"]
    );
    let mixed = setup("with Thunderbolt 4");
    assert!(mixed.cables.iter().all(|cable| mixed.slow_cable(cable).is_none()), "the mini has Thunderbolt 4");
}

#[test]
fn the_recorded_pair_is_told_which_mac_needs_recovery() {
    let desk = setup("pair");
    let found = findings(&desk);
    let first = &found[0];
    assert_eq!((first.machine.as_str(), first.code, first.severity), ("book", "rdma-off", Severity::Problem));
    assert!(first.remedy.contains("rdma_ctl enable"));
    let needing: Vec<_> = desk
        .machines
        .iter()
        .filter(|machine| check::recovery(machine) == Recovery::Needed)
        .map(|machine| &machine.name)
        .collect();
    assert_eq!(needing, ["book"]);
    let codes: Vec<_> = found.iter().map(|finding| finding.code).collect();
    assert!(codes.contains(&"in-bridge") && codes.contains(&"low-power"), "{codes:?}");
    assert!(found.iter().all(|finding| !finding.remedy.is_empty()));
}

#[test]
fn pairs_use_the_best_way_that_there_is() {
    let ways = |name: &str| {
        let desk = setup(name);
        let plan = Plan::new(&desk).unwrap();
        route::routes(&desk, &plan.links).into_iter().map(|route| route.way).collect::<Vec<_>>()
    };
    assert_eq!(ways("line"), [Way::Rdma, Way::Ethernet, Way::Rdma]);
    assert_eq!(ways("pair"), [Way::Cable]);
    assert_eq!(ways("mesh of four"), [Way::Rdma; 6]);
    assert_eq!(ways("mesh of three"), [Way::Rdma, Way::Rdma, Way::Cable]);
}

#[test]
fn host_files_name_devices_addresses_and_networks() {
    let desk = setup("mesh of four");
    let plan = Plan::new(&desk).unwrap();
    let file: serde_json::Value = serde_json::from_str(&hostfile::thunder(&desk, &plan.links)).unwrap();
    assert_eq!(file["backend"], "jaccl");
    assert_eq!(file["hosts"][0]["rdma"], serde_json::json!([null, "rdma_en5", "rdma_en4", "rdma_en3"]));
    assert_eq!(file["hosts"][0]["ips"], serde_json::json!(["192.168.1.10"]), "an address that all reach");
    assert!(file["envs"][0].as_str().unwrap().starts_with("THUNDER_CABLES=10.84.72.0/30,"));
    let desk = setup("line");
    let plan = Plan::new(&desk).unwrap();
    let file: serde_json::Value = serde_json::from_str(&hostfile::mlx(&desk, &plan.links)).unwrap();
    assert_eq!(file["backend"], "ring");
    let addresses: Vec<_> =
        file["hosts"].as_array().unwrap().iter().map(|host| host["ips"][0].as_str().unwrap()).collect();
    assert_eq!(
        addresses,
        ["192.168.1.10", "10.84.72.2", "10.84.72.6"],
        "each as the one before it reaches it"
    );
    let desk = setup("two cables");
    let plan = Plan::new(&desk).unwrap();
    let file: serde_json::Value = serde_json::from_str(&hostfile::thunder(&desk, &plan.links)).unwrap();
    assert_eq!(file["hosts"][0]["rdma"][1], serde_json::json!(["rdma_en2", "rdma_en4"]));
    assert_eq!(
        file["hosts"][1]["rdma"][0],
        serde_json::json!(["rdma_en3", "rdma_en5"]),
        "cables in one order"
    );
}

#[test]
fn the_graph_has_the_cables_as_they_are_plugged() {
    for (name, macs, wires) in setups::wired() {
        let desk = desk(macs);
        let mut found: Vec<_> = desk
            .cables
            .iter()
            .map(|cable| (cable.ends.map(|end| (end.machine, desk.port(end).name.clone())), cable.gbits))
            .collect();
        let mut plugged: Vec<_> = wires
            .iter()
            .map(|(one, other, gbits)| {
                ([one, other].map(|(machine, port)| (*machine, (port + 1).to_string())), Some(*gbits))
            })
            .collect();
        found.sort();
        plugged.sort();
        assert_eq!(found, plugged, "{name}");
    }
}

#[test]
fn apples_own_host_file_comes_out_of_its_cabling() {
    let golden: serde_json::Value =
        serde_json::from_str(include_str!("recorded/wwdc-233.hosts.json")).unwrap();
    let desk = setup("Apple's session");
    let plan = Plan::new(&desk).unwrap();
    for text in [hostfile::thunder(&desk, &plan.links), hostfile::mlx(&desk, &plan.links)] {
        let file: serde_json::Value = serde_json::from_str(&text).unwrap();
        assert_eq!((&file["hosts"], &file["backend"]), (&golden, &serde_json::json!("jaccl")));
        let networks = file["envs"][0].as_str().unwrap();
        assert!(networks.ends_with(",10.84.72.20/30,192.168.1.0/24"), "Ethernet comes last: {networks}");
    }
}

#[test]
fn an_owners_host_file_for_two_cables_comes_out_of_the_cabling() {
    let golden: serde_json::Value =
        serde_json::from_str(include_str!("recorded/two-studios.hosts.json")).unwrap();
    let desk = setup("two Studios");
    let plan = Plan::new(&desk).unwrap();
    let file: serde_json::Value = serde_json::from_str(&hostfile::thunder(&desk, &plan.links)).unwrap();
    assert_eq!(file["hosts"], golden);
    let networks: Vec<_> = plan.links.iter().map(|link| (link.network().to_string(), link.kept)).collect();
    assert_eq!(networks, [("10.10.0.0/30".to_owned(), true), ("10.10.1.0/30".to_owned(), true)]);
}

#[test]
fn the_recorded_line_has_cables_that_are_slower_than_its_ports() {
    let desk = setup("line around a MacBook");
    assert_eq!(desk.shape().order, [0, 1, 2]);
    let slow: Vec<_> = desk.cables.iter().filter_map(|cable| desk.slow_cable(cable)).collect();
    assert_eq!(
        slow,
        [
            "mini-a port 2 → book port 2: 40 Gbit/s where both ends have Thunderbolt 5: a Thunderbolt 4 cable?",
            "book port 3 → mini-b port 2: 40 Gbit/s where both ends have Thunderbolt 5: a Thunderbolt 4 cable?",
        ]
    );
    let plan = Plan::new(&desk).unwrap();
    assert!(plan.links.iter().all(|link| !link.rdma && link.mtu == Some(9000)));
    let ways: Vec<_> = route::routes(&desk, &plan.links).into_iter().map(|route| route.way).collect();
    assert_eq!(ways, [Way::Cable, Way::Ethernet, Way::Cable]);
}

#[test]
fn a_setup_that_would_cut_its_own_connection_is_not_run() {
    let cuts = |reached: &str, change: fn(&mut FakeMac)| {
        let mut macs = setups::pair();
        macs[1].reached = reached.to_owned();
        change(&mut macs[1]);
        Plan::new(&desk(macs)).unwrap().cuts
    };
    let over_bridge = "fe80::1c1f%bridge0 49158 fe80::8c2:7%bridge0 22";
    let found = cuts(over_bridge, |_| {});
    assert_eq!(
        found,
        [
            "peer: ssh reaches it over bridge0, and setup takes en6 out of bridge0, which would cut the connection: \
             name it in --hosts by 192.168.1.11"
        ]
    );
    let alone = cuts(over_bridge, |mac| mac.interfaces[0].addresses.clear());
    assert!(alone[0].contains("connect it to Ethernet or Wi-Fi"), "{alone:?}");
    let none = Vec::<String>::new();
    assert_eq!(cuts("192.168.1.2 49158 192.168.1.11 22", |_| {}), none);
    assert_eq!(cuts("::ffff:192.168.1.2 49158 ::ffff:192.168.1.11 22", |_| {}), none);
    assert_eq!(
        cuts(over_bridge, |mac| mac.members.push("en0".to_owned())),
        none,
        "Ethernet keeps the bridge up"
    );
    assert_eq!(cuts(over_bridge, |mac| mac.members.clear()), none, "nothing is taken out");
    assert_eq!(cuts("noise", |_| {}), none);
}

#[test]
fn memory_for_the_gpu_is_asked_of_metal_and_estimated_if_it_cannot_be() {
    use tune::{GpuSource, gpu_memory};
    let gib = |count: u64| count << 30;
    let mut machine = Simulation::new(setups::pair()).machines().remove(0);
    let found = gpu_memory(&machine).unwrap();
    assert_eq!((found.bytes, found.source, found.is_set), (115_448_725_504, GpuSource::Metal, false));
    assert_eq!(tune::gpu_limit(&machine, gib(100)).unwrap().set_mib, None, "Metal's default is enough");
    machine.gpu_working_set_bytes = None;
    machine.gpu_limit_mib = Some(112 << 10);
    let found = gpu_memory(&machine).unwrap();
    assert_eq!((found.bytes, found.source, found.is_set), (gib(112), GpuSource::Setting, true));
    // No Mac has reported less than its estimate: memory in GiB, and MiB that Metal said.
    let reported = [
        (8, 5461),
        (16, 10_922),
        (16, 12_124),
        (32, 21_845),
        (48, 38_338),
        (64, 49_152),
        (96, 73_728),
        (128, 110_100),
        (512, 475_136),
    ];
    for (memory, said) in reported {
        (machine.memory_bytes, machine.gpu_limit_mib) = (Some(gib(memory)), Some(0));
        let found = gpu_memory(&machine).unwrap();
        assert!((memory * 682..=said).contains(&(found.bytes >> 20)), "{memory}: {found:?}");
        assert_eq!((found.source, found.is_set), (GpuSource::Estimate, false));
    }
    machine.gpu_limit_mib = None;
    assert_eq!(gpu_memory(&machine), None);
}

#[test]
fn thunderbolt_4_is_told_apart_and_takes_part_over_tcp() {
    let desk = setup("Thunderbolt 4");
    assert_eq!(
        desk.machines.iter().map(Machine::generation).collect::<Vec<_>>(),
        [Some(Generation::Four); 2]
    );
    let codes: Vec<_> = findings(&desk).into_iter().map(|finding| finding.code).collect();
    assert!(codes.contains(&"no-thunderbolt-5") && !codes.contains(&"rdma-no-device"), "{codes:?}");
    let recoveries = desk.machines.iter().map(check::recovery);
    assert!(recoveries.into_iter().all(|needs| needs == Recovery::NotNeeded), "Recovery cannot help");
    let plan = Plan::new(&desk).unwrap();
    assert!(!plan.links[0].rdma && plan.links[0].mtu == Some(9000));
    assert_eq!(desk.loose.len(), 0, "the display is no machine");
}

#[test]
fn addresses_that_an_owner_has_set_by_hand_are_kept() {
    let desk = setup("set up by hand");
    let plan = Plan::new(&desk).unwrap();
    let networks: Vec<_> =
        plan.links.iter().map(|link| (link.network().to_string(), link.kept, link.rdma)).collect();
    let kept = |network: &str| (network.to_owned(), true, true);
    assert_eq!(networks, [kept("10.0.1.0/24"), kept("10.0.2.0/24"), kept("10.0.3.0/24")]);
    let adds = plan.machines.iter().flat_map(|machine| &machine.actions);
    assert!(!adds.into_iter().any(|action| matches!(action, crate::plan::Action::AddAddress { .. })));
}

#[test]
fn an_owners_address_is_not_kept_where_a_vpn_takes_its_packets() {
    let mut macs = setups::all().into_iter().find(|(name, _)| *name == "set up by hand").unwrap().1;
    macs[0].routes.push("10.0.1.0/28".parse().unwrap());
    let plan = Plan::new(&desk(macs)).unwrap();
    let networks: Vec<_> = plan.links.iter().map(|link| (link.network().to_string(), link.kept)).collect();
    assert_eq!(networks[0], ("10.84.72.0/30".to_owned(), false), "10.0.1.2 leaves over the VPN");
    assert_eq!(networks[1], ("10.0.2.0/24".to_owned(), true));
}

#[test]
fn recorded_routes_of_shared_networks_are_left_alone() {
    let routes = |text: &str| -> Vec<String> {
        machine(&[("routes", text)]).routes.iter().map(ToString::to_string).collect()
    };
    let a = routes(include_str!("recorded/sharing-a.routes.txt"));
    assert_eq!(
        a,
        [
            "100.64.0.0/10",
            "127.0.0.0/8",
            "169.254.0.0/16",
            "169.254.0.0/16",
            "192.0.2.0/24",
            "198.51.100.0/24"
        ]
    );
    let b = routes(include_str!("recorded/sharing-b.routes.txt"));
    assert_eq!(b, ["100.64.0.0/10", "169.254.0.0/16", "169.254.0.0/16", "198.51.100.0/24", "192.0.2.0/24"]);
    // The Studio's lease and the MacBook's own choice are no network of theirs alone.
    let plan = Plan::new(&setup("Internet Sharing")).unwrap();
    assert_eq!((plan.links[0].network().to_string().as_str(), plan.links[0].kept), ("10.84.72.0/30", false));
}

#[test]
fn drawings_name_every_port_and_cable() {
    let desk = setup("mesh of three");
    let text = desk.text();
    for part in [
        "a  Mac15,14, Apple M3 Ultra, 512 GB, macOS 26.3",
        "port 1 (en2) ═══ 80 Gbit/s ═══ b port 2  RDMA",
        "port 5 (en6) free, up to 120 Gbit/s",
        "form a mesh",
    ] {
        assert!(text.contains(part), "{part} in\n{text}");
    }
    let dot = desk.dot();
    assert!(dot.contains("m0 -- m1 [label=\"80 Gbit/s RDMA\", taillabel=\"1\", headlabel=\"2\""), "{dot}");
    let svg = desk.svg();
    assert_eq!((svg.matches("<line").count(), svg.matches("<rect").count()), (3, 4), "{svg}");
}

#[test]
fn the_gpu_limit_leaves_room_for_macos() {
    let gib = |count: u64| count << 30;
    let mut machine = Simulation::new(setups::pair()).machines().remove(0);
    machine.gpu_working_set_bytes = None;
    let limit = tune::gpu_limit(&machine, gib(100)).unwrap();
    assert_eq!(
        (limit.reserve, limit.set_mib),
        (gib(8), Some(102 * 1024)),
        "128 GB, of which 100 and buffers"
    );
    assert_eq!(tune::gpu_limit(&machine, gib(60)).unwrap().set_mib, None, "the default is enough");
    assert!(tune::gpu_limit(&machine, gib(119)).unwrap_err().to_string().contains("8 must stay"));
    machine.gpu_limit_mib = None;
    assert!(tune::gpu_limit(&machine, gib(1)).unwrap_err().to_string().contains("iogpu.wired_limit_mb"));
    for memory in [8u64, 16, 24, 32, 64, 128, 512] {
        let reserve = tune::reserve_bytes(gib(memory));
        assert!(
            reserve >= gib(memory) / 16 && reserve >= gib(2) && reserve <= gib(32),
            "{memory}: {reserve}"
        );
    }
}

#[test]
fn tuning_is_undone_too() {
    let simulation = Simulation::new(setups::pair());
    let before = simulation.states();
    let machines = simulation.machines();
    let limit = tune::gpu_limit(&machines[0], 110 << 30).unwrap();
    let plan = tune::plan(&machines[0], Some(&limit));
    assert_eq!(plan.actions.len(), 2, "{plan:?}");
    let mut record = crate::Record::default();
    simulation.carry_out(&[plan], &mut record).unwrap();
    let tuned = simulation.states();
    assert_eq!((tuned[0].gpu_mib, tuned[0].low_power), (112 * 1024, false));
    assert_eq!(simulation.undo(&mut record), Vec::<String>::new());
    assert_eq!(simulation.states(), before);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    #[test]
    fn no_transcript_makes_the_reader_panic(
        section in 0usize..12,
        noise in "[ -~\\n\\t\u{80}-\u{ff}]{0,200}",
        at in 0usize..4000,
        setup in 0usize..2,
    ) {
        let names = ["thunderbolt", "ports", "interfaces", "routes", "devices", "device-states", "power", "firewall", "services", "sysctl", "mtu:en2", "version"];
        let whole = [setups::pair(), setups::book_and_studio()][setup][0].transcript();
        let at = whole.floor_char_boundary(at.min(whole.len()));
        let torn = format!("{}{noise}{}", &whole[..at], &whole[at..]);
        let replaced = format!("{whole}@@ {} 0\n{noise}\n", names[section]);
        for text in [torn, replaced] {
            if let Ok(machine) = Machine::read("mac", &text) {
                let desk = Desk::new(vec![machine.clone(), machine]);
                let _ = (desk.text(), desk.svg(), findings(&desk), Plan::new(&desk));
            }
        }
    }

    #[test]
    fn no_linux_transcript_makes_the_reader_panic(noise in "[ -~\\n]{0,300}", at in 0usize..3000) {
        let whole = super::linux::transcript("x");
        let at = at.min(whole.len());
        let at = whole.floor_char_boundary(at);
        let torn = format!("{}{noise}{}", &whole[..at], &whole[at..]);
        if let Ok(machine) = Machine::read("pc", &torn) {
            let desk = Desk::new(vec![machine]);
            let _ = (desk.text(), findings(&desk));
        }
    }
}
