//! Property tests: any bytes from outside give an error, never a panic, a hang or a huge
//! allocation.

use std::io::{self, Cursor, Read, Write};
use std::net::{IpAddr, Ipv4Addr, Shutdown, TcpListener, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use proptest::prelude::*;

use crate::core::{Core, WaitPolicy};
use crate::header::{HEADER_BYTES, Header, OperationKind};
use crate::link::Link;
use crate::link::tcp::TcpLink;
use crate::rendezvous::{DeadlineStream, Endpoint, Hello, Reply, handshake};
use crate::watch::Watch;
use crate::{CommError, Config, DType, Group, InitError, rendezvous};

const SECRET: &[u8] = b"of these tests";
/// Far longer than any of these tests takes.
const LIMIT: Duration = Duration::from_secs(10);

fn cases(count: u32) -> ProptestConfig {
    ProptestConfig { cases: count, failure_persistence: None, ..ProptestConfig::default() }
}

fn bytes(most: usize) -> impl Strategy<Value = Vec<u8>> {
    prop::collection::vec(any::<u8>(), 0..most)
}

/// What may happen to a message on its way.
#[derive(Debug, Clone)]
enum Damage {
    Cut(prop::sample::Index),
    Change(prop::sample::Index, u8),
    Insert(prop::sample::Index, Vec<u8>),
}

fn damage() -> impl Strategy<Value = Damage> {
    prop_oneof![
        any::<prop::sample::Index>().prop_map(Damage::Cut),
        (any::<prop::sample::Index>(), 1u8..).prop_map(|(at, by)| Damage::Change(at, by)),
        (any::<prop::sample::Index>(), bytes(40)).prop_map(|(at, more)| Damage::Insert(at, more)),
    ]
}

impl Damage {
    fn apply(&self, message: &mut Vec<u8>) {
        match self {
            Self::Cut(at) => message.truncate(at.index(message.len())),
            Self::Change(at, by) => {
                let at = at.index(message.len());
                message[at] ^= by;
            }
            Self::Insert(at, more) => {
                let at = at.index(message.len());
                message.splice(at..at, more.iter().copied());
            }
        }
    }
}

fn pair() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    (near, listener.accept().unwrap().0)
}

/// A stream whose other side has already sent everything.
struct Script {
    input: Cursor<Vec<u8>>,
}

impl Read for Script {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        self.input.read(into)
    }
}

impl Write for Script {
    fn write(&mut self, from: &[u8]) -> io::Result<usize> {
        Ok(from.len())
    }
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

proptest! {
    #![proptest_config(cases(256))]

    #[test]
    fn a_handshake_rejects_any_bytes(input in bytes(300), greeting in any::<bool>()) {
        let mut said = if greeting { handshake::GREETING.to_vec() } else { Vec::new() };
        said.extend(input);
        let script = || Script { input: Cursor::new(said.clone()) };
        prop_assert!(handshake::accept(&mut script(), SECRET).is_err());
        prop_assert!(handshake::connect(&mut script(), SECRET, b"hello").is_err());
        // No more memory is allocated than the message limit.
        if let Ok(message) = handshake::read_message(&mut script()) {
            prop_assert!(message.len() <= said.len());
        }
    }

    #[test]
    fn only_the_expected_message_is_received(input in bytes(200), length in 0u64..200, damage in damage()) {
        let (kind, dtype) = (OperationKind::AllToAll, DType::U8 as u8);
        let expected = Header { kind, dtype, op: 0, phase: 0, sequence: 7, length };
        let mut inline = expected.encode();
        if expected.is_inline() {
            Header::inline_mut(&mut inline)[..length as usize].fill(9);
        }
        let mut valid = inline.to_vec();
        if !expected.is_inline() {
            valid.extend(vec![9; length as usize]);
        }
        let mut damaged = valid.clone();
        damage.apply(&mut damaged);
        prop_assert_eq!(receive(expected, &valid), Ok(vec![9; length as usize]));
        for stranger in [input, damaged] {
            let whole = stranger.len() >= valid.len() && stranger[..24] == valid[..24];
            let result = receive(expected, &stranger);
            prop_assert_eq!(result.is_ok(), whole, "{:?}", result);
        }
    }

    #[test]
    fn any_header_can_be_described(input in any::<[u8; 32]>(), magic in any::<bool>()) {
        let mut header = [0; HEADER_BYTES];
        header[..32].copy_from_slice(&input);
        if magic {
            header[..4].copy_from_slice(&Header::default().encode()[..4]);
        }
        prop_assert!(Header::describe(&header).len() < 150);
    }
}

/// What rank 0 receives from `wire` while it waits for a message from rank 1, which then ends.
fn receive(expected: Header, wire: &[u8]) -> Result<Vec<u8>, CommError> {
    let (near, mut far) = pair();
    far.write_all(wire).unwrap();
    drop(far);
    let link: Box<dyn Link> = Box::new(TcpLink::new(vec![near]).unwrap());
    let mut core = core(vec![None, Some(link)], None);
    core.begin(Some(Instant::now()), expected.kind, false)?;
    let mut data = vec![0; expected.length as usize];
    core.queue_receive(1, expected, data.as_mut_ptr());
    // SAFETY: `data` lives until the exchange has ended.
    crate::group::block_on(unsafe { core.exchange() })?;
    Ok(data)
}

fn core(links: Vec<Option<Box<dyn Link>>>, watch: Option<Watch>) -> Core {
    let spin = Duration::from_micros(50);
    Core::new(
        0,
        links,
        vec![vec![0], vec![1]],
        None,
        watch,
        WaitPolicy { spin, oversubscribed: false, idle_spin: spin, stall_limit: LIMIT },
    )
}

proptest! {
    #![proptest_config(cases(512))]

    /// Rank 1 sends any bytes to rank 0's watch, and ends.
    #[test]
    fn a_watch_blames_only_ranks_of_the_group(
        frames in prop::collection::vec((0u8..7, any::<u8>(), 0u16..5, 0u16..5), 0..4),
        rest in bytes(20),
    ) {
        let (near, mut far) = pair();
        let (other, quiet) = pair();
        let mut wire: Vec<u8> = frames
            .iter()
            .flat_map(|(kind, why, by, rank)| {
                let ([by0, by1], [rank0, rank1]) = (by.to_le_bytes(), rank.to_le_bytes());
                [*kind, *why, by0, by1, rank0, rank1, 0, 0]
            })
            .collect();
        wire.extend(rest);
        let watch = Watch::start(0, vec![None, Some(near), Some(other)], &[false; 3], LIMIT).unwrap();
        // Fails if the watch has already closed the connection.
        let _ = far.write_all(&wire);
        let _ = far.shutdown(Shutdown::Both);
        let started = Instant::now();
        while watch.failure().is_none() && !watch.departed(1) {
            prop_assert!(started.elapsed() < LIMIT, "the end of rank 1 is not noticed");
            std::thread::yield_now();
        }
        let failed = watch.failure().is_some();
        let mut core = core((0..3).map(|_| None).collect(), Some(watch));
        let result = core.begin(Some(Instant::now()), OperationKind::Barrier, false);
        prop_assert_eq!(result.is_err(), failed);
        if let Err(error) = result {
            prop_assert!(error.rank().is_some_and(|rank| rank < 3), "{:?}", error);
        }
        // Before the core is dropped: its goodbye waits for ranks that are still there.
        drop(quiet);
    }
}

fn endpoint() -> Endpoint {
    let text = |word: &str| word.to_owned();
    let addresses = vec![IpAddr::V4(Ipv4Addr::LOCALHOST)];
    Endpoint {
        host: text("a"),
        addresses,
        port: 9,
        connections: 1,
        local: text("b"),
        session: text("c"),
        sealed: true,
    }
}

fn config(rank: usize, listener: &Arc<TcpListener>) -> Config {
    let mut config = Config::new(rank, 2, listener.local_addr().unwrap().to_string());
    config.secret = SECRET.to_vec();
    config.rendezvous_limit = LIMIT;
    config.listener = (rank == 0).then(|| listener.clone());
    config
}

fn listener() -> Arc<TcpListener> {
    Arc::new(TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap())
}

proptest! {
    #![proptest_config(cases(48))]

    /// Peers that know the secret but send invalid hellos are refused, and the group still forms.
    #[test]
    fn a_coordinator_survives_any_hello(damages in prop::collection::vec(damage(), 1..6), noise in bytes(200)) {
        let listener = listener();
        let first = std::thread::spawn({
            let config = config(0, &listener);
            move || Group::init(config).map(|group| group.size())
        });
        let hello = serde_json::to_vec(&Hello { rank: 1, size: 3, endpoint: endpoint() }).unwrap();
        let damaged = damages.iter().map(|damage| {
            let mut hello = hello.clone();
            damage.apply(&mut hello);
            hello
        });
        for hello in damaged.chain([noise, br#"{"rank":18446744073709551615,"size":2}"#.to_vec()]) {
            // A changed digit may give a rank that fits, which is not tested here.
            if matches!(serde_json::from_slice(&hello), Ok(Hello { rank: 1, size: 2, .. })) {
                continue;
            }
            let mut peer = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            peer.set_read_timeout(Some(LIMIT)).unwrap();
            handshake::connect(&mut peer, SECRET, &hello).unwrap();
            let answer = handshake::read_message(&mut peer).unwrap();
            prop_assert!(matches!(serde_json::from_slice(&answer), Ok(Reply::Refused(_))));
        }
        prop_assert_eq!(Group::init(config(1, &listener)).unwrap().size(), 2);
        prop_assert_eq!(first.join().unwrap().unwrap(), 2);
    }

    /// A coordinator that knows the secret but sends an invalid reply gives an error.
    #[test]
    fn a_rank_survives_any_reply(damage in damage(), noise in bytes(200)) {
        let table = Reply::Table(vec![endpoint(), endpoint(), endpoint()]);
        let mut damaged = serde_json::to_vec(&table).unwrap();
        damage.apply(&mut damaged);
        for answer in [damaged, noise] {
            let listener = listener();
            let config = config(1, &listener);
            let rank = std::thread::spawn(move || rendezvous::exchange_endpoints(&config, endpoint()));
            let (mut peer, _) = listener.accept().unwrap();
            handshake::accept(&mut peer, SECRET).unwrap();
            handshake::await_confirmation(&mut peer).unwrap();
            handshake::write_message(&mut peer, &answer).unwrap();
            drop(peer);
            let error = rank.join().unwrap().unwrap_err();
            prop_assert!(matches!(error, InitError::Refused { .. }), "{}", error);
        }
    }
}

/// A limit on each read would never end a stranger that sends a byte now and then.
#[test]
fn a_stranger_that_sends_single_bytes_is_dropped_in_time() {
    let (mut near, mut far) = pair();
    let drip = std::thread::spawn(move || {
        while far.write_all(&[7]).is_ok() {
            std::thread::sleep(Duration::from_millis(20));
        }
    });
    let started = Instant::now();
    let mut limited = DeadlineStream::new(&mut near, Duration::from_millis(200));
    assert!(handshake::accept(&mut limited, SECRET).is_err());
    assert!(started.elapsed() < Duration::from_secs(20), "{:?}", started.elapsed());
    drop(near);
    drip.join().unwrap();
}
