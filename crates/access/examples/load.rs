//! Measures the time that counting adds to a request, and how exact the limits are.
//!
//! ```text
//! cargo run --release -p thunder-access --example load -- 300
//! ```
//! 200 clients with 20 keys ask again and again for that many seconds, and wait when they are
//! refused. Prints the time that a request spends in this crate, what each key was admitted of what
//! its limit allows, and whether every answered request is in the store.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use thunder_access::{
    Access, Actor, Ask, By, Filter, Limits, NewKey, Now, Outcome, Retention, StartError, UsageRecord,
};

const KEYS: usize = 20;
const CLIENTS: usize = 200;
const MODEL: &str = "org/model";
const PROMPT: u64 = 50;
const ANSWER: u64 = 50;
/// Time of an answer.
const WORK: Duration = Duration::from_millis(200);

/// Half of the keys have a limit of requests, the other half a limit of tokens.
fn limits(nth: usize) -> (Limits, u64) {
    let requests = 60 * (1 + nth as u64 / 2);
    let per_minute = Limits { requests_per_minute: Some(requests), ..Limits::default() };
    let tokens = Limits { tokens_per_minute: Some(requests * (PROMPT + ANSWER)), ..Limits::default() };
    (if nth.is_multiple_of(2) { per_minute } else { tokens }, requests)
}

fn record() -> UsageRecord {
    UsageRecord {
        number: 0,
        id: "chatcmpl-0123456789abcdef0123456789abcdef".into(),
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
        prompt_tokens: PROMPT,
        cached_tokens: 0,
        completion_tokens: ANSWER,
        cost_nanos: 0,
        queue_us: 0,
        first_token_us: 0,
        duration_us: 200_000,
    }
}

struct Load {
    access: Access,
    admitted: Vec<AtomicU64>,
    costs: Mutex<Vec<Duration>>,
    until: Instant,
}

impl Load {
    fn client(&self, key: usize, secret: &str) {
        let mut costs = Vec::new();
        while Instant::now() < self.until {
            let began = Instant::now();
            let Ok(caller) = self.access.authenticate(secret, Now::read().time) else { return };
            let ask =
                Ask { prompt_tokens: PROMPT, answer_tokens: Some(ANSWER), answers: 1, ..Ask::default() };
            let started = self
                .access
                .check(&caller, MODEL, Now::read())
                .and_then(|()| self.access.begin(&caller, MODEL, &ask, Now::read()));
            let standings = self.access.standings(&caller, Some(MODEL), Now::read());
            let before = began.elapsed();
            match started {
                Ok(reservation) => {
                    self.admitted[key].fetch_add(1, Ordering::Relaxed);
                    std::thread::sleep(WORK);
                    let began = Instant::now();
                    self.access.finish(&caller, Some(reservation), record(), Now::read()).wait();
                    costs.push(before + began.elapsed());
                }
                Err(StartError::Limit(refusal)) => {
                    let wait = Duration::from_millis(refusal.retry_after_ms.unwrap_or(1000).min(250));
                    std::thread::sleep(wait);
                }
                Err(error) => panic!("{error}"),
            }
            drop(standings);
        }
        self.costs.lock().unwrap_or_else(std::sync::PoisonError::into_inner).extend(costs);
    }
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let seconds: u64 = std::env::args().nth(1).map_or(Ok(60), |seconds| seconds.parse())?;
    let folder = tempfile::tempdir()?;
    let access = Access::open(folder.path(), Retention::default(), None)?;
    let mut secrets = Vec::new();
    for nth in 0..KEYS {
        let new = NewKey { name: format!("key-{nth}"), limits: limits(nth).0, ..NewKey::default() };
        secrets.push(access.create_key(new, &Actor::local(), Now::read().time)?.1);
    }
    let load = Arc::new(Load {
        access,
        admitted: (0..KEYS).map(|_| AtomicU64::new(0)).collect(),
        costs: Mutex::default(),
        until: Instant::now() + Duration::from_secs(seconds),
    });
    let clients = (0..CLIENTS).map(|nth| {
        let (load, key) = (load.clone(), nth % KEYS);
        let secret = secrets[key].clone();
        std::thread::spawn(move || load.client(key, &secret))
    });
    for client in clients.collect::<Vec<_>>() {
        client.join().map_err(|_| "a client panicked")?;
    }
    report(&load, seconds)
}

fn report(load: &Load, seconds: u64) -> Result<(), Box<dyn std::error::Error>> {
    let mut costs = load.costs.lock().unwrap_or_else(std::sync::PoisonError::into_inner).clone();
    costs.sort();
    let at = |share: f64| costs.get((costs.len() as f64 * share) as usize).copied().unwrap_or_default();
    println!(
        "{} requests; cost of counting: median {:?}, p99 {:?}, most {:?}",
        costs.len(),
        at(0.5),
        at(0.99),
        at(1.0 - 1e-9)
    );
    let mut worst: f64 = 0.0;
    for (nth, admitted) in load.admitted.iter().enumerate() {
        let (_, per_minute) = limits(nth);
        let exact = (per_minute * seconds.div_ceil(60)) as f64;
        let off = admitted.load(Ordering::Relaxed) as f64 / exact - 1.0;
        worst = if off.abs() > worst.abs() { off } else { worst };
    }
    println!("admitted of what limits allow: worst key {:+.2} %", worst * 100.0);
    let groups = load.access.sums(&Filter::default(), &[By::Model])?;
    let stored = groups[&vec![Some(MODEL.to_owned())]].totals().requests;
    println!("{stored} of {} answered requests are in the store", costs.len());
    Ok(())
}
