//! `thunder serve`.

use std::ffi::OsString;
use std::net::{IpAddr, SocketAddr, TcpListener, ToSocketAddrs};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use anyhow::{Context, bail};
use clap::{Args, FromArgMatches};
use serde_json::{Value, json};
use thunder_access::Gate;
use thunder_capacity::power::{PowerWatch, Watts};
use thunder_compute::step::KV_BLOCK_TOKENS;
use thunder_engine::Engine;
use thunder_engine::assembly::{self, AdapterSpec, rank_ranges};
use thunder_model::ShardFootprint;
use thunder_node::report::NodeReport;
use thunder_server::{Certificate, ServerConfig, ShardMemory};
use tokio::sync::watch;

use crate::admin::Admin;
use crate::admin::downloads::Downloads;
use crate::engine_args::EngineArgs;
use crate::interrupt;
use crate::key_args::KeyArgs;
use crate::limit_args::LimitArgs;
use crate::log;
use crate::mac_command::keep_awake;
use crate::mlx_launch;
use crate::model_arg::ModelArg;
use crate::reload::{Hangups, Reload, Reloaded, Settings};
use crate::session::{self, Session};
use crate::signin::{Door, SignInArgs};
use crate::store_args::{KeepArgs, Kept, TraceArgs, introduction};
use crate::up::machine_name;

/// Serve a model with the APIs of OpenAI, Anthropic and Ollama
///
/// The address for OpenAI's clients is http://HOST:PORT/v1, for Anthropic's and Ollama's
/// http://HOST:PORT. /openapi.json lists all endpoints. Other machines can connect only with
/// --host, which requires a key: `thunder keys create`, or --api-key. After Ctrl-C, running answers
/// finish; a second Ctrl-C ends the server at once.
#[derive(Args)]
pub struct ServeCommand {
    #[command(flatten)]
    model: ModelArg,
    /// Address or name to listen on; 0.0.0.0 accepts connections from other machines
    ///
    /// On loopback without --api-key, the Host header of requests must be localhost, an address, or
    /// this name. Otherwise a web page could reach the server by a name that resolves to it.
    #[arg(long, value_name = "HOST", default_value = "127.0.0.1")]
    host: String,
    /// Port to listen on; 0 chooses a free port
    #[arg(long, value_name = "PORT", default_value_t = 8000)]
    port: u16,
    #[command(flatten)]
    keys: KeyArgs,
    #[command(flatten)]
    keep: KeepArgs,
    #[command(flatten)]
    sign_in: SignInArgs,
    #[command(flatten)]
    traces: TraceArgs,
    /// Watts that this machine draws when idle and when busy, e.g. 40,180; for /admin/energy on
    /// machines without a readable power counter
    #[arg(long, value_name = "IDLE,BUSY")]
    watts: Option<Watts>,
    #[command(flatten)]
    limits: LimitArgs,
    /// Maximum number of requests that wait for the engine; more are answered with 429. On a server
    /// with keys, each team may have an eighth of them
    #[arg(long, value_name = "N", default_value_t = 4096, value_parser = clap::value_parser!(u32).range(1..))]
    max_waiting: u32,
    /// Seconds that running answers have to finish after Ctrl-C or TERM
    #[arg(long, value_name = "SECONDS", default_value_t = 30)]
    grace: u64,
    /// MiB of memory for responses that later requests may continue (`previous_response_id`); the
    /// oldest are deleted; 0 keeps none
    #[arg(long, value_name = "MIB", default_value_t = 64, value_parser = clap::value_parser!(u32).range(0..=1 << 20))]
    stored_responses: u32,
    /// Low-rank adapter (LoRA) that a request chooses by NAME as its model; may be repeated, at
    /// most 256
    ///
    /// PATH is a folder from PEFT (adapter_config.json, adapter_model.safetensors) or from MLX-LM
    /// (adapters.safetensors). Requests with the model's own name use no adapter. Supported targets
    /// are the projections of attention and of dense MLPs; others are refused by name. One batch
    /// may mix several adapters, on any number of ranks.
    #[arg(long = "lora", value_name = "NAME=PATH", value_parser = adapter)]
    adapters: Vec<AdapterSpec>,
    /// Another name that requests may use for the model, e.g. claude-haiku-4-5; may be repeated; *
    /// accepts every name [default: none]
    ///
    /// For clients that always ask for a name of their vendor. The model's own name, its last part,
    /// and "default" always work.
    #[arg(long = "alias", value_name = "NAME")]
    aliases: Vec<String>,
    /// Accept requests from the nodes of a cluster, which continue on another server if this one is
    /// lost
    #[arg(long, hide = true)]
    relay: bool,
    /// Print the bytes of the weight files that a rank of a group reads, and end
    #[arg(long, hide = true, value_name = "RANK/RANKS", value_parser = rank_of)]
    ranges: Option<(usize, usize)>,
    /// Check the options against the headers of the model, and end
    #[arg(long = "check", hide = true)]
    only_check: bool,
    #[command(flatten)]
    engine: EngineArgs,
}

impl ServeCommand {
    /// Runs the command.
    pub fn run(self) -> anyhow::Result<()> {
        if let Some((rank, ranks)) = self.ranges {
            return self.print_ranges(rank, ranks);
        }
        if self.only_check {
            return self.check_options();
        }
        let address = self.check()?;
        mlx_launch::fill_input();
        let settings = Settings::at_start()?;
        // A used port or store is reported before the model is loaded.
        let is_head = session::is_head()?;
        let hangups = if is_head { Hangups::catch()? } else { None };
        let (mut kept, mut door, mut listener) = (Kept::default(), None, None);
        if is_head {
            kept = self.keep.open(self.engine.cache.max_batch.into(), &self.host)?;
            door = self.sign_in.open(kept.access.as_ref())?;
            door.iter().for_each(Door::put_in_force);
            thunder_server::check_binding(address, &self.keys.api_keys, kept.access.as_ref())?;
            listener = Some(listen(address)?);
        }
        let (Some(session), Some(listener)) =
            (session::open_adapted(self.model.name(), &self.engine, self.adapters.clone())?, listener)
        else {
            return Ok(());
        };
        // A node does this for its ranks.
        let power = (!self.relay).then(|| Arc::new(PowerWatch::start(self.watts)));
        let config = ServerConfig {
            traces: self.traces.open()?,
            access: kept.access,
            local_socket: kept.socket,
            certificate: kept.certificate,
            host_names: vec![self.host.clone()],
            relay: self.relay,
            gate: self.relay.then(|| Gate::new(self.engine.cache.max_batch.into())),
            node_name: machine_name(),
            memory_total_bytes: Some(NodeReport::of_this_machine().memory_total),
            shards: shards(&session),
            ..ServerConfig::default()
        };
        let process = Arc::new_cyclic(|process: &Weak<Serving>| {
            let process: Weak<dyn Reload> = process.clone();
            let admin = Admin { process, downloads: Downloads::default(), power, door, node: None };
            let configs = watch::Sender::new(self.apply(config, &admin));
            Serving { settings, address, configs, admin: Mutex::new(admin) }
        });
        let configs = process.configs.subscribe();
        let reloaded: Weak<dyn Reload> = Arc::downgrade(&process) as _;
        serve(session, listener, configs, hangups.map(|hangups| (hangups, reloaded)))
    }

    /// Refuses addresses, origins and files with which the server would not start, without opening
    /// the model or the store. Returns the address to listen on.
    ///
    /// # Errors
    /// Names the option, its value and what to do.
    pub fn check(&self) -> anyhow::Result<SocketAddr> {
        let address = resolve(&self.host, self.port)?;
        self.limits.check().context("--allow-origin")?;
        self.traces.check()?;
        self.sign_in.check()?;
        self.keep.check()?;
        for AdapterSpec { name, path } in &self.adapters {
            anyhow::ensure!(path.exists(), "--lora {name}={}: the folder is not there", path.display());
        }
        Ok(address)
    }

    /// What a cluster asks before it has this server take the place of one that works.
    fn check_options(&self) -> anyhow::Result<()> {
        if let Some(ranks) = self.engine.layout.ranks {
            bail!("--ranks {ranks}: a cluster has a rank on each node; choose the nodes with --nodes");
        }
        self.check()?;
        // A draft of the hub may come from another node.
        let is_of_hub = |draft: &&OsString| draft.to_str().is_some_and(thunder_hub::is_hub_name);
        if let Some(draft) = self.engine.draft.as_ref().filter(|draft| !is_of_hub(draft)) {
            session::find_draft(draft)?;
        }
        let (model, name) = session::find_model(self.model.name())?;
        Ok(assembly::check(&self.engine.spec(model, name))?)
    }

    fn print_ranges(&self, rank: usize, ranks: usize) -> anyhow::Result<()> {
        let (model, name) = session::find_model(self.model.name())?;
        let files = rank_ranges(&self.engine.spec(model, name), rank, ranks)?;
        let files: Vec<Value> = files
            .iter()
            .map(|file| {
                let runs: Vec<String> = file.runs.iter().map(ToString::to_string).collect();
                json!({ "path": file.path, "size": file.size, "lacking": file.lacking, "runs": runs })
            })
            .collect();
        println!("{}", json!({ "files": files }));
        Ok(())
    }

    /// The configuration with the settings that may change while the server runs, except those
    /// whose change needs more than the new value.
    fn apply(&self, config: ServerConfig, admin: &Admin) -> ServerConfig {
        ServerConfig {
            api_keys: self.keys.api_keys.clone(),
            aliases: self.aliases.clone(),
            max_waiting: Some(self.max_waiting as usize),
            grace: Duration::from_secs(self.grace),
            stored_responses_bytes: (self.stored_responses as usize) << 20,
            extension: Some(Arc::new(admin.clone())),
            ..self.limits.apply(config)
        }
    }
}

/// A server that runs.
struct Serving {
    settings: Settings,
    address: SocketAddr,
    configs: watch::Sender<ServerConfig>,
    admin: Mutex<Admin>,
}

impl Serving {
    /// Puts settings in force. Steps that can fail come before steps that change anything. Returns
    /// a new certificate.
    fn renew(&self, command: ServeCommand, changed: &Reloaded) -> anyhow::Result<Option<Certificate>> {
        let mut config = self.configs.borrow().clone();
        let mut admin = self.admin.lock().unwrap_or_else(PoisonError::into_inner);
        command.check()?;
        thunder_server::check_binding(self.address, &command.keys.api_keys, config.access.as_ref())?;
        if changed.touches("tls") {
            config.certificate = command.keep.certificate(&command.host)?;
        }
        if changed.touches("otlp") {
            config.traces = command.traces.open()?;
        }
        if changed.touches("oidc-") {
            // If sign-in is turned off, requests still need a key until a restart.
            admin.door = command.sign_in.open(config.access.as_ref())?;
            admin.door.iter().for_each(Door::put_in_force);
        }
        if let Some(access) = &config.access {
            command.keep.renew(access);
        }
        let switched_on = config.certificate.clone().filter(|_| changed.touches("tls"));
        self.configs.send_replace(command.apply(config, &admin));
        Ok(switched_on)
    }
}

impl Reload for Serving {
    fn reload(&self) -> anyhow::Result<Reloaded> {
        self.settings.reload(|options, changed| self.renew(ServeCommand::from_arg_matches(options)?, changed))
    }

    fn settings(&self) -> Value {
        self.settings.shown()
    }
}

/// A rank's number and the ranks of its group.
fn rank_of(text: &str) -> Result<(usize, usize), String> {
    let parsed =
        text.split_once('/').and_then(|(rank, ranks)| Some((rank.parse().ok()?, ranks.parse().ok()?)));
    parsed.filter(|(rank, ranks)| rank < ranks).ok_or_else(|| "write RANK/RANKS, e.g. 0/2".to_owned())
}

/// An adapter's name and folder.
fn adapter(text: &str) -> Result<AdapterSpec, String> {
    match text.split_once('=') {
        Some((name, path)) if !name.is_empty() && !path.is_empty() => {
            Ok(AdapterSpec { name: name.to_owned(), path: path.into() })
        }
        _ => Err("write NAME=PATH, e.g. sql=/adapters/sql".to_owned()),
    }
}

/// Memory of each rank's shard.
fn shards(session: &Session) -> Vec<ShardMemory> {
    let tokens = session.head.engine.counters().kv_blocks.load(Ordering::Relaxed) * KV_BLOCK_TOKENS;
    let memory = |footprint: &ShardFootprint| ShardMemory {
        weight_bytes: footprint.weight_bytes,
        kv_bytes: footprint.kv_bytes_per_token * tokens as u64,
    };
    session.head.footprints.iter().map(memory).collect()
}

/// Resolves a name or address. Of several addresses, the first IPv4 address is used, because
/// clients try all addresses of a name.
fn resolve(host: &str, port: u16) -> anyhow::Result<SocketAddr> {
    if let Ok(address) = host.parse::<IpAddr>() {
        return Ok(SocketAddr::new(address, port));
    }
    let wrong = || format!("--host {host}: not an address, and no name that leads to one");
    let found: Vec<_> = (host, port).to_socket_addrs().with_context(wrong)?.collect();
    let address = found.iter().find(|address| address.is_ipv4()).or_else(|| found.first());
    address.copied().with_context(wrong)
}

/// Binds the address. Connections wait until [`serve`] accepts them.
pub fn listen(address: SocketAddr) -> anyhow::Result<TcpListener> {
    TcpListener::bind(address).with_context(|| format!("cannot listen on {address}: choose another --port"))
}

/// Name of the threads that serve the API.
pub const GATEWAY_THREADS: &str = "gateway";

/// The threads that serve the API. Two: while one prepares a prompt, the other serves.
pub fn gateway_runtime() -> std::io::Result<tokio::runtime::Runtime> {
    let mut threads = tokio::runtime::Builder::new_multi_thread();
    threads.worker_threads(2).thread_name(GATEWAY_THREADS).enable_all().build()
}

/// Serves with the latest of `configs` until a signal arrives or the engine stops. SIGHUP reloads,
/// if it is handled.
pub fn serve(
    session: Session,
    listener: TcpListener,
    configs: watch::Receiver<ServerConfig>,
    reload: Option<(Hangups, Weak<dyn Reload>)>,
) -> anyhow::Result<()> {
    let runtime = gateway_runtime()?;
    let engine = session.head.engine.clone();
    let _awake = keep_awake();
    // The first Ctrl-C or TERM is for `Signals`, the second one ends the process.
    let _first = interrupt::on_next(|_| true);
    let served = runtime.block_on(async move {
        listener.set_nonblocking(true)?;
        let listener = tokio::net::TcpListener::from_std(listener)?;
        let address = listener.local_addr()?;
        let until = ended(engine.clone(), Signals::catch()?, configs.clone());
        let (certificate, access) = {
            let config = configs.borrow();
            (config.certificate.clone(), config.access.clone())
        };
        let scheme = if certificate.is_some() { "https" } else { "http" };
        let (model, ranks) = (&engine.info().name, engine.info().ranks);
        log::say(format_args!(
            "serving {model} on {scheme}://{address}/v1 ({ranks} rank(s)); dashboard: {scheme}://{address}/"
        ));
        if let Some(certificate) = &certificate {
            log::say(introduction(certificate));
        }
        if let Some((hangups, process)) = reload {
            tokio::spawn(hangups.heed(process, access));
        }
        thunder_server::serve(engine, listener, configs, until).await?;
        anyhow::Ok(())
    });
    drop(runtime);
    let closed = session.close();
    closed.and(served)
}

/// The signals that end the server. They are caught from [`Signals::catch`] on, not only while
/// something waits for them.
struct Signals {
    interrupt: tokio::signal::unix::Signal,
    terminate: tokio::signal::unix::Signal,
}

impl Signals {
    fn catch() -> std::io::Result<Self> {
        use tokio::signal::unix::{SignalKind, signal};
        Ok(Self { interrupt: signal(SignalKind::interrupt())?, terminate: signal(SignalKind::terminate())? })
    }

    async fn next(&mut self) {
        tokio::select! {
            _ = self.interrupt.recv() => {}
            _ = self.terminate.recv() => {}
        }
    }
}

/// Waits until a signal comes or the engine has stopped.
async fn ended(engine: Engine, mut signals: Signals, configs: watch::Receiver<ServerConfig>) {
    let stopped = async {
        while engine.stopped().is_none() {
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    };
    tokio::select! {
        () = stopped => {}
        () = signals.next() => log::say(format_args!(
            "ending: answers in flight have {} s to complete, new requests are refused; Ctrl-C again ends at once",
            configs.borrow().grace.as_secs()
        )),
    }
}
