//! Random desks on random networks.

use proptest::prelude::*;

use super::fake::{FakeInterface, FakeMac};
use super::faults::assert_all_can_talk;
use super::setups::composed;
use super::simulation::{Fault, Simulation};
use crate::network::Network;
use crate::plan::Plan;
use crate::record::Record;

const NAMES: [&str; 5] = ["a", "b", "c", "d", "e"];

/// Cables between free ports, by pairs of machines; what has no free port is left out.
fn cabled(count: usize, pairs: &[(usize, usize, bool)]) -> Vec<FakeMac> {
    let mut next = [0; NAMES.len()];
    let mut cables = Vec::new();
    for (one, other, fast) in pairs {
        let (one, other) = (one % count, other % count);
        if one != other && next[one] < 6 && next[other] < 6 {
            cables.push(((one, next[one]), (other, next[other]), if *fast { 80 } else { 40 }));
            next[one] += 1;
            next[other] += 1;
        }
    }
    composed(&NAMES.map(|name| (name, 6, 120))[..count], &cables)
}

/// Private networks of all lengths, most where setups look first.
fn network() -> impl Strategy<Value = Network> {
    let near = (0u32..4096, 16u8..=32).prop_map(|(low, prefix)| (0x0a54_4000 + low * 16, prefix));
    let ten = (any::<u32>(), 8u8..=32).prop_map(|(low, prefix)| (0x0a00_0000 | (low & 0x00ff_ffff), prefix));
    let home = (any::<u16>(), 16u8..=30).prop_map(|(low, prefix)| (0xc0a8_0000 | u32::from(low), prefix));
    prop_oneof![near, ten, home].prop_map(|(address, prefix)| Network::new(address.into(), prefix).unwrap())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, ..ProptestConfig::default() })]

    #[test]
    fn no_network_collides_all_cables_work_and_undo_is_exact(
        count in 2usize..=5,
        pairs in prop::collection::vec((0usize..5, 0usize..5, any::<bool>()), 1..10),
        routes in prop::collection::vec((0usize..5, network()), 0..12),
        lans in prop::collection::vec((0usize..5, network()), 0..6),
        fault in prop::option::of((0usize..60, 0u8..3)),
    ) {
        let mut macs = cabled(count, &pairs);
        for (mac, route) in routes {
            macs[mac % count].routes.push(route.base());
        }
        for (index, (mac, address)) in lans.into_iter().enumerate() {
            let name = format!("en{}", 20 + index);
            let mac_address = format!("82:00:00:01:00:{index:02x}");
            let lan = FakeInterface { name, mac: mac_address, up: true, active: true, mtu: 1500, addresses: vec![address] };
            macs[mac % count].interfaces.push(lan);
        }
        let before = macs.clone();
        let simulation = Simulation::new(macs);
        let desk = simulation.desk();
        prop_assume!(!desk.cables.is_empty());
        let used: Vec<Network> = desk.machines.iter().flat_map(|machine| machine.used_networks()).collect();
        let plan = Plan::new(&desk).unwrap();
        for (index, link) in plan.links.iter().enumerate() {
            prop_assert!(!used.iter().any(|used| used.overlaps(&link.network())), "{}", link.network());
            let others = plan.links[..index].iter();
            prop_assert!(!others.into_iter().any(|other| other.network().overlaps(&link.network())));
        }
        let fault = fault.map(|(at, kind)| match kind {
            0 => Fault::LostBefore(at),
            1 => Fault::LostAfter(at),
            _ => Fault::Fails(at),
        });
        let mut record = Record::default();
        if simulation.set_up(&mut record, fault).0.is_ok() {
            assert_all_can_talk(&simulation);
            prop_assert!(Plan::new(&simulation.desk()).unwrap().is_done());
        }
        prop_assert_eq!(simulation.undo(&mut record), Vec::<String>::new());
        prop_assert_eq!(simulation.states(), before);
    }
}
