//! The machine's cables, and ranks connected by them.

use std::net::Ipv4Addr;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Barrier};
use std::time::Duration;
use thunder_verbs::{Abort, Cable, Channel, ChannelOptions, Context, DeviceList, Mode, Profile};

/// A test and its name.
pub type Test = (String, Arc<dyn Fn() + Send + Sync>);

/// Longer than any successful wait on emulated CPUs.
pub const LIMIT: Duration = Duration::from_secs(20);

/// One end of a cable: a line of the file that tools/rdma-vm writes.
#[derive(Debug, Clone)]
pub struct End {
    pub rank: usize,
    pub peer: usize,
    pub device: String,
    pub ip: Ipv4Addr,
}

/// All cable ends, in the order of the cables.
pub fn ends() -> Vec<End> {
    let path = std::env::var("RDMA_LINKS").expect("RDMA_LINKS is set by tools/rdma-vm");
    let text = std::fs::read_to_string(&path).expect("the file of cables is readable");
    let end = |line: &str| {
        let words: Vec<&str> = line.split_whitespace().collect();
        End {
            rank: words[0].parse().expect("a rank"),
            peer: words[1].parse().expect("a rank"),
            device: words[3].to_string(),
            ip: words[4].parse().expect("an address"),
        }
    };
    text.lines().map(end).collect()
}

pub fn open(name: &str, profile: Profile) -> Arc<Context> {
    DeviceList::get().expect("the library is there").open(name, profile).expect("the device opens")
}

/// The first `count` cables from `rank` to `peer`.
pub fn cables(rank: usize, peer: usize, count: usize, profile: Profile) -> Vec<Cable> {
    let found: Vec<Cable> = ends()
        .into_iter()
        .filter(|end| (end.rank, end.peer) == (rank, peer))
        .take(count)
        .map(|end| Cable { context: open(&end.device, profile), local_address: Some(end.ip) })
        .collect();
    assert_eq!(found.len(), count, "cables from {rank} to {peer}");
    found
}

/// The two ends of a channel between ranks 0 and 1 over `count` cables.
pub fn channel_pair(options: ChannelOptions, count: usize, profile: Profile, abort: &Abort) -> [Channel; 2] {
    let (mut a, mut b) = UnixStream::pair().expect("a socket pair");
    let abort_1 = abort.clone();
    let rank_1 = std::thread::spawn(move || {
        let prepared = Channel::prepare(&cables(1, 0, count, profile), options).expect("rank 1 prepares");
        prepared.handshake(&mut b, abort_1).expect("rank 1 connects")
    });
    let prepared = Channel::prepare(&cables(0, 1, count, profile), options).expect("rank 0 prepares");
    let rank_0 = prepared.handshake(&mut a, abort.clone()).expect("rank 0 connects");
    [rank_0, rank_1.join().expect("rank 1 did not panic")]
}

/// Runs `body` for both ends of a channel, each on a thread.
pub fn both(channels: [Channel; 2], body: impl Fn(usize, &mut Channel) + Sync) {
    let done = Barrier::new(2);
    std::thread::scope(|scope| {
        for (rank, mut channel) in channels.into_iter().enumerate() {
            let (body, done) = (&body, &done);
            scope.spawn(move || {
                body(rank, &mut channel);
                channel.drain(LIMIT).expect("the last frames are sent");
                done.wait();
            });
        }
    });
}

/// The modes that Linux devices support.
pub const MODES: [Mode; 3] = [Mode::Uc, Mode::Rc, Mode::RcWrite];
