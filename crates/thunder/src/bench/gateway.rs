//! `thunder bench gateway`: the cost of keys, limits and usage records for a request.

mod histogram;
mod threads;

use std::ffi::OsString;
use std::io::Read;
use std::net::{Ipv4Addr, SocketAddr};
use std::time::Duration;

use anyhow::{Context, bail};
use clap::Args;
use serde_json::json;
use thunder_access::{Access, Actor, Filter, Limits, NewKey, Now, Retention};
use thunder_engine::Engine;
use thunder_server::ServerConfig;
use tokio::runtime::Runtime;
use tokio::sync::{oneshot, watch};
use tokio::task::JoinHandle;

use super::serve::load::{Load, Pace};
use super::serve::stream::{Api, Target};
use crate::engine_args::EngineArgs;
use crate::serve::gateway_runtime;
use crate::{progress, session, table};
use histogram::Histogram;
use threads::ThreadTimes;

/// Time without data from the server after which a request counts as failed.
const TIMEOUT: Duration = Duration::from_secs(120);
/// Largest answer of `/metrics`.
const MOST_BYTES: u64 = 4 << 20;
/// Limits of a key here: they are counted, but never reached.
const UNHIT: Limits = Limits {
    requests_per_minute: Some(1 << 40),
    tokens_per_minute: Some(1 << 40),
    parallel_requests: Some(1 << 20),
    tokens_per_day: Some(1 << 50),
    tokens_per_month: Some(1 << 50),
    cost_per_month: None,
};

/// Measure the cost of the gateway: keys, limits, parsing, usage records
///
/// Starts two servers with one engine: one without a store, and one with keys, limits and usage
/// records. Clients use them in turn.
///
/// Prints each server's own time for a request, as in `thunder:gateway_own_seconds` of /metrics:
/// from the request's head to the engine, and from the last token to the usage record. This time
/// does not include the engine and its queue. The wait for other requests that are being prepared
/// is printed separately. On Linux, also prints the computing time of the gateway's threads for a
/// request, including all of HTTP, and their waits for a core. The share of throughput is the
/// median over pairs of rounds.
#[derive(Args)]
pub struct GatewayCommand {
    /// Model to serve: `builtin`, a folder, a GGUF file, or a name in the local Hugging Face cache
    #[arg(value_name = "MODEL", default_value = "builtin")]
    model: OsString,
    /// Number of clients, each of which sends its next request as soon as it has an answer
    #[arg(long, value_name = "N", default_value_t = 200, value_parser = clap::value_parser!(u16).range(1..=1024))]
    clients: u16,
    /// Number of keys that the clients share
    #[arg(long, value_name = "N", default_value_t = 20, value_parser = clap::value_parser!(u16).range(1..=1024))]
    keys: u16,
    /// Pairs of rounds, with one round for each server
    #[arg(long, value_name = "N", default_value_t = 6, value_parser = clap::value_parser!(u16).range(1..=1000))]
    rounds: u16,
    /// Requests of each client in a round
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    requests: u32,
    /// Words of each prompt
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    prompt: u32,
    /// Tokens of each answer
    #[arg(long, value_name = "N", default_value_t = 32, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    tokens: u32,
    /// Print one JSON object instead of a table
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    engine: EngineArgs,
}

/// A server of this process.
struct Server {
    url: String,
    stop: oneshot::Sender<()>,
    serving: JoinHandle<anyhow::Result<()>>,
    /// A key of each group of clients; empty without keys.
    secrets: Vec<String>,
    /// Tokens a second in each round.
    rates: Vec<f64>,
    /// Answers, and the work of the gateway's threads for them.
    answers: u64,
    threads: Option<ThreadTimes>,
    /// The gateway's own times during the measurement: total, computed, and by part.
    own: Vec<(String, Histogram)>,
}

impl GatewayCommand {
    /// Runs the command.
    pub fn run(self) -> anyhow::Result<()> {
        if self.keys > self.clients {
            bail!("--keys {}: more than --clients {}", self.keys, self.clients);
        }
        let Some(session) = session::open(&self.model, &self.engine)? else { return Ok(()) };
        let measured = self.measure(&session.head.engine);
        let closed = session.close();
        measured.and(closed)
    }

    fn measure(&self, engine: &Engine) -> anyhow::Result<()> {
        let folder = tempfile::tempdir().context("cannot make a folder for the store")?;
        let at_once = self.engine.cache.max_batch.into();
        let access = Access::open(folder.path(), Retention::default(), Some(at_once))?;
        let mut secrets = Vec::new();
        for nth in 0..self.keys {
            let team = Some(format!("team-{}", nth % 5));
            let new = NewKey { name: format!("key-{nth}"), team, limits: UNHIT, ..NewKey::default() };
            secrets.push(access.create_key(new, &Actor::local(), Now::read().time)?.1);
        }
        let runtime = gateway_runtime()?;
        let kept = ServerConfig { access: Some(access.clone()), ..ServerConfig::default() };
        let mut plain = Server::start(&runtime, engine, ServerConfig::default(), Vec::new())?;
        let mut keyed = Server::start(&runtime, engine, kept, secrets)?;
        let answered = self.rounds(&mut plain, &mut keyed);
        for server in [&mut plain, &mut keyed] {
            server.read_metrics()?;
        }
        let (plain, keyed) = (plain.end(&runtime)?, keyed.end(&runtime)?);
        let answered = answered?;
        let groups = access.sums(&Filter::default(), &[])?;
        let recorded: u64 = groups.values().map(|sums| sums.totals().requests).sum();
        if recorded != answered {
            bail!("{answered} requests were answered, but {recorded} are recorded");
        }
        self.report(&plain, &keyed, recorded);
        Ok(())
    }

    /// Measures both servers in turn. Returns the answers of the one with keys.
    fn rounds(&self, plain: &mut Server, keyed: &mut Server) -> anyhow::Result<u64> {
        let bar = progress::measurements(2 * usize::from(self.rounds));
        let mut answered = 0;
        for round in 0..=self.rounds {
            // Pairs alternate, so that a machine that slows down affects both equally.
            let order = if round % 2 == 0 { [true, false] } else { [false, true] };
            for is_keyed in order {
                let server = if is_keyed { &mut *keyed } else { &mut *plain };
                let before = ThreadTimes::read();
                let (answers, rate) = self.load(server, u64::from(round))?;
                answered += if is_keyed { answers } else { 0 };
                // The first pair warms up.
                if round > 0 {
                    server.rates.push(rate);
                    server.answers += answers;
                    if let Some((before, after)) = before.zip(ThreadTimes::read()) {
                        server.threads.get_or_insert_default().add_between(before, after);
                    }
                    bar.inc(1);
                }
            }
        }
        bar.finish_and_clear();
        Ok(answered)
    }

    /// Runs all clients once; returns the answers, and tokens a second.
    fn load(&self, server: &Server, round: u64) -> anyhow::Result<(u64, f64)> {
        let groups = usize::from(self.keys);
        let began = std::time::Instant::now();
        let run = |group: usize| {
            let key = server.secrets.get(group).cloned();
            let api = Api::new(&server.url, key, TIMEOUT)?;
            let (most_tokens, model) = (self.tokens, "default".to_owned());
            let target = Target { api, model, most_tokens, ignores_eos: true };
            let all = usize::from(self.clients);
            let clients = all / groups + usize::from(group < all % groups);
            let requests = clients * self.requests as usize;
            let seed = round << 16 | group as u64;
            let words = self.prompt as usize;
            let load = Load { pace: Pace::Clients(clients), requests, words, shared_words: 0, seed };
            anyhow::Ok(load.run(&target))
        };
        let run = &run;
        let measured: Vec<_> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..groups).map(|group| scope.spawn(move || run(group))).collect();
            threads.into_iter().map(std::thread::ScopedJoinHandle::join).collect()
        });
        let wall = began.elapsed().as_secs_f64();
        let (mut answers, mut tokens) = (0, 0);
        for of_group in measured {
            let of_group = of_group.map_err(|_| anyhow::anyhow!("a client panicked"))??;
            if let Some((error, count)) = of_group.errors.iter().next() {
                bail!("{count} requests failed: {error}");
            }
            answers += of_group.completed() as u64;
            tokens += of_group.answers.iter().map(|answer| answer.tokens).sum::<u64>();
        }
        Ok((answers, tokens as f64 / wall))
    }

    fn report(&self, plain: &Server, keyed: &Server, recorded: u64) {
        let share = Server::share(plain, keyed);
        let ms = |seconds: f64| seconds * 1e3;
        if self.json {
            let of = |server: &Server| -> serde_json::Value {
                let parts = server.own.iter().map(|(name, own)| {
                    let figures = json!({
                        "requests": own.count(), "mean_ms": ms(own.mean()), "p50_ms": ms(own.quantile(0.5)),
                        "p99_ms": ms(own.quantile(0.99)),
                    });
                    (name.clone(), figures)
                });
                let threads =
                    server.of_a_request().map(|[ran, waited]| json!({ "ran_ms": ran, "waited_ms": waited }));
                json!({ "tokens_per_s": server.rates, "threads": threads, "own": parts.collect::<serde_json::Map<_, _>>() })
            };
            let result = json!({
                "clients": self.clients, "keys": self.keys, "without_keys": of(plain), "with_keys": of(keyed),
                "share_of_throughput": share, "recorded": recorded,
            });
            println!("{result}");
            return;
        }
        let mut rows =
            table::new(&["own time of", "p50, ms", "p99, ms", "mean, ms", "without keys: p50", "p99"]);
        for ((name, own), (_, before)) in keyed.own.iter().zip(&plain.own) {
            let figure = |seconds: f64| format!("{:.3}", ms(seconds));
            rows.add_row([
                name.clone(),
                figure(own.quantile(0.5)),
                figure(own.quantile(0.99)),
                figure(own.mean()),
                figure(before.quantile(0.5)),
                figure(before.quantile(0.99)),
            ]);
        }
        println!("{rows}");
        let mean = |rates: &[f64]| rates.iter().sum::<f64>() / rates.len().max(1) as f64;
        println!(
            "{} clients, {} keys: {:.0} tokens/s without, {:.0} with keys; median of {} pairs: {:+.2} % of throughput",
            self.clients,
            self.keys,
            mean(&plain.rates),
            mean(&keyed.rates),
            self.rounds,
            -100.0 * share
        );
        if let Some(([ran, waited], [ran_before, waited_before])) =
            keyed.of_a_request().zip(plain.of_a_request())
        {
            println!(
                "the gateway's threads computed {ran:.3} ms for a request, with all of HTTP, and waited {waited:.3} ms for a \
                 core; without keys {ran_before:.3} and {waited_before:.3} ms"
            );
        }
        println!("{recorded} of {recorded} answers have a usage record");
    }
}

impl Server {
    fn start(
        runtime: &Runtime,
        engine: &Engine,
        config: ServerConfig,
        secrets: Vec<String>,
    ) -> anyhow::Result<Self> {
        let listener = crate::serve::listen(SocketAddr::from((Ipv4Addr::LOCALHOST, 0)))?;
        let url = format!("http://{}", listener.local_addr()?);
        listener.set_nonblocking(true)?;
        let (stop, stopped) = oneshot::channel::<()>();
        let engine = engine.clone();
        let serving = runtime.spawn(async move {
            let listener = tokio::net::TcpListener::from_std(listener)?;
            // An error means that the command has ended.
            let until = async { drop(stopped.await) };
            Ok(thunder_server::serve(engine, listener, watch::channel(config).1, until).await?)
        });
        Ok(Self {
            url,
            stop,
            serving,
            secrets,
            rates: Vec::new(),
            answers: 0,
            threads: None,
            own: Vec::new(),
        })
    }

    /// Milliseconds that the gateway's threads computed for a request, and waited for a core.
    fn of_a_request(&self) -> Option<[f64; 2]> {
        let ThreadTimes { ran, waited } = self.threads?;
        Some([ran, waited].map(|ns| ns as f64 / 1e6 / self.answers.max(1) as f64))
    }

    /// Reads the gateway's own times for all its requests.
    fn read_metrics(&mut self) -> anyhow::Result<()> {
        let url = format!("{}/metrics", self.url);
        let mut request = ureq::get(&url);
        if let Some(secret) = self.secrets.first() {
            request = request.header("authorization", format!("Bearer {secret}"));
        }
        let response = request.call().with_context(|| format!("cannot read {url}"))?;
        let mut text = String::new();
        response.into_body().into_reader().take(MOST_BYTES).read_to_string(&mut text)?;
        let all = Histogram::read(&text, "thunder:gateway_own_seconds", None)?;
        let computed = Histogram::read(&text, "thunder:gateway_computed_seconds", None)?;
        self.own = vec![("a request".to_owned(), all), ("of it computed".to_owned(), computed)];
        for part in ["authorize", "wait", "switch", "prepare", "admit", "record"] {
            let own = Histogram::read(&text, "thunder:gateway_own_part_seconds", Some(part))?;
            self.own.push((part.to_owned(), own));
        }
        Ok(())
    }

    fn end(mut self, runtime: &Runtime) -> anyhow::Result<Self> {
        let (stop, _) = oneshot::channel();
        drop(std::mem::replace(&mut self.stop, stop));
        let serving = std::mem::replace(&mut self.serving, runtime.spawn(async { Ok(()) }));
        runtime.block_on(serving).context("the server panicked")??;
        Ok(self)
    }

    /// Share of the throughput that keys cost: the median over pairs of rounds.
    fn share(plain: &Self, keyed: &Self) -> f64 {
        let mut shares: Vec<f64> =
            plain.rates.iter().zip(&keyed.rates).map(|(without, with)| 1.0 - with / without).collect();
        shares.sort_by(f64::total_cmp);
        let middle = |place: usize| shares.get(place).copied().unwrap_or(0.0);
        (middle(shares.len().saturating_sub(1) / 2) + middle(shares.len() / 2)) / 2.0
    }
}
