//! The setups that all paths are tried on. Two are recorded; the others are composed of recorded
//! parts (README.md in `recorded`).

use super::fake::{FakeMac, FakePort};

/// Two ends, each a machine and a port, and Gbit/s.
pub type Wire = ((usize, usize), (usize, usize), u32);

/// Machines with their numbers of ports and their ports' most Gbit/s, and the cables between them
/// with their Gbit/s.
pub fn composed(machines: &[(&str, usize, u32)], cables: &[Wire]) -> Vec<FakeMac> {
    let uuid = |machine: usize, port: usize| format!("{machine:08X}-0000-4000-8000-{port:012X}");
    let mac = |(index, (name, count, most)): (usize, &(&str, usize, u32))| {
        let plug = |port: usize| {
            cables.iter().find_map(|(one, other, gbits)| {
                let there = if *one == (index, port) {
                    other
                } else if *other == (index, port) {
                    one
                } else {
                    return None;
                };
                Some((uuid(there.0, there.1), *gbits, "Mac15,14"))
            })
        };
        let ports: Vec<_> = (0..*count)
            .map(|port| FakePort { uuid: uuid(index, port), most: *most, plug: plug(port) })
            .collect();
        let chip = if *most > 40 { "Apple M3 Ultra" } else { "Apple M4" };
        FakeMac::new(name, index, chip, &ports)
    };
    machines.iter().enumerate().map(mac).collect()
}

/// Replaces a Mac's ports by a recording.
fn recorded(mut mac: FakeMac, thunderbolt: &str) -> FakeMac {
    mac.thunderbolt = thunderbolt.to_owned();
    mac
}

/// Two MacBook Pros with M5 Max, one of which still needs Recovery (recorded).
pub fn pair() -> Vec<FakeMac> {
    let ports = || -> Vec<FakePort> {
        (0..3).map(|_| FakePort { uuid: String::new(), most: 120, plug: None }).collect()
    };
    let mut local =
        recorded(FakeMac::new("book", 0, "Apple M5 Max", &ports()), include_str!("recorded/m5-local.json"));
    let mut peer =
        recorded(FakeMac::new("peer", 1, "Apple M5 Max", &ports()), include_str!("recorded/m5-peer.json"));
    for mac in [&mut local, &mut peer] {
        let names = ["en1", "en6", "en2"];
        for (port, name) in names.iter().enumerate() {
            mac.interfaces[port + 1].name = (*name).to_owned();
            mac.hardware[port + 1].1 = (*name).to_owned();
        }
        mac.members = vec!["en1".to_owned(), "en2".to_owned(), "en6".to_owned()];
        mac.devices = names.map(|name| (format!("rdma_{name}"), false)).into();
        mac.version = "27.0".to_owned();
        mac.model = "Mac17,6".to_owned();
        mac.memory_gib = 128;
    }
    local.rdma = Some("disabled".to_owned());
    local.devices.clear();
    vec![local, peer]
}

/// A MacBook Pro with M5 Max and a Mac Studio with M3 Ultra, and a disk at the Studio (recorded).
pub fn book_and_studio() -> Vec<FakeMac> {
    let ports = |count| -> Vec<FakePort> {
        (0..count).map(|_| FakePort { uuid: String::new(), most: 120, plug: None }).collect()
    };
    let mut book = recorded(
        FakeMac::new("book", 0, "Apple M5 Max", &ports(3)),
        include_str!("recorded/macbook-pro-m5.json"),
    );
    let mut studio = recorded(
        FakeMac::new("studio", 1, "Apple M3 Ultra", &ports(6)),
        include_str!("recorded/mac-studio-m3.json"),
    );
    book.devices[0].1 = true;
    studio.devices[1].1 = true;
    vec![book, studio]
}

/// All setups by name.
pub fn all() -> Vec<(&'static str, Vec<FakeMac>)> {
    let studios = |count: usize| {
        ["a", "b", "c", "d"].map(|name| (name, 6, 120)).into_iter().take(count).collect::<Vec<_>>()
    };
    vec![
        ("pair", pair()),
        ("book and studio", book_and_studio()),
        ("two cables", composed(&studios(2), &[((0, 0), (1, 1), 80), ((0, 2), (1, 3), 80)])),
        ("line", composed(&studios(3), &[((0, 0), (1, 1), 80), ((1, 2), (2, 0), 80)])),
        (
            "mesh of three",
            composed(&studios(3), &[((0, 0), (1, 1), 80), ((1, 2), (2, 0), 40), ((0, 3), (2, 4), 80)]),
        ),
        (
            // The cabling of tensorfold's fixture: ports 2, 3 and 4 of each.
            "mesh of four",
            composed(
                &studios(4),
                &[
                    ((0, 1), (3, 1), 80),
                    ((0, 2), (2, 2), 80),
                    ((0, 3), (1, 3), 80),
                    ((1, 1), (2, 1), 80),
                    ((1, 2), (3, 2), 80),
                    ((2, 3), (3, 3), 80),
                ],
            ),
        ),
        (
            "with Thunderbolt 4",
            composed(
                &[("a", 6, 120), ("mini", 3, 40), ("c", 6, 120)],
                &[((0, 0), (1, 0), 40), ((0, 1), (2, 1), 80)],
            ),
        ),
    ]
}
