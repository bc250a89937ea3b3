//! The setups that all paths are tried on: recorded, or composed of recorded parts (README.md in
//! `recorded` says which). The tests of `thunder` include this file too.

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
        // 107.52 GiB, as users of such Macs report.
        mac.working_set = Some(115_448_725_504);
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

/// Gives a Mac the hardware ports of a recording; its ports get their interfaces from there.
fn with_hardware_ports(mut mac: FakeMac, recording: &str) -> FakeMac {
    let names: Vec<&str> =
        recording.lines().filter_map(|line| line.strip_prefix("Hardware Port: ")).collect();
    let devices: Vec<&str> = recording.lines().filter_map(|line| line.strip_prefix("Device: ")).collect();
    let ports = mac.interfaces.len() - 1;
    for number in 1..=ports {
        let place = names.iter().position(|name| *name == format!("Thunderbolt {number}")).unwrap();
        mac.interfaces[number].name = devices[place].to_owned();
    }
    mac.members = mac.interfaces[1..].iter().map(|interface| interface.name.clone()).collect();
    mac.members.sort();
    mac.hardware =
        names.into_iter().zip(devices).map(|(name, device)| (name.to_owned(), device.to_owned())).collect();
    mac
}

/// A Mac Studio and a MacBook Air with Thunderbolt 4 and a display at the Studio (recorded). RDMA
/// is on without any device, as users of such Macs report.
fn thunderbolt_4() -> Vec<FakeMac> {
    let ports = |count| -> Vec<FakePort> {
        (0..count).map(|_| FakePort { uuid: String::new(), most: 40, plug: None }).collect()
    };
    let studio = FakeMac::new("studio", 0, "Apple M1 Max", &ports(6));
    let air = FakeMac::new("air", 1, "Apple M2", &ports(2));
    let mut studio = with_hardware_ports(
        recorded(studio, include_str!("recorded/mac-studio-tb4.json")),
        include_str!("recorded/mac-studio.hardware-ports.txt"),
    );
    let mut air = with_hardware_ports(
        recorded(air, include_str!("recorded/macbook-air-tb4.json")),
        include_str!("recorded/macbook-air.hardware-ports.txt"),
    );
    for (mac, model, gib) in [(&mut studio, "Mac13,1", 64), (&mut air, "Mac14,2", 24)] {
        mac.rdma = Some("enabled".to_owned());
        (mac.model, mac.memory_gib) = (model.to_owned(), gib);
    }
    studio.interfaces[3].active = true;
    air.interfaces[1].active = true;
    vec![studio, air]
}

/// The cables of the recorded mesh of three.
const THREE: [Wire; 3] = [((0, 1), (1, 2), 80), ((0, 2), (2, 2), 80), ((1, 1), (2, 1), 80)];

/// A Mac Studio and two Mac minis as their owner has set them up by hand: addresses of /24, with
/// the interfaces still in the bridge (recorded).
fn by_hand() -> Vec<FakeMac> {
    let mut macs = composed(&[("vader", 6, 120), ("voldemort", 3, 120), ("gargamel", 3, 120)], &THREE);
    for mac in &mut macs {
        mac.version = "26.4".to_owned();
    }
    macs[0].memory_gib = 256;
    for (mac, gib) in [(1, 64), (2, 48)] {
        macs[mac].chip = "Apple M4 Pro".to_owned();
        (macs[mac].model, macs[mac].memory_gib) = ("Mac16,11".to_owned(), gib);
    }
    for (mac, interface, address) in [
        (0, "en3", "10.0.1.1/24"),
        (1, "en4", "10.0.1.2/24"),
        (0, "en4", "10.0.2.1/24"),
        (2, "en4", "10.0.2.2/24"),
        (1, "en3", "10.0.3.1/24"),
        (2, "en3", "10.0.3.2/24"),
    ] {
        let found = macs[mac].interfaces.iter_mut().find(|known| known.name == interface).unwrap();
        found.addresses.push(address.parse().unwrap());
    }
    macs
}

/// The cables behind the host file of Apple's session.
const FOUR: [Wire; 6] = [
    ((0, 3), (1, 3), 80),
    ((0, 2), (2, 3), 80),
    ((0, 1), (3, 3), 80),
    ((1, 2), (2, 2), 80),
    ((1, 1), (3, 2), 80),
    ((2, 1), (3, 1), 80),
];

/// Four Mac Studios, cabled as in the host file of Apple's session, without a bridge as the owner
/// of four such Macs reports (recorded).
fn session() -> Vec<FakeMac> {
    let mut macs =
        composed(&["m3-ultra-0", "m3-ultra-1", "m3-ultra-2", "m3-ultra-3"].map(|name| (name, 6, 120)), &FOUR);
    for mac in &mut macs {
        (mac.version, mac.memory_gib) = ("26.4.1".to_owned(), 256);
        mac.members.clear();
    }
    macs
}

/// A Mac Studio that takes an address from the Internet Sharing of a MacBook Pro over their cable,
/// which is in the MacBook's bridge; both have Tailscale (recorded).
fn sharing() -> Vec<FakeMac> {
    let mut macs = composed(&[("studio", 6, 120), ("book", 3, 120)], &[((0, 5), (1, 1), 80)]);
    let mut book = with_hardware_ports(macs.remove(1), include_str!("recorded/m5.hardware-ports.txt"));
    let studio = &mut macs[0];
    book.chip = "Apple M5 Max".to_owned();
    book.devices = ["en1", "en6", "en2"].map(|name| (format!("rdma_{name}"), name == "en6")).into();
    studio.members.clear();
    for (mac, interface, address) in
        [(&mut *studio, "en7", "198.51.100.7/24"), (&mut book, "en6", "169.254.91.3/16")]
    {
        let found = mac.interfaces.iter_mut().find(|known| known.name == interface).unwrap();
        found.addresses.push(address.parse().unwrap());
    }
    let routes = ["100.64.0.0/10", "169.254.0.0/16", "192.0.2.0/24", "198.51.100.0/24"];
    for mac in [studio, &mut book] {
        mac.routes.extend(routes.map(|route| route.parse::<crate::network::Network>().unwrap()));
    }
    macs.push(book);
    macs
}

/// A MacBook Pro between two Mac minis, with Thunderbolt 5 at all ports and 40 Gbit/s over both
/// cables: the first mini and the MacBook are recorded, with their addresses on the bridge.
fn line_of_three() -> Vec<FakeMac> {
    // The second mini: port 2 is the other end of the MacBook's port 3.
    let uuid = |port: usize| match port {
        1 => "E4CCB4B9-724D-4728-ADE2-F356148F8F79".to_owned(),
        _ => format!("00000000-0000-4000-8000-{port:012X}"),
    };
    let plug =
        |port: usize| (port == 1).then(|| ("9EFBA377-528E-4A87-B974-913EE77BCB9A".to_owned(), 40, "Mac17,6"));
    let port = |port: usize| FakePort { uuid: uuid(port), most: 120, plug: plug(port) };
    let ports: Vec<FakePort> = (0..3).map(port).collect();
    let mut macs = vec![
        recorded(FakeMac::new("mini-a", 0, "Apple M4 Pro", &ports), include_str!("recorded/line-mini.json")),
        recorded(FakeMac::new("book", 1, "Apple M5 Max", &ports), include_str!("recorded/line-book.json")),
        FakeMac::new("mini-b", 2, "Apple M4 Pro", &ports),
    ];
    for (index, mac) in macs.iter_mut().enumerate() {
        mac.version = "27.0".to_owned();
        (mac.model, mac.memory_gib) =
            if index == 1 { ("Mac17,6".to_owned(), 128) } else { ("Mac16,11".to_owned(), 48) };
        // The bridge's own network.
        mac.routes.push("10.42.0.0/24".parse().unwrap());
    }
    let both = &mut macs[1];
    both.interfaces[3].active = true;
    both.devices[2].1 = true;
    macs
}

/// The cables of two Mac Studios: ports 2 and 4 of both, straight.
const STRAIGHT: [Wire; 2] = [((0, 1), (1, 1), 80), ((0, 3), (1, 3), 80)];

/// Two Mac Studios with two cables, on Wi-Fi, as their owner sets them up by hand after each start:
/// both interfaces out of the bridge, a /30 for each cable (recorded).
fn two_studios() -> Vec<FakeMac> {
    let mut macs = composed(&[("hwStudio1.local", 6, 120), ("hwStudio2.local", 6, 120)], &STRAIGHT);
    for (index, mac) in macs.iter_mut().enumerate() {
        mac.members.retain(|member| !["en3", "en5"].contains(&member.as_str()));
        for (interface, cable) in [("en3", 0), ("en5", 1)] {
            let found = mac.interfaces.iter_mut().find(|known| known.name == interface).unwrap();
            found.addresses.push(format!("10.10.{cable}.{}/30", index + 1).parse().unwrap());
        }
        // Ethernet is not plugged in; Wi-Fi is en1.
        let mut wifi = mac.interfaces[0].clone();
        (mac.interfaces[0].active, mac.interfaces[0].addresses) = (false, Vec::new());
        wifi.name = "en1".to_owned();
        wifi.mac = format!("82:00:00:01:{index:02x}:01");
        wifi.addresses = vec![format!("192.168.0.{}/24", 105 + 2 * index).parse().unwrap()];
        mac.interfaces.push(wifi);
        mac.hardware.push(("Wi-Fi".to_owned(), "en1".to_owned()));
        mac.routes = vec!["192.168.0.0/24".parse().unwrap()];
    }
    macs
}

/// All setups by name, each with its cables as they are plugged in.
pub fn wired() -> Vec<(&'static str, Vec<FakeMac>, Vec<Wire>)> {
    let studios = |count: usize| {
        ["a", "b", "c", "d"].map(|name| (name, 6, 120)).into_iter().take(count).collect::<Vec<_>>()
    };
    let mut all = vec![
        ("pair", pair(), vec![((0, 1), (1, 1), 80)]),
        ("book and studio", book_and_studio(), vec![((0, 0), (1, 1), 80)]),
    ];
    let mut compose = |name, machines: &[(&str, usize, u32)], wires: &[Wire]| {
        all.push((name, composed(machines, wires), wires.to_vec()));
    };
    compose("two cables", &studios(2), &[((0, 0), (1, 1), 80), ((0, 2), (1, 3), 80)]);
    compose("line", &studios(3), &[((0, 0), (1, 1), 80), ((1, 2), (2, 0), 80)]);
    compose(
        "mesh of three",
        &studios(3),
        &[((0, 0), (1, 1), 80), ((1, 2), (2, 0), 40), ((0, 3), (2, 4), 80)],
    );
    // The cabling of tensorfold's fixture: ports 2, 3 and 4 of each.
    compose(
        "mesh of four",
        &studios(4),
        &[
            ((0, 1), (3, 1), 80),
            ((0, 2), (2, 2), 80),
            ((0, 3), (1, 3), 80),
            ((1, 1), (2, 1), 80),
            ((1, 2), (3, 2), 80),
            ((2, 3), (3, 3), 80),
        ],
    );
    compose(
        "with Thunderbolt 4",
        &[("a", 6, 120), ("mini", 3, 40), ("c", 6, 120)],
        &[((0, 0), (1, 0), 40), ((0, 1), (2, 1), 80)],
    );
    // The crossing that exo's pull request 2160 was made for.
    compose("crossed cables", &studios(2), &[((0, 4), (1, 5), 80), ((0, 5), (1, 4), 80)]);
    all.push(("Thunderbolt 4", thunderbolt_4(), vec![((0, 2), (1, 0), 40)]));
    all.push(("set up by hand", by_hand(), THREE.to_vec()));
    all.push(("Apple's session", session(), FOUR.to_vec()));
    all.push(("line around a MacBook", line_of_three(), vec![((0, 1), (1, 1), 40), ((1, 2), (2, 1), 40)]));
    all.push(("two Studios", two_studios(), STRAIGHT.to_vec()));
    all.push(("Internet Sharing", sharing(), vec![((0, 5), (1, 1), 80)]));
    all
}

/// All setups by name.
pub fn all() -> Vec<(&'static str, Vec<FakeMac>)> {
    wired().into_iter().map(|(name, macs, _)| (name, macs)).collect()
}
