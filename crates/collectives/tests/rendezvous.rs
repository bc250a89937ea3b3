//! How groups form: strangers, wrong secrets, slow and missing ranks, and a group that forms again
//! after a loss.

#![allow(clippy::unwrap_used, reason = "a test's helpers may panic as its tests do")]

use std::io::Write;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use thunder_collectives::{
    CommError, Config, FormingEvent, Group, InitError, Observer, Op, TransportChoice, local,
};

fn listener() -> (Arc<TcpListener>, SocketAddr) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    (Arc::new(listener), address)
}

fn config(rank: usize, size: usize, address: SocketAddr) -> Config {
    let mut config = Config::new(rank, size, address.to_string());
    config.secret = b"right".to_vec();
    config.rendezvous_limit = Duration::from_secs(20);
    config
}

fn sum(config: Config) -> Result<f32, String> {
    let mut group = Group::init(config).map_err(|error| error.to_string())?;
    let mut data = [1.0f32];
    group.all_reduce(&mut data, Op::Sum).map_err(|error| error.to_string())?;
    Ok(data[0])
}

/// What a rank was told while its group formed.
type Told = Arc<Mutex<Vec<FormingEvent>>>;

fn observed(mut config: Config) -> (Config, Told) {
    let told = Told::default();
    let list = told.clone();
    config.observer = Some(Observer::new(move |event| list.lock().unwrap().push(event.clone())));
    (config, told)
}

/// Waits until a rank was told something that has these words.
fn await_words(told: &Told, words: &str) -> FormingEvent {
    let start = Instant::now();
    loop {
        let event = told.lock().unwrap().iter().find(|event| event.to_string().contains(words)).cloned();
        if let Some(event) = event {
            return event;
        }
        assert!(start.elapsed() < Duration::from_secs(10), "no {words:?} in {:?}", told.lock().unwrap());
        thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn strangers_and_silent_peers_delay_no_rank() {
    let (listener, address) = listener();
    let mut first = config(0, 2, address);
    first.listener = Some(listener);
    let first = thread::spawn(move || sum(first));
    // Many connections that stay silent, one that sends nonsense, one that sends a length of 4 GiB.
    let silent: Vec<TcpStream> = (0..200).map(|_| TcpStream::connect(address).unwrap()).collect();
    let mut rude = TcpStream::connect(address).unwrap();
    rude.write_all(b"GET / HTTP/1.1\r\nHost: localhost\r\nAccept: everything that there is, please\r\n\r\n")
        .unwrap();
    let mut long = TcpStream::connect(address).unwrap();
    long.write_all(&[0xff; 68]).unwrap();
    let start = Instant::now();
    assert_eq!(sum(config(1, 2, address)), Ok(2.0));
    assert_eq!(first.join().unwrap(), Ok(2.0));
    assert!(start.elapsed() < Duration::from_secs(3), "{:?}", start.elapsed());
    drop(silent);
}

#[test]
fn a_wrong_secret_is_refused_and_the_right_rank_still_joins() {
    let (listener, address) = listener();
    let mut first = config(0, 2, address);
    first.listener = Some(listener);
    let first = thread::spawn(move || sum(first));
    let mut wrong = config(1, 2, address);
    wrong.secret = b"wrong".to_vec();
    let error = Group::init(wrong).unwrap_err();
    assert!(matches!(&error, InitError::Refused { why, .. } if why.contains("secret")), "{error}");
    assert_eq!(sum(config(1, 2, address)), Ok(2.0));
    assert_eq!(first.join().unwrap(), Ok(2.0));
}

#[test]
fn a_rank_that_does_not_fit_is_told_why() {
    let (listener, address) = listener();
    let mut first = config(0, 3, address);
    first.listener = Some(listener);
    first.rendezvous_limit = Duration::from_secs(4);
    let (first, told) = observed(first);
    let first = thread::spawn(move || Group::init(first));
    let error = Group::init(config(1, 2, address)).unwrap_err().to_string();
    assert!(error.contains("rank 1 was started for a group of 2 ranks, rank 0 for 3"), "{error}");
    let second = thread::spawn(move || Group::init(config(1, 3, address)));
    await_words(&told, "for rank 2");
    let error = Group::init(config(1, 3, address)).unwrap_err().to_string();
    assert!(error.contains("rank 1 has already joined"), "{error}");
    for result in [first.join().unwrap(), second.join().unwrap()] {
        let error = result.unwrap_err();
        assert!(matches!(&error, InitError::Missing { missing, .. } if *missing == [2]), "{error}");
    }
}

#[test]
fn missing_ranks_are_named_in_time() {
    let (listener, address) = listener();
    let mut first = config(0, 4, address);
    first.listener = Some(listener);
    first.rendezvous_limit = Duration::from_millis(300);
    let start = Instant::now();
    let error = Group::init(first).unwrap_err();
    assert_eq!(
        error.to_string(),
        "ranks 1, 2, 3 did not join within 300 ms: start them, or check their output"
    );
    assert!(start.elapsed() < Duration::from_secs(2));
}

#[test]
fn a_missing_coordinator_is_reported_in_time() {
    let (listener, address) = listener();
    drop(listener);
    let mut second = config(1, 2, address);
    second.rendezvous_limit = Duration::from_millis(300);
    let error = Group::init(second).unwrap_err();
    assert!(matches!(error, InitError::NoCoordinator { .. }), "{error}");
}

#[test]
fn a_rank_may_start_before_the_coordinator() {
    let (listener, address) = listener();
    drop(listener);
    let second = thread::spawn(move || sum(config(1, 2, address)));
    thread::sleep(Duration::from_millis(300));
    assert_eq!(sum(config(0, 2, address)), Ok(2.0));
    assert_eq!(second.join().unwrap(), Ok(2.0));
}

#[test]
fn rank_0_says_for_whom_it_waits_and_whom_it_refused() {
    let (listener, address) = listener();
    let (mut first, told) = observed(config(0, 3, address));
    first.listener = Some(listener);
    let first = thread::spawn(move || sum(first));
    let mut wrong = config(2, 3, address);
    wrong.secret = b"wrong".to_vec();
    Group::init(wrong).unwrap_err();
    let refused = await_words(&told, "secret");
    assert!(matches!(&refused, FormingEvent::Refused { address, .. } if address == "127.0.0.1"), "{refused}");
    Group::init(config(1, 2, address)).unwrap_err();
    await_words(&told, "refused 127.0.0.1: rank 1 was started for a group of 2 ranks, rank 0 for 3");
    let waiting = await_words(&told, "waiting");
    assert!(matches!(&waiting, FormingEvent::Waiting { missing, .. } if *missing == [1, 2]), "{waiting}");
    let second = thread::spawn(move || sum(config(1, 3, address)));
    await_words(&told, "rank 1 has joined from 127.0.0.1; waiting for rank 2");
    assert_eq!(sum(config(2, 3, address)), Ok(3.0));
    await_words(&told, "rank 2 has joined from 127.0.0.1: the group is complete");
    assert_eq!((first.join().unwrap(), second.join().unwrap()), (Ok(3.0), Ok(3.0)));
}

#[test]
fn a_rank_says_why_rank_0_does_not_answer_and_that_it_has_joined() {
    let (listener, address) = listener();
    drop(listener);
    let (second, told) = observed(config(1, 3, address));
    let second = thread::spawn(move || sum(second));
    await_words(&told, "no rank 0 at 127.0.0.1");
    let first = thread::spawn(move || sum(config(0, 3, address)));
    await_words(&told, "waiting for other ranks");
    assert_eq!(sum(config(2, 3, address)), Ok(3.0));
    assert_eq!((first.join().unwrap(), second.join().unwrap()), (Ok(3.0), Ok(3.0)));
}

#[test]
fn a_group_that_forms_at_once_reports_nothing() {
    let (listener, address) = listener();
    let (mut first, told) = observed(config(0, 2, address));
    first.listener = Some(listener);
    let first = thread::spawn(move || sum(first));
    assert_eq!(sum(config(1, 2, address)), Ok(2.0));
    assert_eq!(first.join().unwrap(), Ok(2.0));
    assert_eq!(*told.lock().unwrap(), []);
}

#[test]
fn a_coordinator_that_is_another_program_is_named_so() {
    let (silent, address) = listener();
    let mut second = config(1, 2, address);
    second.rendezvous_limit = Duration::from_millis(300);
    let error = Group::init(second).unwrap_err().to_string();
    assert!(error.contains("connected, but no rank answers there"), "{error}");
    assert!(!error.contains("os error"), "{error}");
    thread::spawn(move || {
        for stream in silent.incoming() {
            // Fails for the rank that has hung up.
            let _ = stream.unwrap().write_all(b"SSH-2.0-OpenSSH_9.9\r\n");
        }
    });
    let error = Group::init(config(1, 2, address)).unwrap_err().to_string();
    assert!(error.contains("no rank of this version (it says \"SSH-2.0-\")"), "{error}");
}

#[test]
fn ranks_listen_on_the_given_ports_only() {
    // Below the ports that the system gives out by itself.
    let ports = 20_731..=20_734;
    let groups = local::groups_with(3, |config| {
        config.transport = TransportChoice::Tcp;
        config.ports = Some(ports.clone());
    });
    let connected = local::run_on(groups.unwrap(), |mut group| {
        let mut data = [1.0f32];
        group.all_reduce(&mut data, Op::Sum).map(|()| data[0])
    });
    assert_eq!(connected, [Ok(3.0), Ok(3.0), Ok(3.0)]);
    let held: Vec<TcpListener> =
        ports.clone().map(|port| TcpListener::bind(("0.0.0.0", port)).unwrap()).collect();
    let mut config = Config::new(1, 2, "127.0.0.1:9");
    config.ports = Some(ports);
    let error = Group::init(config).unwrap_err().to_string();
    assert!(error.contains("20731-20734") && error.contains("in use"), "{error}");
    drop(held);
}

#[test]
fn different_hosts_use_tcp_and_shm_refuses_them() {
    let hosts = |transport| {
        local::groups_with(3, move |config| {
            config.transport = transport;
            config.host = Some(if config.rank < 2 { "a" } else { "b" }.to_owned());
        })
    };
    let groups = hosts(TransportChoice::Auto).unwrap();
    let transports: Vec<String> = (1..3).map(|rank| groups[0].transport(rank).to_string()).collect();
    assert_eq!(transports, ["shared memory", "tcp"]);
    let sums = local::run_on(groups, |mut group| {
        let mut data = vec![group.rank() as f32; 100_000];
        group.all_reduce(&mut data, Op::Sum).map(|()| data.iter().all(|sum| *sum == 3.0))
    });
    assert_eq!(sums, [Ok(true), Ok(true), Ok(true)]);
    let error = hosts(TransportChoice::Shm).unwrap_err();
    assert!(matches!(error, InitError::NotLocal { .. }), "{error}");
}

#[test]
fn survivors_form_a_group_again_without_the_lost_rank_and_later_with_it() {
    for transport in [TransportChoice::Shm, TransportChoice::Tcp] {
        let (listener_two, address_two) = listener();
        let (listener_three, address_three) = listener();
        let again = move |rank, size, address, listener: &Arc<TcpListener>| {
            let mut config = config(rank, size, address);
            config.transport = transport;
            config.listener = (rank == 0).then(|| listener.clone());
            sum(config)
        };
        let results = local::run(3, transport, |mut group| {
            let rank = group.rank();
            group.barrier().unwrap();
            if rank == 1 {
                drop(group);
            } else {
                let error = group.barrier().unwrap_err();
                assert!(matches!(error, CommError::PeerLost { rank: 1, .. }), "{error}");
                assert_eq!(group.barrier(), Err(error), "a failed group stays failed");
                drop(group);
                assert_eq!(again(rank / 2, 2, address_two, &listener_two), Ok(2.0));
            }
            again(rank, 3, address_three, &listener_three)
        });
        assert_eq!(results.unwrap(), [Ok(3.0), Ok(3.0), Ok(3.0)]);
    }
}
