//! Channels deliver all bytes, in order.

use crate::world::*;
use std::os::unix::net::UnixStream;
use std::process::Command;
use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};
use thunder_testing::Random;
use thunder_testing::allocations::of_this_thread;
use thunder_verbs::{Abort, Cable, Channel, ChannelOptions, Mode, Profile};

pub fn tests() -> Vec<Test> {
    let mut tests: Vec<Test> = Vec::new();
    for mode in MODES {
        tests.push((format!("ping_pong_{mode:?}"), Arc::new(move || ping_pong(mode, Profile::LINUX))));
        for (cables, over) in [(1, "one_cable"), (2, "two_cables")] {
            let name = format!("odd_sizes_over_{over}_{mode:?}");
            tests.push((name, Arc::new(move || odd_sizes(mode, cables, Profile::LINUX))));
        }
        for ranks in [3, 4] {
            let name = format!("full_mesh_of_{ranks}_ranks_{mode:?}");
            tests.push((name, Arc::new(move || full_mesh(mode, ranks))));
        }
    }
    tests.push(("ping_pong_with_apples_rules".into(), Arc::new(|| ping_pong(Mode::Uc, Profile::APPLE))));
    for (cables, over) in [(1, "one_cable"), (2, "two_cables")] {
        let name = format!("odd_sizes_over_{over}_with_apples_rules");
        tests.push((name, Arc::new(move || odd_sizes(Mode::Uc, cables, Profile::APPLE))));
    }
    tests.push(("both_ends_choose_addresses_in_their_common_network".into(), Arc::new(common_network)));
    tests.push(("none_of_100000_messages_is_lost_over_uc".into(), Arc::new(a_hundred_thousand)));
    tests.push(("short_and_long_writes_stay_in_order".into(), Arc::new(mixed_lanes)));
    tests
}

/// Sends 64 bytes back and forth. A running channel must not allocate.
fn ping_pong(mode: Mode, profile: Profile) {
    const WARM_UP: u32 = 50;
    const ROUNDS: u32 = 300;
    let channels = channel_pair(ChannelOptions::new(mode), 1, profile, &Abort::new());
    both(channels, |rank, channel| {
        let mut ball = Random::new(1).bytes(64);
        let (mut started, mut allocated) = (Instant::now(), 0);
        for round in 0..WARM_UP + ROUNDS {
            if round == WARM_UP {
                (started, allocated) = (Instant::now(), of_this_thread());
            }
            if rank == 0 {
                channel.send_all(&ball, LIMIT).unwrap();
                ball.fill(0);
                channel.recv_exact(&mut ball, LIMIT).unwrap();
            } else {
                channel.recv_exact(&mut ball, LIMIT).unwrap();
                channel.send_all(&ball, LIMIT).unwrap();
            }
        }
        let took = started.elapsed();
        assert_eq!(of_this_thread() - allocated, 0, "allocations while running");
        assert_eq!(ball, Random::new(1).bytes(64));
        if rank == 0 {
            println!("{mode:?}: {:?} per round trip of 64 bytes", took / ROUNDS);
        }
    });
}

/// Sizes from one byte to 16 MiB, around every boundary of slots and frames, in both directions at
/// once.
fn odd_sizes(mode: Mode, cables: usize, profile: Profile) {
    let options = ChannelOptions::new(mode);
    let payload = options.long_slot_bytes - 40;
    let sizes = [1, 2, 3, 63, 64, 65, 1000, 4055, 4056, 4057, 4096, 8191, payload - 1, payload, payload + 1]
        .into_iter()
        .chain([65_536, 100_003, (1 << 20) - 1, (1 << 20) + 7, 1 << 24]);
    let sizes: Vec<usize> = sizes.collect();
    let channels = channel_pair(options, cables, profile, &Abort::new());
    both(channels, |rank, channel| {
        for (round, size) in sizes.iter().enumerate() {
            let seed = |rank: usize| (round * 2 + rank + 1) as u64;
            let out = Random::new(seed(rank)).bytes(*size);
            let mut into = vec![0; *size];
            let started = Instant::now();
            channel.transfer(&out, &mut into, LIMIT).unwrap();
            let took = started.elapsed();
            assert!(into == Random::new(seed(1 - rank)).bytes(*size), "{size} bytes differ");
            if rank == 0 && *size == 1 << 24 {
                let mb_each_way = *size as f64 / took.as_secs_f64() / 1e6;
                println!("{mode:?}, {cables} cable(s): {mb_each_way:.0} MB/s each way");
            }
        }
    });
}

/// Each end has an additional address, as from a VLAN, in a network that the peer is not in.
fn common_network() {
    let ends: Vec<End> = [(0, 1), (1, 0)]
        .map(|(rank, peer)| ends().into_iter().find(|end| (end.rank, end.peer) == (rank, peer)).unwrap())
        .into();
    let ip = |verb: &str| {
        for (end, address) in ends.iter().zip(["10.1.1.1/24", "172.16.1.2/24"]) {
            let interface = end.device.strip_prefix("rdma_").expect("named after its interface");
            let status = Command::new("ip").args(["address", verb, address, "dev", interface]).status();
            assert!(status.unwrap().success(), "ip address {verb} {address} dev {interface}");
        }
    };
    ip("add");
    let (mut a, mut b) = UnixStream::pair().unwrap();
    let [mut cables_0, mut cables_1] = [(0, 1), (1, 0)].map(|(rank, peer)| {
        let mut cables = cables(rank, peer, 1, Profile::LINUX);
        cables[0].local_address = None;
        cables
    });
    // The kernel gives new addresses to the device after some time.
    let started = Instant::now();
    while [&cables_0, &cables_1].iter().any(|cables| cables[0].context.addresses().unwrap().len() < 2) {
        assert!(started.elapsed() < LIMIT, "the device does not get its new address");
        std::thread::sleep(Duration::from_millis(5));
    }
    std::thread::scope(|scope| {
        scope.spawn(|| Cable::find_addresses(&mut cables_1, &mut b).unwrap());
        Cable::find_addresses(&mut cables_0, &mut a).unwrap();
    });
    let addresses = [cables_0[0].local_address, cables_1[0].local_address];
    assert_eq!(addresses, [Some(ends[0].ip), Some(ends[1].ip)]);
    ip("del");

    // An end that lists a different number of cables gets an error.
    let (mut a, mut b) = UnixStream::pair().unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| drop(Cable::find_addresses(&mut cables_1, &mut b)));
        let mut two = [cables_0.clone(), cables_0.clone()].concat();
        let error = Cable::find_addresses(&mut two, &mut a).unwrap_err();
        assert!(error.to_string().contains("cables here 2, there 1"), "{error}");
    });
}

/// Every rank exchanges messages with all others at once, in several sizes.
fn full_mesh(mode: Mode, ranks: usize) {
    let mut sockets: Vec<Vec<(usize, UnixStream)>> = (0..ranks).map(|_| Vec::new()).collect();
    for (a, b) in (0..ranks).flat_map(|a| (a + 1..ranks).map(move |b| (a, b))) {
        let (to_b, to_a) = UnixStream::pair().unwrap();
        sockets[a].push((b, to_b));
        sockets[b].push((a, to_a));
    }
    let done = Barrier::new(ranks);
    std::thread::scope(|scope| {
        for (rank, sockets) in sockets.into_iter().enumerate() {
            let done = &done;
            scope.spawn(move || {
                let mut channels: Vec<(usize, Channel)> = Vec::new();
                for (peer, mut socket) in sockets {
                    let options = ChannelOptions::new(mode);
                    let prepared = Channel::prepare(&cables(rank, peer, 1, Profile::LINUX), options).unwrap();
                    channels.push((peer, prepared.handshake(&mut socket, Abort::new()).unwrap()));
                }
                for size in [1, 777, 4057, 70_001, 300_000] {
                    exchange_with_all(rank, &mut channels, size);
                }
                for (_, channel) in &mut channels {
                    channel.drain(LIMIT).unwrap();
                }
                done.wait();
            });
        }
    });
}

fn exchange_with_all(rank: usize, channels: &mut [(usize, Channel)], size: usize) {
    let seed = |from: usize, to: usize| (1 + from * 16 + to) as u64;
    let mut work: Vec<(Vec<u8>, usize, Vec<u8>, usize)> = channels
        .iter()
        .map(|(peer, _)| (Random::new(seed(rank, *peer)).bytes(size), 0, vec![0; size], 0))
        .collect();
    let started = Instant::now();
    while work.iter().any(|(out, sent, into, got)| *sent < out.len() || *got < into.len()) {
        for ((_, channel), (out, sent, into, got)) in channels.iter_mut().zip(&mut work) {
            *sent += channel.send(&out[*sent..]).unwrap();
            *got += channel.try_recv(&mut into[*got..]).unwrap();
        }
        std::thread::yield_now();
        assert!(started.elapsed() < LIMIT, "rank {rank} makes no progress at {size} bytes");
    }
    for ((peer, _), (_, _, into, _)) in channels.iter().zip(&work) {
        assert!(
            *into == Random::new(seed(*peer, rank)).bytes(size),
            "{size} bytes from {peer} to {rank} differ"
        );
    }
}

/// The peer reads with pauses. In this case, JACCL's sends find no posted receive and are lost.
fn a_hundred_thousand() {
    const MESSAGES: u32 = 100_000;
    let options = ChannelOptions { long_slot_bytes: 0, ..ChannelOptions::new(Mode::Uc) };
    let channels = channel_pair(options, 1, Profile::APPLE, &Abort::new());
    let started = Instant::now();
    both(channels, |rank, channel| {
        let mut message = [0; 48];
        for number in 0..MESSAGES {
            if rank == 0 {
                message[..4].copy_from_slice(&number.to_le_bytes());
                channel.send_all(&message, LIMIT).unwrap();
                continue;
            }
            if number % 10_000 == 9_999 {
                std::thread::sleep(Duration::from_millis(30));
            }
            channel.recv_exact(&mut message, LIMIT).unwrap();
            assert_eq!(message[..4], number.to_le_bytes(), "message {number}");
        }
    });
    println!("{MESSAGES} messages over UC, none lost, {:?} each", started.elapsed() / MESSAGES);
}

/// Alternates short and long writes, and reads them in one call.
fn mixed_lanes() {
    for mode in MODES {
        let whole = Random::new(5).bytes(600_000);
        let channels = channel_pair(ChannelOptions::new(mode), 2, Profile::LINUX, &Abort::new());
        both(channels, |rank, channel| {
            if rank == 1 {
                let mut into = vec![0; whole.len()];
                channel.recv_exact(&mut into, LIMIT).unwrap();
                assert!(into == whole, "{mode:?}: the stream is out of order");
                return;
            }
            let mut rest = &whole[..];
            for size in [5, 50_000, 17, 4056, 9_000, 1].into_iter().cycle() {
                // In two parts, like a header and its body.
                let (now, later) = rest.split_at(size.min(rest.len()));
                let (first, second) = now.split_at(now.len() / 3);
                let sent = channel.send_parts(first, second).unwrap();
                channel.send_all(&now[sent..], LIMIT).unwrap();
                rest = later;
                if rest.is_empty() {
                    break;
                }
            }
        });
    }
}
