//! Failures: each must be reported in time, with its cause.

use crate::world::*;
use std::io::Read;
use std::net::{TcpListener, TcpStream};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};
use thunder_verbs::{
    Abort, Channel, ChannelOptions, Connection, Error, Mode, Profile, ProtectionDomain, QueueOptions,
    QueuePair, ReadyToSend, RemoteWindow, WcStatus,
};

/// Set to "MODE ADDRESS" in the process of the peer to kill.
pub const PEER_ENV: &str = "THUNDER_VERBS_TEST_PEER";

pub fn tests() -> Vec<Test> {
    let mut tests: Vec<Test> = vec![
        ("a_too_short_receive_is_reported_on_both_sides".into(), Arc::new(short_receive)),
        ("a_wrong_rkey_is_reported".into(), Arc::new(wrong_rkey)),
        ("a_send_without_a_receive_vanishes_on_uc_and_fails_on_rc".into(), Arc::new(no_receive)),
        ("a_lost_packet_is_reported".into(), Arc::new(lossy_cable)),
        ("a_probe_reveals_the_loss_of_the_last_frame".into(), Arc::new(lost_at_the_end)),
        ("a_silent_peer_is_a_timeout".into(), Arc::new(silent_peer)),
        ("doctor_finds_the_devices".into(), Arc::new(doctor)),
        ("apple_has_no_reliable_connection".into(), Arc::new(no_rc_on_apple)),
        ("an_error_for_an_unknown_name_lists_the_known_ones".into(), Arc::new(unknown_names)),
    ];
    for mode in MODES {
        tests.push((format!("a_killed_peer_ends_the_wait_{mode:?}"), Arc::new(move || killed_peer(mode))));
    }
    tests
}

/// Two connected queue pairs of ranks 0 and 1, without a channel. `post` posts the receives of rank
/// 1.
fn bare_pair(connection: Connection, slot_bytes: [usize; 2], post: bool) -> [QueuePair<ReadyToSend>; 2] {
    let sides = [(0, 1), (1, 0)].map(|(rank, peer)| {
        let cable = cables(rank, peer, 1, Profile::LINUX).remove(0);
        let port = cable.context.choose_port(cable.local_address).unwrap();
        let domain = ProtectionDomain::new(&cable.context).unwrap();
        let window_bytes = if connection == Connection::Rc { 4096 } else { 0 };
        let slot_bytes = slot_bytes[rank];
        let options = QueueOptions { connection, slot_bytes, sends: 4, receives: 4, window_bytes };
        QueuePair::create(&domain, options).unwrap().init(&port).unwrap()
    });
    let addresses = sides.each_ref().map(|pair| pair.address());
    let [a, b] = sides;
    let a = a.connect(&addresses[1]).unwrap().activate().unwrap();
    let mut b = b.connect(&addresses[0]).unwrap().activate().unwrap();
    if post {
        assert_eq!(b.post_receives().unwrap(), 4);
    }
    [a, b]
}

/// Polls until a request fails; `None` if none fails in this time.
fn failure_of(pair: &mut QueuePair<ReadyToSend>, within: Duration) -> Option<Error> {
    let started = Instant::now();
    while started.elapsed() < within {
        if let Err(error) = pair.poll(drop) {
            return Some(error);
        }
        std::thread::yield_now();
    }
    None
}

fn assert_status(error: Option<Error>, expected: &[WcStatus]) {
    match error {
        Some(Error::Completion { status, .. }) if expected.contains(&status) => {}
        other => panic!("expected one of {expected:?}, got {other:?}"),
    }
}

fn short_receive() {
    let [mut sender, mut receiver] = bare_pair(Connection::Rc, [8192, 4096], true);
    sender.send_slot().unwrap().send(8192).unwrap();
    // The first status is the specification's, the second Soft-RoCE's.
    assert_status(failure_of(&mut receiver, LIMIT), &[WcStatus::LocLen, WcStatus::LocQpOp]);
    assert_status(failure_of(&mut sender, LIMIT), &[WcStatus::RemInvReq, WcStatus::RemOp]);
}

fn wrong_rkey() {
    let [mut writer, target] = bare_pair(Connection::Rc, [4096, 4096], true);
    let window = target.window().unwrap().remote();
    let mut slot = writer.send_slot().unwrap();
    slot[..5].copy_from_slice(b"right");
    slot.write(5, &window, 16).unwrap();
    let started = Instant::now();
    while writer.outstanding() > 0 {
        writer.poll(drop).unwrap();
        assert!(started.elapsed() < LIMIT, "the right key must work");
    }
    assert_eq!(target.window().unwrap().flag(16).to_le_bytes(), *b"right\0\0\0");

    let wrong = RemoteWindow { rkey: window.rkey ^ 0x55, ..window };
    writer.send_slot().unwrap().write(8, &wrong, 0).unwrap();
    assert_status(failure_of(&mut writer, LIMIT), &[WcStatus::RemAccess]);
}

fn no_receive() {
    let [mut sender, mut receiver] = bare_pair(Connection::Uc, [4096, 4096], false);
    sender.send_slot().unwrap().send(100).unwrap();
    assert!(failure_of(&mut sender, Duration::from_millis(300)).is_none(), "UC reports no error");
    assert_eq!(sender.outstanding(), 0, "UC completes the send");
    receiver.post_receives().unwrap();
    let mut got = 0;
    receiver.poll(|_| got += 1).unwrap();
    assert_eq!(got, 0, "the message is lost");

    let [mut sender, _receiver] = bare_pair(Connection::Rc, [4096, 4096], false);
    sender.send_slot().unwrap().send(100).unwrap();
    assert_status(failure_of(&mut sender, LIMIT), &[WcStatus::RnrRetryExc]);
}

/// Makes the first cable from rank 0 to rank 1 lose packets until dropped.
struct Loss {
    interface: String,
}

impl Loss {
    fn new(percent: u32) -> Self {
        let device = &ends()[0].device;
        let interface = device.strip_prefix("rdma_").expect("named after its interface").to_string();
        let status = Command::new("tc")
            .args(["qdisc", "add", "dev", &interface, "root", "netem", "limit", "100000", "loss"])
            .arg(format!("{percent}%"))
            .status();
        assert!(status.expect("tc runs").success(), "tc could not add the loss");
        Self { interface }
    }
}

impl Drop for Loss {
    fn drop(&mut self) {
        let status = Command::new("tc").args(["qdisc", "del", "dev", &self.interface, "root"]).status();
        assert!(status.expect("tc runs").success(), "tc could not remove the loss");
    }
}

fn lossy_cable() {
    let mut channels = channel_pair(ChannelOptions::new(Mode::Uc), 1, Profile::LINUX, &Abort::new());
    let _loss = Loss::new(5);
    let started = Instant::now();
    let [sender, receiver] = &mut channels;
    let mut buffer = [0; 2000];
    loop {
        let _ = sender.send(&buffer).unwrap();
        match receiver.try_recv(&mut buffer) {
            Ok(_) => assert!(started.elapsed() < LIMIT, "5 % of the packets are lost without an error"),
            Err(Error::Lost { missing, .. }) => {
                assert!(missing > 0);
                break;
            }
            Err(other) => panic!("expected a loss, got {other}"),
        }
    }
    assert!(matches!(receiver.poll(), Err(Error::Lost { .. })), "a broken channel stays broken");
}

fn lost_at_the_end() {
    let abort = Abort::new();
    let [mut sender, mut receiver] = channel_pair(ChannelOptions::new(Mode::Uc), 1, Profile::LINUX, &abort);
    {
        let _loss = Loss::new(100);
        sender.send_all(&[7; 100], LIMIT).unwrap();
        sender.drain(LIMIT).unwrap();
        std::thread::sleep(Duration::from_millis(100));
    }
    // The sender only polls, as if it waited for a reply to the lost frame.
    let error = std::thread::scope(|scope| {
        let done = abort.clone();
        scope.spawn(move || {
            while done.raised().is_none() {
                let _ = sender.poll();
            }
        });
        let error = receiver.recv_exact(&mut [0; 100], LIMIT).unwrap_err();
        abort.raise("the test is over");
        error
    });
    assert!(matches!(error, Error::Lost { missing: 1, .. }), "{error}");
}

fn silent_peer() {
    let [mut local, _silent] = channel_pair(ChannelOptions::new(Mode::Uc), 1, Profile::LINUX, &Abort::new());
    let limit = Duration::from_millis(300);
    let started = Instant::now();
    let error = local.recv_exact(&mut [0; 10], limit).unwrap_err();
    assert!(matches!(error, Error::Timeout { .. }), "{error}");
    assert!(error.to_string().contains("0 of 10 received"), "{error}");
    assert!(started.elapsed() < limit * 4, "it took {:?}", started.elapsed());
}

fn doctor() {
    let report = thunder_verbs::doctor::examine();
    assert!(report.usable, "{report}");
    let text = report.to_string();
    for end in ends() {
        let device = report
            .devices
            .iter()
            .find(|device| device.name == end.device)
            .expect("the report has every device");
        assert!(device.is_usable(), "{text}");
        assert!(text.contains(&end.ip.to_string()), "{} is not in {text}", end.ip);
    }
    assert_eq!(report.advice, Vec::<String>::new(), "nothing is wrong");
}

fn no_rc_on_apple() {
    let error =
        Channel::prepare(&cables(0, 1, 1, Profile::APPLE), ChannelOptions::new(Mode::Rc)).err().unwrap();
    assert!(matches!(error, Error::Unsupported { .. }) && error.to_string().contains("(UC)"), "{error}");
}

fn unknown_names() {
    let end = &ends()[0];
    let error = thunder_verbs::Context::open("rdma_en99").err().unwrap().to_string();
    assert!(error.contains("rdma_en99") && error.contains(&end.device), "{error}");
    let context = open(&end.device, Profile::LINUX);
    let error = context.choose_port(Some("203.0.113.1".parse().unwrap())).unwrap_err().to_string();
    assert!(error.contains("203.0.113.1") && error.contains(&end.ip.to_string()), "{error}");
    let port = context.choose_port(None).unwrap();
    assert_eq!((port.gid.ipv4(), port.mtu_bytes), (Some(end.ip), 4096));
}

/// The process of the peer: connects and sends until the test kills it.
pub fn peer_that_dies(role: &str) -> ! {
    let (mode, address) = role.split_once(' ').expect("MODE ADDRESS");
    let mode = MODES.into_iter().find(|known| format!("{known:?}") == mode).expect("a mode");
    let mut stream = TcpStream::connect(address).expect("the parent listens");
    let prepared = Channel::prepare(&cables(1, 0, 1, Profile::LINUX), ChannelOptions::new(mode)).unwrap();
    let mut channel = prepared.handshake(&mut stream, Abort::new()).unwrap();
    loop {
        channel.send_all(&[1; 1000], LIMIT).unwrap();
    }
}

fn killed_peer(mode: Mode) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let role = format!("{mode:?} {}", listener.local_addr().unwrap());
    let mut peer = Command::new(std::env::current_exe().unwrap())
        .env(PEER_ENV, role)
        .stdin(Stdio::null())
        .spawn()
        .unwrap();
    let (mut connection, _) = listener.accept().unwrap();
    let abort = Abort::new();
    let prepared = Channel::prepare(&cables(0, 1, 1, Profile::LINUX), ChannelOptions::new(mode)).unwrap();
    let mut channel = prepared.handshake(&mut connection, abort.clone()).unwrap();
    let mut into = [0; 1000];
    for _ in 0..50 {
        channel.recv_exact(&mut into, LIMIT).unwrap();
    }

    // End of file on the TCP connection shows that the peer died: the kernel closes it in any case.
    let watch = std::thread::spawn(move || {
        let end = connection.read(&mut [0]);
        abort.raise(format!("rank 1 closed its connection ({end:?})"));
    });
    peer.kill().unwrap();
    peer.wait().unwrap();
    let killed = Instant::now();
    let error = loop {
        // The dead peer neither sends nor receives all of this.
        if let Err(error) = channel.transfer(&[2; 1000], &mut into, LIMIT) {
            break error;
        }
    };
    let took = killed.elapsed();
    watch.join().unwrap();
    let expected = match &error {
        Error::Aborted { reason } => reason.contains("rank 1"),
        Error::Completion { status, .. } => *status == WcStatus::RetryExc && mode != Mode::Uc,
        _ => false,
    };
    assert!(expected, "{error}");
    assert!(took < Duration::from_secs(2), "it took {took:?}");
    println!("{mode:?}: {took:?} after the kill: {error}");
}
