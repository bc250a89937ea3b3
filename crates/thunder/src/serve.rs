//! `thunder serve`.

use std::net::{IpAddr, SocketAddr, TcpListener, ToSocketAddrs};
use std::time::Duration;

use anyhow::Context;
use clap::Args;
use thunder_engine::Engine;
use thunder_server::ServerConfig;

use crate::engine_args::EngineArgs;
use crate::interrupt;
use crate::key_args::KeyArgs;
use crate::mac_command::keep_awake;
use crate::mlx_launch;
use crate::model_arg::ModelArg;
use crate::session::{self, Session};

/// Serve a model with the APIs of OpenAI, Anthropic and Ollama
///
/// Point any OpenAI client to http://HOST:PORT/v1, Anthropic's and Ollama's to http://HOST:PORT;
/// /openapi.json lists all endpoints. Other machines can connect only with --host, which requires
/// --api-key.
/// After Ctrl-C, answers in flight are completed; a second Ctrl-C ends at once.
#[derive(Args)]
pub struct ServeCommand {
    #[command(flatten)]
    model: ModelArg,
    /// Address or name to listen on; 0.0.0.0 accepts connections from other machines
    ///
    /// On loopback without --api-key, requests must be for localhost, an address, or this name: a
    /// web page could reach the server by a name of its own.
    #[arg(long, value_name = "HOST", default_value = "127.0.0.1")]
    host: String,
    /// Port to listen on; 0 chooses a free one
    #[arg(long, value_name = "PORT", default_value_t = 8000)]
    port: u16,
    #[command(flatten)]
    keys: KeyArgs,
    /// Origin whose web pages may use the server, e.g. https://chat.example; may be repeated, *
    /// allows all [default: none]
    ///
    /// For browser clients that are not served by this machine. Without --api-key, such pages need
    /// no key either.
    #[arg(long = "allow-origin", value_name = "ORIGIN")]
    allowed_origins: Vec<String>,
    /// Seconds that answers in flight have to complete after Ctrl-C or TERM
    #[arg(long, value_name = "SECONDS", default_value_t = 30)]
    grace: u64,
    /// MiB of memory for responses that later ones may continue (`previous_response_id`); the
    /// oldest are forgotten, 0 keeps none
    #[arg(long, value_name = "MIB", default_value_t = 64, value_parser = clap::value_parser!(u32).range(0..=1 << 20))]
    stored_responses: u32,
    #[command(flatten)]
    engine: EngineArgs,
}

impl ServeCommand {
    /// Runs the command.
    pub fn run(self) -> anyhow::Result<()> {
        let address = resolve(&self.host, self.port)?;
        thunder_server::check_binding(address, &self.keys.api_keys)
            .context("use --api-key or --host 127.0.0.1")?;
        thunder_server::check_origins(&self.allowed_origins)?;
        mlx_launch::fill_input();
        // A port that is in use is an error before the model is loaded, not after.
        let listener = if session::is_head()? { Some(listen(address)?) } else { None };
        let (Some(session), Some(listener)) = (session::open(self.model.name(), &self.engine)?, listener)
        else {
            return Ok(());
        };
        let config = ServerConfig {
            api_keys: self.keys.api_keys,
            allowed_origins: self.allowed_origins,
            host_names: vec![self.host],
            grace: Duration::from_secs(self.grace),
            stored_responses_bytes: (self.stored_responses as usize) << 20,
            ..ServerConfig::default()
        };
        serve(session, listener, config)
    }
}

/// The address of a name or address. Of several, the first IPv4 address: clients that are given a
/// name try all.
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

/// Serves until a signal comes or the engine stops.
pub fn serve(session: Session, listener: TcpListener, config: ServerConfig) -> anyhow::Result<()> {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    let engine = session.head.engine.clone();
    let _awake = keep_awake();
    // The first Ctrl-C or TERM is for `Signals`, the second one ends the process.
    let _first = interrupt::on_next(|_| true);
    let served = runtime.block_on(async move {
        listener.set_nonblocking(true)?;
        let listener = tokio::net::TcpListener::from_std(listener)?;
        let address = listener.local_addr()?;
        let until = ended(engine.clone(), Signals::catch()?, config.grace);
        eprintln!("serving {} on http://{address}/v1 ({} rank(s))", engine.info().name, engine.info().ranks);
        thunder_server::serve(engine, listener, config, until).await?;
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
async fn ended(engine: Engine, mut signals: Signals, grace: Duration) {
    let stopped = async {
        while engine.stopped().is_none() {
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    };
    tokio::select! {
        () = stopped => {}
        () = signals.next() => eprintln!(
            "ending: answers in flight have {} s to complete, new requests are refused; Ctrl-C again ends at once",
            grace.as_secs()
        ),
    }
}
