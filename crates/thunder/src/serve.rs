//! `thunder serve`.

use std::net::{IpAddr, SocketAddr, TcpListener};
use std::time::Duration;

use anyhow::Context;
use clap::Args;
use thunder_engine::Engine;
use thunder_server::ServerConfig;

use crate::engine_args::EngineArgs;
use crate::session::{self, Session};

/// Serve a model behind the OpenAI API
///
/// Answers /v1/chat/completions, /v1/completions, /v1/models and /health. Point any OpenAI client at http://HOST:PORT/v1.
/// Listens on this machine only, unless --host says otherwise; then --api-key is needed. Ctrl-C lets answers in flight end.
#[derive(Args)]
pub struct ServeCommand {
    /// `builtin`, a folder, or a model in the Hugging Face cache
    #[arg(value_name = "MODEL", conflicts_with = "model")]
    positional: Option<String>,
    /// The same as MODEL
    #[arg(long)]
    model: Option<String>,
    /// Address to listen on
    #[arg(long, default_value = "127.0.0.1")]
    host: IpAddr,
    /// Port to listen on; 0 takes a free one
    #[arg(long, default_value_t = 8000)]
    port: u16,
    /// A key that clients must send as `Authorization: Bearer KEY`; may be repeated
    #[arg(
        long = "api-key",
        value_name = "KEY",
        env = "THUNDER_API_KEY",
        value_delimiter = ',',
        hide_env_values = true
    )]
    api_keys: Vec<String>,
    /// Seconds that answers in flight have once the server is told to end
    #[arg(long, value_name = "SECONDS", default_value_t = 30)]
    grace: u64,
    #[command(flatten)]
    engine: EngineArgs,
}

impl ServeCommand {
    /// Runs the command.
    pub fn run(self) -> anyhow::Result<()> {
        let address = SocketAddr::new(self.host, self.port);
        thunder_server::check_binding(address, &self.api_keys)
            .context("use --api-key or --host 127.0.0.1")?;
        let model = self.positional.or(self.model).unwrap_or_else(|| crate::builtin::NAME.to_owned());
        // A port that is taken is found before the model is loaded.
        let listener = if session::is_head()? { Some(listen(address)?) } else { None };
        let (Some(session), Some(listener)) = (session::open(&model, &self.engine)?, listener) else {
            return Ok(());
        };
        let config = ServerConfig {
            api_keys: self.api_keys,
            grace: Duration::from_secs(self.grace),
            ..ServerConfig::default()
        };
        serve(session, listener, config)
    }
}

/// Takes the address; connections wait until [`serve`] accepts them.
pub fn listen(address: SocketAddr) -> anyhow::Result<TcpListener> {
    TcpListener::bind(address).with_context(|| format!("cannot listen on {address}: choose another --port"))
}

/// Serves until the process is told to end, or the engine stops.
pub fn serve(session: Session, listener: TcpListener, config: ServerConfig) -> anyhow::Result<()> {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    let engine = session.head.engine.clone();
    let served = runtime.block_on(async move {
        listener.set_nonblocking(true)?;
        let listener = tokio::net::TcpListener::from_std(listener)?;
        let address = listener.local_addr()?;
        let until = ended(engine.clone(), Signals::catch()?);
        eprintln!("serving {} on http://{address}/v1 ({} rank(s))", engine.info().name, engine.info().ranks);
        thunder_server::serve(engine, listener, config, until).await?;
        anyhow::Ok(())
    });
    drop(runtime);
    let closed = session.close();
    served.and(closed)
}

/// The signals by which a process is told to end. Caught from here on, not only once somebody waits for them.
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

/// Ready when the process is told to end, or the engine has stopped.
async fn ended(engine: Engine, mut signals: Signals) {
    let stopped = async {
        while engine.stopped().is_none() {
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    };
    tokio::select! {
        () = stopped => {}
        () = signals.next() => eprintln!("ending: answers in flight may end, no new ones are taken"),
    }
}
