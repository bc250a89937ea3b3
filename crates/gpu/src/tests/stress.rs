//! Exchanges while peers are killed, stopped and delayed at random. Each exchange ends as a correct
//! sum, with an error that names the lost rank, or poisoned; the device works afterwards.
//!
//! A long run, also on a real GPU: `THUNDER_LONG=1 THUNDER_TEST_GPU=0 cargo nextest run --release
//! -p thunder-gpu --no-capture peers_are_killed`; relayed exchanges need two GPUs.
//! `THUNDER_STRESS_SEED` repeats a run.
//! `THUNDER_STRESS_GROUP` is the number of exchanges after which a group ends whole: with 300000,
//! most of the time is spent on exchanges, with the default on beginnings and ends.

use std::net::{Ipv4Addr, TcpListener};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use thunder_collectives::{Config, Group, Op, TransportChoice, local};
use thunder_compute::{Activations, ComputeError, Device as _};
use thunder_testing::{Random, is_long};

use super::{device, devices};
use crate::buffer::stride;
use crate::mailbox::Mailbox;
use crate::sums::Sums;
use crate::{Found, GpuBackend, GpuConfig, Mailboxes};

/// Makes a process a peer: coordinator, rank, ranks, seed, and whether its own GPU sums.
const PEER: &str = "THUNDER_STRESS_PEER";

/// How long the device waits for an answer: short enough to give up when peers are stopped.
const PATIENCE: Duration = Duration::from_millis(300);

const SHAPES: [[usize; 2]; 4] = [[1, 32], [1, 1024], [3, 40], [1, 4096]];

/// Maximum exchanges of a submission.
const OF_SUBMISSION: u64 = 32;

/// Approximate time of an exchange on a real GPU, to time the disturbance of a peer.
const EXCHANGE: Duration = Duration::from_micros(40);

/// A number from the environment.
fn setting<T: std::str::FromStr>(name: &str) -> Option<T> {
    std::env::var(name).ok().and_then(|text| text.parse().ok())
}

fn config(rank: usize, size: usize, coordinator: &str) -> Config {
    let mut config = Config::new(rank, size, coordinator);
    config.stall_limit = Duration::from_secs(2);
    config
}

/// A rank's part of exchange `number`: whole numbers, so that sums are exact.
fn part(rank: usize, number: u32, index: usize) -> f32 {
    ((number as usize * 31 + index * 7 + rank * 13) % 1021) as f32
}

/// The process of a peer; does nothing in a usual run of the tests.
#[test]
#[ignore = "the work of processes that another test starts"]
fn peer() {
    let Ok(text) = std::env::var(PEER) else { return };
    let words: Vec<&str> = text.split(' ').collect();
    let [rank, size, seed] = [1, 2, 3].map(|index: usize| words[index].parse::<usize>().unwrap());
    let mut group = Group::init(config(rank, size, words[0])).unwrap();
    let mut random = Random::new(seed as u64);
    if words[4] == "true" {
        let devices = devices("peer", size).unwrap();
        let mut backend = relaying(&devices[rank], group);
        // Rank 0 leaves, or gives up.
        let _ = exchange(&mut backend, (rank, size), usize::MAX, &mut 0, Some(&mut random));
        return;
    }
    for number in 0u32.. {
        let [rows, width] = SHAPES[number as usize % SHAPES.len()];
        delay(&mut random);
        let mut values: Vec<f32> = (0..rows * width).map(|index| part(rank, number, index)).collect();
        // Rank 0 leaves, or gives up.
        if group.all_reduce(&mut values, Op::Sum).is_err() {
            return;
        }
    }
}

/// Seldom a long delay, sometimes a short one.
fn delay(random: &mut Random) {
    match random.below(if is_long() { 3000 } else { 60 }) {
        0 => std::thread::sleep(Duration::from_millis(random.below(30))),
        1..=3 => std::thread::sleep(Duration::from_micros(random.below(500))),
        _ => {}
    }
}

/// Processes that are killed on drop.
struct Peers(Vec<Child>);

impl Peers {
    /// `relays`: each has a GPU of its own.
    fn start(coordinator: &str, size: usize, seed: u64, relays: bool) -> Self {
        let peer = |rank: usize| {
            Command::new(std::env::current_exe().unwrap())
                .args(["--exact", "tests::stress::peer", "--ignored", "--nocapture"])
                .env(
                    PEER,
                    format!("{coordinator} {rank} {size} {} {relays}", seed.wrapping_add(rank as u64) >> 1),
                )
                .stdout(Stdio::null())
                .stderr(Stdio::null())
                .spawn()
                .unwrap()
        };
        Self((1..size).map(peer).collect())
    }

    fn signal(&self, peer: usize, signal: &str) {
        let process = self.0[peer].id().to_string();
        assert!(Command::new("kill").args([signal, &process]).status().unwrap().success());
    }
}

impl Drop for Peers {
    fn drop(&mut self) {
        for child in &mut self.0 {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// The disturbance of a peer.
#[derive(Debug, Clone, Copy)]
enum Harm {
    None,
    Kill,
    Stop(Duration),
}

/// Results of rounds.
#[derive(Debug, Default)]
struct Tally {
    exchanges: usize,
    whole: usize,
    lost: usize,
    poisoned: usize,
}

impl Tally {
    /// Counts the outcome of a group.
    fn note(&mut self, harm: Harm, done: usize, outcome: Result<(), ComputeError>) {
        self.exchanges += done;
        match outcome {
            Ok(()) => self.whole += 1,
            Err(ComputeError::Comm(_)) => self.lost += 1,
            Err(error) => {
                assert!(error.to_string().contains("did not come back to it in time"), "{harm:?}: {error}");
                self.poisoned += 1;
            }
        }
    }
}

/// Exchanges of one group, until `count` of them are done or one fails. `late`: this rank is late
/// at random.
fn exchange(
    backend: &mut GpuBackend,
    (rank, size): (usize, usize),
    count: usize,
    done: &mut usize,
    mut late: Option<&mut Random>,
) -> Result<(), ComputeError> {
    let mut random = Random::new(count as u64);
    let (mut words, mut found) = (Vec::new(), Vec::new());
    let most: usize = SHAPES.iter().map(|[rows, width]| rows * stride(*width)).max().unwrap_or(0);
    let results = backend.device.memory(4 * most * OF_SUBMISSION as usize, "results of exchanges")?;
    let mut number = 0u32;
    while *done < count {
        late.iter_mut().for_each(|random| delay(random));
        // Several exchanges in a submission, each with its own rows.
        let of_submission = 1 + random.below(OF_SUBMISSION) as usize;
        let mut sums = Vec::new();
        for _ in 0..of_submission {
            let [rows, width] = SHAPES[number as usize % SHAPES.len()];
            let stride = stride(width);
            words.clear();
            words.resize(rows * stride, 0u32);
            for row in 0..rows {
                for column in 0..width {
                    words[row * stride + column] = part(rank, number, row * width + column).to_bits();
                }
            }
            let x = backend.spare(rows, width)?;
            backend.device.upload(&x.memory, 0, &words)?;
            sums.push((x, rows, number));
            number += 1;
        }
        for (x, rows, _) in &mut sums {
            x.shape(*rows)?;
            let all = 0..*rows;
            backend.sum_rows(x, all)?;
        }
        let mut end = 0;
        for (x, rows, _) in &sums {
            backend.device.copy((&x.memory, 0), (&results, end), *rows * x.stride())?;
            end += *rows * x.stride();
        }
        backend.read_words(&results, 0..end, &mut found)?;
        let mut rest = &found[..];
        for (x, rows, number) in sums {
            let (mine, others) = rest.split_at(rows * x.stride());
            rest = others;
            for (row, words) in mine.chunks_exact(x.stride()).enumerate() {
                for (column, word) in words[..x.width].iter().enumerate() {
                    let index = row * x.width + column;
                    let expected: f32 = (0..size).map(|rank| part(rank, number, index)).sum();
                    assert_eq!(f32::from_bits(*word), expected, "exchange {number}, number {index}");
                }
            }
            backend.spares.push(x);
            *done += 1;
        }
    }
    Ok(())
}

/// A mailbox that has passed its proof on this device, and gives up early.
fn proved(backend: &mut GpuBackend, is_real: bool) -> Mailbox {
    let mut mailbox = Mailbox::proved(&mut backend.device, is_real).unwrap().unwrap();
    let usual = crate::mailbox::patience(is_real).as_secs_f64();
    mailbox.looks = match is_real {
        true => (f64::from(mailbox.looks) * PATIENCE.as_secs_f64() / usual) as u32,
        // Out of about ten seconds.
        false => mailbox.looks / 20,
    };
    mailbox
}

fn round(backend: &mut GpuBackend, is_real: bool, random: &mut Random, tally: &mut Tally) {
    let listener = Arc::new(TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap());
    let coordinator = listener.local_addr().unwrap().to_string();
    let size = 2 + random.below(2) as usize;
    let peers = Peers::start(&coordinator, size, random.bits(), false);
    let mut own = config(0, size, &coordinator);
    own.listener = Some(listener);
    backend.sums = Sums::new(Group::init(own).unwrap());
    backend.sums.mailbox = Some(proved(backend, is_real));
    let count = match (is_long(), is_real) {
        (true, true) => setting("THUNDER_STRESS_GROUP").unwrap_or(20_000),
        (true, false) => 2_000,
        (false, _) => 60,
    };
    let mut done = 0;
    let (harm, outcome) =
        harmed(&peers, random, count, || exchange(backend, (0, size), count, &mut done, None));
    tally.note(harm, done, outcome);
}

/// Does something with exchanges while a random peer is disturbed. It ends in bounded time.
fn harmed<T>(peers: &Peers, random: &mut Random, count: usize, work: impl FnOnce() -> T) -> (Harm, T) {
    let harm = match random.below(4) {
        0 => Harm::None,
        1 => Harm::Kill,
        _ => Harm::Stop(Duration::from_millis(random.below(900))),
    };
    let most = if is_long() { EXCHANGE * count as u32 } else { Duration::from_millis(60) };
    let after = Duration::from_micros(random.below(most.as_micros() as u64));
    let peer = random.below(peers.0.len() as u64) as usize;
    let began = Instant::now();
    let outcome = std::thread::scope(|scope| {
        scope.spawn(|| {
            std::thread::sleep(after);
            match harm {
                Harm::None => {}
                Harm::Kill => peers.signal(peer, "-KILL"),
                Harm::Stop(time) => {
                    peers.signal(peer, "-STOP");
                    std::thread::sleep(time);
                    peers.signal(peer, "-CONT");
                }
            }
        });
        work()
    });
    // A busy host may take long for each exchange, but not forever.
    let most = Duration::from_secs(60) + Duration::from_millis(1) * count as u32;
    assert!(began.elapsed() < most, "{harm:?}: it took {:?}", began.elapsed());
    (harm, outcome)
}

/// A rank whose sums are relayed, and which gives up early.
fn relaying(found: &Found, group: Group) -> GpuBackend {
    let is_real = found.info.is_real();
    let mut backend = super::relaying(found, Activations::F32, group);
    let usual = crate::mailbox::patience(is_real).as_secs_f64();
    if let (Some(relay), true) = (&mut backend.sums.relay, is_real) {
        relay.looks = (f64::from(relay.looks) * PATIENCE.as_secs_f64() / usual) as u32;
    }
    backend
}

/// A group of this process and another one, with a GPU each.
fn relayed_round(devices: &[Found], random: &mut Random, tally: &mut Tally) {
    let listener = Arc::new(TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap());
    let coordinator = listener.local_addr().unwrap().to_string();
    let peers = Peers::start(&coordinator, 2, random.bits(), true);
    let mut own = config(0, 2, &coordinator);
    own.listener = Some(listener);
    let mut backend = relaying(&devices[0], Group::init(own).unwrap());
    let count = match (is_long(), devices[0].info.is_real()) {
        (true, true) => setting("THUNDER_STRESS_GROUP").unwrap_or(20_000),
        (true, false) => 500,
        (false, _) => 60,
    };
    let mut done = 0;
    let work = || exchange(&mut backend, (0, 2), count, &mut done, None);
    let (harm, outcome) = harmed(&peers, random, count, work);
    tally.note(harm, done, outcome);
}

#[test]
fn exchanges_are_never_wrong_while_peers_are_killed_stopped_and_late() {
    let test = "exchanges_are_never_wrong_while_peers_are_killed_stopped_and_late";
    let Some(found) = device(test) else { return };
    let is_real = found.info.is_real();
    let seed = setting("THUNDER_STRESS_SEED").unwrap_or(11);
    let mut random = Random::new(seed);
    let config =
        GpuConfig { activations: Activations::F32, mailboxes: Mailboxes::Always, ..GpuConfig::default() };
    let mut backend = GpuBackend::new(&found, config, Group::solo()).unwrap();
    let mut tally = Tally::default();
    for number in 0..thunder_testing::runs(5, 120) {
        round(&mut backend, is_real, &mut random, &mut tally);
        if is_long() {
            println!("round {number}: {tally:?}");
        }
    }
    println!("seed {seed}: {tally:?}");
    assert!(tally.exchanges > 0 && (tally.whole > 0 || !is_real), "{tally:?}");
    // The device works, and so do its exchanges.
    proved(&mut backend, is_real);
}

#[test]
fn relayed_exchanges_are_never_wrong_while_peers_are_killed_stopped_and_late() {
    let test = "relayed_exchanges_are_never_wrong_while_peers_are_killed_stopped_and_late";
    let Some(devices) = devices(test, 2) else { return };
    let seed = setting("THUNDER_STRESS_SEED").unwrap_or(12);
    let (mut random, mut tally) = (Random::new(seed), Tally::default());
    for number in 0..thunder_testing::runs(2, setting("THUNDER_STRESS_ROUNDS").unwrap_or(40)) {
        relayed_round(&devices, &mut random, &mut tally);
        if is_long() {
            println!("round {number}: {tally:?}");
        }
    }
    println!("seed {seed}: {tally:?}");
    assert!(tally.exchanges > 0, "{tally:?}");
    // The devices work, and so do relayed sums.
    local::run(2, TransportChoice::Shm, |group| {
        let rank = group.rank();
        let mut backend = relaying(&devices[rank], group);
        exchange(&mut backend, (rank, 2), 60, &mut 0, None).unwrap();
        backend.group().barrier().unwrap();
    })
    .unwrap();
}
