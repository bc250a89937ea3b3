//! `thunder bench serve`: the load of many clients on a server that speaks OpenAI's API.

pub(super) mod load;
mod report;
pub(super) mod stream;

use std::ffi::OsString;
use std::net::{Ipv4Addr, SocketAddr};
use std::time::Duration;

use anyhow::{Context, bail};
use clap::Args;
use thunder_server::ServerConfig;
use tokio::sync::{oneshot, watch};

use crate::engine_args::EngineArgs;
use crate::{progress, session};
use load::{Load, Pace};
use stream::{Api, Target};

/// Measure a server under load: time to first token, time between tokens, throughput, errors
///
/// Measures any server with OpenAI's chat API by its URL, or starts a server for a MODEL. After the
/// shared part, each request has its own prompt, so that a server cannot answer it from the cache
/// of another request. If the server runs on the same machine, its figures include the work of this
/// command.
#[derive(Args)]
pub struct ServeCommand {
    /// http://HOST:PORT of a running server, or a model to serve: `builtin`, a folder, a GGUF file,
    /// or a name in the local Hugging Face cache
    #[arg(value_name = "URL|MODEL")]
    target: OsString,
    /// Model name in the requests [default: the first model that the server lists]
    #[arg(long, value_name = "NAME")]
    model_name: Option<String>,
    /// Number of clients, each of which sends its next request as soon as it has an answer; a list
    /// measures each number in turn
    #[arg(long, value_name = "N", value_delimiter = ',', default_value = "1,4,16",
          value_parser = clap::value_parser!(u16).range(1..=1024))]
    clients: Vec<u16>,
    /// Requests a second at random times (Poisson), instead of --clients; shows the effect of users
    /// who do not wait for each other; a list measures each rate in turn
    #[arg(long, value_name = "R", value_delimiter = ',', conflicts_with = "clients")]
    rate: Vec<f64>,
    /// Requests in each measurement [default: 4 for each client, at least 16]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=100_000))]
    requests: Option<u32>,
    /// Words of each prompt after the shared part; a word has 1 to 3 tokens
    #[arg(long, value_name = "N", default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    prompt: u32,
    /// Words at the beginning of all prompts, which a prefix cache computes once
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = clap::value_parser!(u32).range(0..=1_000_000))]
    shared: u32,
    /// Maximum tokens of each answer
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    tokens: u32,
    /// Let the model end its answers. Without this option, requests have `ignore_eos`, which
    /// OpenAI's own server refuses
    #[arg(long)]
    until_end: bool,
    /// Key that the server needs
    #[arg(long, value_name = "KEY", env = "THUNDER_API_KEY", hide_env_values = true)]
    api_key: Option<String>,
    /// Seed of the prompts and of the arrival times
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,
    /// Seconds without data from the server after which a request counts as failed
    #[arg(long, value_name = "SECONDS", default_value_t = 120, value_parser = clap::value_parser!(u64).range(1..=86_400))]
    timeout: u64,
    /// Print one JSON object instead of tables
    #[arg(long)]
    json: bool,
    /// Draw throughput and latency over the load
    #[arg(long, conflicts_with = "json")]
    plot: bool,
    #[command(flatten)]
    engine: EngineArgs,
}

impl ServeCommand {
    /// Runs the command.
    pub fn run(self) -> anyhow::Result<()> {
        if let Some(rate) = self.rate.iter().find(|rate| !(rate.is_finite() && **rate > 0.0)) {
            bail!("--rate {rate}: must be above 0");
        }
        if let Some(url) =
            self.target.to_str().filter(|text| text.starts_with("http://") || text.starts_with("https://"))
        {
            return self.measure(url);
        }
        let Some(session) = session::open(&self.target, &self.engine)? else { return Ok(()) };
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
        let listener = crate::serve::listen(SocketAddr::from((Ipv4Addr::LOCALHOST, 0)))?;
        let address = listener.local_addr()?;
        listener.set_nonblocking(true)?;
        let engine = session.head.engine.clone();
        let (stop, stopped) = oneshot::channel::<()>();
        let server = runtime.spawn(async move {
            let listener = tokio::net::TcpListener::from_std(listener)?;
            // An error means that the command has ended.
            let until = async { drop(stopped.await) };
            thunder_server::serve(engine, listener, watch::channel(ServerConfig::default()).1, until).await?;
            anyhow::Ok(())
        });
        let measured = self.measure(&format!("http://{address}"));
        let _ = stop.send(());
        let served = runtime.block_on(server).context("the server panicked")?;
        drop(runtime);
        let closed = session.close();
        measured.and(served).and(closed)
    }

    fn measure(&self, url: &str) -> anyhow::Result<()> {
        let api = Api::new(url, self.api_key.clone(), Duration::from_secs(self.timeout))?;
        let model = match &self.model_name {
            Some(name) => name.clone(),
            None => api.first_model()?,
        };
        let target = Target { api, model, most_tokens: self.tokens, ignores_eos: !self.until_end };
        let paces: Vec<Pace> = if self.rate.is_empty() {
            self.clients.iter().map(|clients| Pace::Clients(usize::from(*clients))).collect()
        } else {
            self.rate.iter().map(|rate| Pace::PerSecond(*rate)).collect()
        };
        let bar = progress::measurements(paces.len());
        let mut results = Vec::new();
        for (round, pace) in paces.into_iter().enumerate() {
            bar.set_message(pace.to_string());
            let requests = self.requests.map_or_else(|| pace.usual_requests(), |count| count as usize);
            let load = Load {
                pace,
                requests,
                words: self.prompt as usize,
                shared_words: self.shared as usize,
                seed: self.seed.wrapping_add(round as u64),
            };
            results.push(load.run(&target));
            bar.inc(1);
        }
        bar.finish_and_clear();
        if self.json {
            println!("{}", report::json(&target, &results));
        } else {
            report::print(&results);
            if self.plot {
                print!("{}", report::plot(&results));
            }
        }
        if results.iter().all(|result| result.completed() == 0) {
            let why = results.iter().flat_map(|result| result.errors.keys()).next();
            bail!("no request was answered: {}", why.map_or("nothing was sent", String::as_str));
        }
        Ok(())
    }
}
