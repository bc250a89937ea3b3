//! Random desks on random networks, with faults in setup and undo.

use proptest::prelude::*;

use super::fake::{FakeInterface, FakeMac};
use super::faults::{assert_all_can_talk, sorted};
use super::setups::{Wire, composed};
use super::simulation::{Fault, Simulation};
use crate::network::Network;
use crate::plan::{Link, Plan};
use crate::record::Record;

const NAMES: [&str; 5] = ["a", "b", "c", "d", "e"];
const PORTS: usize = 6;

/// Cables between free ports, by pairs of machines; what has no free port is left out. Machines of
/// `old` have Thunderbolt 4.
fn cabled(count: usize, pairs: &[(usize, usize, bool)], old: u8) -> (Vec<FakeMac>, Vec<Wire>) {
    let is_old = |machine: usize| old >> machine & 1 == 1;
    let mut next = [0; NAMES.len()];
    let mut cables = Vec::new();
    for (one, other, fast) in pairs {
        let (one, other) = (one % count, other % count);
        if one != other && next[one] < PORTS && next[other] < PORTS {
            let gbits = if *fast && !is_old(one) && !is_old(other) { 80 } else { 40 };
            cables.push(((one, next[one]), (other, next[other]), gbits));
            next[one] += 1;
            next[other] += 1;
        }
    }
    let machine = |index: usize| (NAMES[index], PORTS, if is_old(index) { 40 } else { 120 });
    (composed(&(0..count).map(machine).collect::<Vec<_>>(), &cables), cables)
}

/// Private networks of all lengths, most where setups look first.
fn network() -> impl Strategy<Value = Network> {
    let near = (0u32..4096, 16u8..=32).prop_map(|(low, prefix)| (0x0a54_4000 + low * 16, prefix));
    let ten = (any::<u32>(), 8u8..=32).prop_map(|(low, prefix)| (0x0a00_0000 | (low & 0x00ff_ffff), prefix));
    let home = (any::<u16>(), 16u8..=30).prop_map(|(low, prefix)| (0xc0a8_0000 | u32::from(low), prefix));
    prop_oneof![near, ten, home].prop_map(|(address, prefix)| Network::new(address.into(), prefix).unwrap())
}

/// What somebody has changed at a port of a Mac.
#[derive(Debug, Clone)]
enum Quirk {
    OutOfBridge,
    Down,
    Jumbo,
    Address(Network),
    RdmaOff,
}

fn quirk() -> impl Strategy<Value = Quirk> {
    prop_oneof![
        Just(Quirk::OutOfBridge),
        Just(Quirk::Down),
        Just(Quirk::Jumbo),
        network().prop_map(Quirk::Address),
        any::<u16>()
            .prop_map(|low| Quirk::Address(Network::new((0xa9fe_0000 | u32::from(low)).into(), 16).unwrap())),
        Just(Quirk::RdmaOff),
    ]
}

/// Addresses that an owner has given the ends of a cable by hand; only the first end's, after a
/// setup that ended in the middle.
#[derive(Debug, Clone)]
struct ByHand {
    cable: usize,
    network: Network,
    both: bool,
}

fn by_hand() -> impl Strategy<Value = ByHand> {
    let near = (0u32..4096, 16u8..=30).prop_map(|(low, prefix)| (0x0a54_4000 + low * 16, prefix));
    (0usize..10, near, any::<bool>()).prop_map(|(cable, (address, prefix), both)| {
        let network = Network::new(address.into(), prefix).unwrap().base();
        ByHand { cable, network, both }
    })
}

fn give(macs: &mut [FakeMac], cables: &[Wire], ByHand { cable, network, both }: ByHand) {
    let Some((one, other, _)) = cables.get(cable % cables.len().max(1)) else { return };
    let [first, second] = network.ends();
    change(&mut macs[one.0], one.1, Quirk::Address(first));
    if both {
        change(&mut macs[other.0], other.1, Quirk::Address(second));
    }
}

fn change(mac: &mut FakeMac, port: usize, quirk: Quirk) {
    let interface = &mut mac.interfaces[port + 1];
    match quirk {
        Quirk::OutOfBridge => mac.members.retain(|member| *member != interface.name),
        Quirk::Down => interface.up = false,
        Quirk::Jumbo => interface.mtu = 9000,
        // An address twice on one interface is not possible.
        Quirk::Address(own) if interface.addresses.iter().all(|known| known.address != own.address) => {
            interface.addresses.push(own);
        }
        Quirk::Address(_) => {}
        Quirk::RdmaOff => {
            if mac.rdma.is_some() {
                mac.rdma = Some("disabled".to_owned());
            }
            mac.devices.clear();
        }
    }
}

fn fault() -> impl Strategy<Value = Option<Fault>> {
    let kinds: [fn(usize) -> Fault; 4] = [Fault::LostBefore, Fault::LostAfter, Fault::Fails, Fault::Vanishes];
    prop::option::of((0usize..60, 0usize..4).prop_map(move |(at, kind)| kinds[kind](at)))
}

/// Whether a network that setup has chosen overlaps one that is in use; addresses that the cable's
/// own ends have had before are kept, and may not be anywhere else.
fn collides(simulation: &Simulation, link: &Link) -> bool {
    let desk = simulation.desk();
    let network = link.network();
    let is_end = |machine: usize, name: &str| {
        link.ends.iter().any(|end| end.machine == machine && desk.interface(*end).unwrap().name == name)
    };
    let had = link
        .ends
        .iter()
        .any(|end| desk.interface(*end).unwrap().addresses.iter().any(|own| own.base() == network));
    desk.machines.iter().enumerate().any(|(index, machine)| {
        let others = machine.interfaces.iter().filter(|interface| !is_end(index, &interface.name));
        let ends = machine.interfaces.iter().filter(|interface| is_end(index, &interface.name));
        others.flat_map(|interface| &interface.addresses).any(|own| own.overlaps(&network))
            || !had
                && (machine.routes.iter().any(|route| route.overlaps(&network))
                    || ends.flat_map(|interface| &interface.addresses).any(|own| own.overlaps(&network)))
    })
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: thunder_testing::runs(256, 10_000) as u32,
        ..ProptestConfig::default()
    })]

    #[test]
    fn no_network_collides_all_cables_work_and_undo_is_exact(
        count in 2usize..=5,
        pairs in prop::collection::vec((0usize..5, 0usize..5, any::<bool>()), 1..10),
        old in any::<u8>(),
        routes in prop::collection::vec((0usize..5, network()), 0..12),
        lans in prop::collection::vec((0usize..5, network()), 0..6),
        hands in prop::collection::vec(by_hand(), 0..4),
        quirks in prop::collection::vec((0usize..5, 0..PORTS, quirk()), 0..8),
        faults in [fault(), fault(), fault()],
    ) {
        let (mut macs, cables) = cabled(count, &pairs, old);
        hands.into_iter().for_each(|hand| give(&mut macs, &cables, hand));
        for (mac, route) in routes {
            macs[mac % count].routes.push(route.base());
        }
        for (index, (mac, address)) in lans.into_iter().enumerate() {
            let name = format!("en{}", 20 + index);
            let mac_address = format!("82:00:00:01:00:{index:02x}");
            let lan = FakeInterface { name, mac: mac_address, up: true, active: true, mtu: 1500, addresses: vec![address] };
            macs[mac % count].interfaces.push(lan);
        }
        for (mac, port, quirk) in quirks {
            change(&mut macs[mac % count], port, quirk);
        }
        let before = sorted(macs.clone());
        let simulation = Simulation::new(macs);
        let desk = simulation.desk();
        prop_assume!(!desk.cables.is_empty());
        let plan = Plan::new(&desk).unwrap();
        prop_assert_eq!(plan.links.len(), desk.cables.len());
        for (index, link) in plan.links.iter().enumerate() {
            prop_assert!(!collides(&simulation, link), "{}", link.network());
            let others = plan.links[..index].iter();
            prop_assert!(!others.into_iter().any(|other| other.network().overlaps(&link.network())));
        }
        let mut record = Record::default();
        // A setup with a fault is run again with another one.
        for fault in &faults[..2] {
            let outcome = simulation.set_up(&mut record, *fault).0;
            let is_whole = simulation.gone.lock().unwrap().is_empty();
            simulation.come_back();
            if outcome.is_ok() && is_whole {
                assert_all_can_talk(&simulation);
                prop_assert!(Plan::new(&simulation.desk()).unwrap().is_done());
            }
        }
        simulation.undo_with(&mut record, faults[2]);
        simulation.come_back();
        prop_assert_eq!(simulation.undo(&mut record), Vec::<String>::new());
        prop_assert!(record.is_undone());
        prop_assert_eq!(sorted(simulation.states()), before);
    }
}
