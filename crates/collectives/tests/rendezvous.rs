//! How groups form: strangers, wrong secrets, slow and missing ranks, and a group that forms again
//! after a loss.

#![allow(clippy::unwrap_used, reason = "a test's helpers may panic as its tests do")]

use std::io::Write;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use thunder_collectives::{CommError, Config, Group, InitError, Op, TransportChoice, local};

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
    first.rendezvous_limit = Duration::from_secs(1);
    let first = thread::spawn(move || Group::init(first));
    let error = Group::init(config(1, 2, address)).unwrap_err().to_string();
    assert!(error.contains("world size here is 3, yours is 2"), "{error}");
    let second = thread::spawn(move || Group::init(config(1, 3, address)));
    thread::sleep(Duration::from_millis(200));
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
        "ranks 1, 2, 3 have not joined within 300ms: start them, or check their output"
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
