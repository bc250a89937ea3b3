//! A process that is killed at any moment loses no usage record of a finished answer.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::io::{BufRead, BufReader, Write};
use std::process::{Command, Stdio};
use std::time::Duration;

use thunder_access::{Access, Actor, Ask, By, Caller, Filter, NewKey, Now, Outcome, Retention, UsageRecord};

const FOLDER: &str = "THUNDER_TEST_KILL_FOLDER";
const KILLS: u64 = 100;
const MODEL: &str = "org/model";

fn record() -> UsageRecord {
    UsageRecord {
        number: 0,
        id: "chatcmpl-1".into(),
        time: Now::read().time,
        key: None,
        key_id: None,
        owner: None,
        team: None,
        model: MODEL.into(),
        api: "/v1/chat/completions".into(),
        node: None,
        outcome: Outcome::Stop,
        status: 200,
        count: 1,
        prompt_tokens: 10,
        cached_tokens: 0,
        completion_tokens: 3,
        cost_nanos: 0,
        queue_us: 0,
        first_token_us: 0,
        duration_us: 0,
    }
}

/// Parallel answers in the process that is killed.
const AT_ONCE: u64 = 4;

/// The process that is killed: counts requests of several threads, and prints a line for each
/// answer.
#[test]
fn writer() {
    let Some(folder) = std::env::var_os(FOLDER) else { return };
    let access = Access::open(folder.as_ref(), Retention::default(), None).unwrap();
    let say = |line: &[u8]| {
        let mut out = std::io::stdout().lock();
        out.write_all(line).unwrap();
        out.flush().unwrap();
    };
    let answer = |thread: u64| {
        for nth in 0u64.. {
            let now = Now::read();
            let reservation = access.begin(&Caller::Open, MODEL, &Ask::default(), now).unwrap();
            access.finish(&Caller::Open, Some(reservation), record(), now).wait();
            say(b"answered\n");
            if thread == 0 && nth % 50 == 20 {
                let new = NewKey { name: format!("key-{}-{nth}", std::process::id()), ..NewKey::default() };
                access.create_key(new, &Actor::local(), now.time).unwrap();
                say(b"created\n");
            }
            // Records move to the store in the middle of other work.
            if thread == 1 && nth % 20 == 10 {
                access.move_records().unwrap();
            }
        }
    };
    std::thread::scope(|scope| {
        for thread in 0..AT_ONCE {
            let answer = &answer;
            scope.spawn(move || answer(thread));
        }
    });
}

#[test]
fn a_hundred_kills_lose_no_record() {
    let folder = tempfile::tempdir().unwrap();
    let (mut answered, mut created) = (0, 0);
    for kill in 0..KILLS {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "writer", "--nocapture", "--quiet"])
            .env(FOLDER, folder.path())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        // Waits for the first answers, then for a time that differs for each kill.
        let mut seen = 0;
        while seen < 1 + kill % 7 {
            let line = lines.next().unwrap().unwrap();
            seen += u64::from(line.ends_with("answered"));
            answered += u64::from(line.ends_with("answered"));
            created += u64::from(line == "created");
        }
        std::thread::sleep(Duration::from_micros(kill * 137 % 9000));
        child.kill().unwrap();
        child.wait().unwrap();
        // Lines in the pipe from before the kill are answers too.
        for line in lines.map_while(Result::ok) {
            answered += u64::from(line.ends_with("answered"));
            created += u64::from(line == "created");
        }
    }
    let access = Access::open(folder.path(), Retention::default(), None).unwrap();
    let sums = access.sums(&Filter::default(), &[By::Model]).unwrap();
    let totals = sums[&vec![Some(MODEL.to_owned())]].totals();
    // Each thread of a process had at most one request that was counted but not yet answered.
    let most = answered + KILLS * AT_ONCE;
    assert!(totals.requests >= answered && totals.requests <= most, "{totals:?} {answered}");
    assert_eq!(totals.completion_tokens, totals.requests * 3);
    let (records, audit) = access.counts().unwrap();
    assert_eq!(records, totals.requests);
    let newest = access.records(&Filter::default(), None, 1).unwrap();
    assert_eq!(newest[0].number, totals.requests, "numbers have gaps");
    assert!(audit >= created && created > 0, "{audit} {created}");
    assert_eq!(access.verify_audit().unwrap().entries, access.keys().len() as u64);
}
