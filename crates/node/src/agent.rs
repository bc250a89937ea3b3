//! The agent: owns the node's key, its port and its part of the cluster.
//!
//! All decisions are made under one lock ([`state::State`]) by parts without sockets; the tasks
//! around it move bytes. No task holds the lock while it waits.

mod acts;
mod addresses;
mod admin;
mod approve;
mod bulk;
mod calls;
mod canary;
pub mod control;
mod counting;
mod desk;
mod energy;
mod gateway;
mod groups;
mod host;
mod keys;
mod links;
mod loading;
mod log;
mod machine;
mod measure;
mod models;
mod ranks;
mod state;
mod status;

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::{Duration, Instant};

use thunder_access::Access;
use thunder_dashboard::Extension;
use thunder_traces::Traces;
use tokio::sync::{Notify, watch};

use crate::discovery::{Announcement, Discovery};
use crate::document::Document;
use crate::gate;
use crate::id::NodeId;
use crate::identity::{Identity, IdentityError};
use crate::joining::code::Code;
use crate::joining::token::{IssuedTokens, Token};
use crate::membership::{Membership, Timing};
use crate::report::NodeReport;
use crate::storage::{DataFolder, StorageError};
use crate::tls::{Protocol, Tls, Trusted};
use crate::version;
use state::State;

pub use crate::http::ApiLimits;
pub use admin::{Desk, DeskAnswer};
pub use desk::CableBench;
pub use log::LogLine;
pub use models::{ModelAnswer, ModelAsk, NodeTask, StoredModel, TaskState, TaskStatus, Work, uses_files};
pub use status::{LinkStatus, MemberStatus, ModelStatus, NewcomerStatus, RankStatus, Status};

/// The default port of nodes.
pub const DEFAULT_PORT: u16 = 7470;
/// The document in the data folder.
const DOCUMENT_FILE: &str = "cluster.json";
/// The issued tokens in the data folder.
const TOKENS_FILE: &str = "tokens.json";
/// The Unix socket for the command line, in the data folder.
pub const CONTROL_FILE: &str = "control";
/// Interval of the membership's clock.
const TICK: Duration = Duration::from_millis(100);
/// If a tick is this late, this process or its machine was stopped for a while.
const HELD_UP: Duration = Duration::from_millis(500);
/// Interval at which the machine's state is read.
const REPORT_EVERY: Duration = Duration::from_secs(5);

/// Options of an agent.
#[derive(Debug, Clone)]
pub struct AgentOptions {
    /// Data folder.
    pub data: PathBuf,
    /// Name of the node.
    pub name: String,
    /// Where to listen. Port 0 chooses a free one.
    pub listen: SocketAddr,
    /// Nodes to connect to if multicast does not reach them, as `HOST:PORT`.
    pub join: Vec<String>,
    /// A token that a member has issued.
    pub token: Option<Token>,
    /// Whether to announce this node and find others by multicast.
    pub discover: bool,
    /// Where to serve the OpenAI API; `None`: not on this node.
    pub api: Option<SocketAddr>,
    /// Keys of the API and other settings that may change while the agent runs.
    pub api_settings: ApiSettings,
    /// Keys, limits, usage and audit log. Keys and limits become the cluster's.
    pub access: Option<Access>,
    /// Answers administrative requests about `access`.
    pub desk: Option<Arc<dyn Desk>>,
    /// A Unix socket for commands of the agent's user, which need no key.
    pub local_socket: Option<PathBuf>,
    /// The `thunder` program, for ranks.
    pub program: PathBuf,
    /// The version to report to other nodes; `None`: this program's. Only tests set another.
    pub version: Option<String>,
    /// Where models are stored and downloaded from. The agent sets the peers.
    pub models: thunder_hub::PullOptions,
}

/// Settings that can be replaced while the agent runs ([`Agent::renew_api`]).
#[derive(Debug, Clone, Default)]
pub struct ApiSettings {
    /// Keys of the API, in addition to those of the store. Without keys, the API must be on
    /// loopback.
    pub keys: Vec<String>,
    /// Every request needs a key: if there is no other, that of a user who has signed in.
    pub needs_keys: bool,
    /// Encrypts the API's connections.
    pub tls: Option<Arc<rustls::ServerConfig>>,
    /// Where to send traces of requests at this node's gateway.
    pub traces: Option<Traces>,
    /// Answers administrative requests that this crate does not handle: downloads, the planner.
    pub extension: Option<Arc<dyn Extension>>,
    /// Origins (`https://chat.example`) whose web pages may use the API; `*` allows all.
    pub allowed_origins: Vec<String>,
    /// Limits of a single client.
    pub limits: ApiLimits,
}

/// Why an agent did not start.
#[derive(Debug, thiserror::Error)]
pub enum AgentError {
    /// The data folder cannot be used.
    #[error(transparent)]
    Storage(#[from] StorageError),
    /// The key cannot be read or created.
    #[error(transparent)]
    Identity(#[from] IdentityError),
    /// The port cannot be used.
    #[error("cannot listen on {address}: {why}; is another `thunder up` running? Choose another --listen")]
    Listen {
        /// The address.
        address: SocketAddr,
        /// The system's error.
        why: std::io::Error,
    },
    /// The API's port cannot be used.
    #[error("cannot serve the API on {address}: {why}; choose another --port")]
    ListenApi {
        /// The address.
        address: SocketAddr,
        /// The system's error.
        why: std::io::Error,
    },
    /// Other machines could use the API without a key.
    #[error(
        "refusing to serve the API on {0} without a key: make one with `thunder keys create NAME`, give one by \
         --api-key, or use an address of loopback; a node that joins a cluster with keys may start without"
    )]
    OpenToAll(SocketAddr),
    /// A key that clients cannot send.
    #[error("an --api-key is empty or has characters that are not printable ASCII: is its variable set?")]
    BadKey,
    /// TLS cannot be set up.
    #[error("cannot set up TLS: {0}")]
    Tls(#[from] rustls::Error),
    /// No multicast.
    #[error("cannot search the network by multicast: {0}; use --no-discovery and --join ADDRESS")]
    Discovery(#[from] mdns_sd::Error),
    /// The control socket cannot be created.
    #[error("cannot make the control socket {path}: {why}")]
    Control {
        /// Its path.
        path: PathBuf,
        /// The system's error.
        why: std::io::Error,
    },
    /// Keys and limits of the store cannot become the cluster's.
    #[error("the keys and limits of {path} cannot become the cluster's: {why}")]
    Keys {
        /// The store.
        path: PathBuf,
        /// What is wrong.
        why: String,
    },
    /// No random numbers.
    #[error("the system gives no random numbers: {0}")]
    NoRandom(#[from] getrandom::Error),
}

/// A running agent. It ends when all clones are dropped, and with the runtime its tasks.
#[derive(Clone)]
pub struct Agent(Arc<Inner>);

struct Inner {
    id: NodeId,
    options: AgentOptions,
    /// Where it listens.
    address: SocketAddr,
    tls: Tls,
    trusted: Trusted,
    folder: DataFolder,
    began: Instant,
    state: Mutex<State>,
    groups: Mutex<groups::Groups>,
    /// Where the API is served.
    api: Option<SocketAddr>,
    api_settings: RwLock<Arc<ApiSettings>>,
    /// Recent events.
    log: log::Log,
    /// Jobs on the models of this node's disk.
    jobs: models::Jobs,
    /// Tasks with models on several nodes.
    tasks: models::Tasks,
    /// What is being sent to other nodes.
    serving: models::Serving,
    /// This node's part of counting limits.
    counting: counting::Counting,
    /// This node's links, as last measured.
    measured: Mutex<Vec<crate::report::LinkReport>>,
    /// Where requests were sent.
    router: Mutex<gateway::Router>,
    /// The requests that the gateway has answered.
    gateway_counts: gateway::GatewayCounts,
    /// Tokens of the groups that have a rank here.
    tokens_here: energy::TokensHere,
    /// Held while a model is loaded on this node alone to answer the canary.
    alone: tokio::sync::Mutex<()>,
    /// Measured speed of this machine, if any.
    speed: Mutex<machine::Speed>,
    /// Held by the probe of this machine that is running, so that there is only one.
    looking: tokio::sync::Mutex<()>,
    /// Wakes the task that writes the document.
    wake_writer: Notify,
    /// Wakes the task that connects to members.
    wake_links: Notify,
    /// Number of connections with members, until their last message is written.
    open_links: watch::Sender<usize>,
    /// Counts changes of the information that [`Agent::status`] shows.
    version: watch::Sender<u64>,
    /// Becomes true when the agent should end.
    ending: watch::Sender<bool>,
    /// Why it ends, if it has failed.
    failure: Mutex<Option<String>>,
}

impl Agent {
    /// Starts an agent on the current runtime.
    ///
    /// # Errors
    /// If its folder, key or port cannot be used.
    pub async fn start(options: AgentOptions) -> Result<Self, AgentError> {
        let folder = DataFolder::open(&options.data)?;
        let identity = Identity::load_or_create(&folder)?;
        let document = read_json::<Document>(&folder, DOCUMENT_FILE)?;
        let tokens = read_json::<IssuedTokens>(&folder, TOKENS_FILE)?;
        let listener =
            gate::bind(options.listen).map_err(|why| AgentError::Listen { address: options.listen, why })?;
        let address =
            listener.local_addr().map_err(|why| AgentError::Listen { address: options.listen, why })?;
        let (api_listener, api) = bind_api(&options, &document)?;
        let trusted = Trusted::default();
        let tls = Tls::new(&identity, trusted.clone())?;
        let id = identity.id();
        let boot = getrandom::u64()?;
        let version = options.version.clone().unwrap_or_else(|| version::own().to_owned());
        let membership = Membership::new(id, boot, document, Timing::default()).with_version(version);
        let state = State::new(membership, Code::draw(&id)?, tokens);
        let speed = Mutex::new(machine::Speed::read(&folder));
        let api_settings = RwLock::new(Arc::new(options.api_settings.clone()));
        let inner = Inner {
            id,
            options,
            address,
            tls,
            trusted,
            folder,
            began: Instant::now(),
            state: Mutex::new(state),
            groups: Mutex::default(),
            api,
            api_settings,
            log: log::Log::default(),
            jobs: models::Jobs::default(),
            tasks: models::Tasks::default(),
            serving: models::Serving::default(),
            counting: counting::Counting::default(),
            measured: Mutex::default(),
            router: Mutex::default(),
            gateway_counts: gateway::GatewayCounts::default(),
            tokens_here: energy::TokensHere::default(),
            alone: tokio::sync::Mutex::default(),
            speed,
            looking: tokio::sync::Mutex::default(),
            wake_writer: Notify::new(),
            wake_links: Notify::new(),
            open_links: watch::Sender::new(0),
            version: watch::Sender::new(0),
            ending: watch::Sender::new(false),
            failure: Mutex::default(),
        };
        let agent = Self(Arc::new(inner));
        agent.describe_myself();
        agent.open_port(listener)?;
        agent.start_discovery()?;
        control::listen(&agent)?;
        if let Some(access) = agent.0.options.access.clone() {
            let failed = |why| AgentError::Keys { path: access.folder().to_owned(), why };
            agent.share_store(&access).map_err(failed)?;
        }
        agent.open_local_door()?;
        agent.spawn(Self::keep_time);
        agent.spawn(Self::keep_links);
        agent.spawn(Self::keep_joining);
        agent.spawn(Self::keep_written);
        agent.spawn(Self::keep_groups);
        agent.spawn(Self::keep_links_measured);
        agent.spawn(Self::keep_tokens_counted);
        if let Some(listener) = api_listener {
            tokio::spawn(agent.clone().serve_api(listener));
        }
        Ok(agent)
    }

    /// This node.
    pub fn id(&self) -> NodeId {
        self.0.id
    }

    /// The version that this node reports to others.
    fn own_version(&self) -> &str {
        self.0.options.version.as_deref().unwrap_or(version::own())
    }

    /// Where it serves the API.
    pub fn api(&self) -> Option<SocketAddr> {
        self.0.api
    }

    /// Changes the settings of the API. Requests that have begun keep the settings that they began
    /// with.
    ///
    /// # Errors
    /// If a key cannot be sent by clients, or the API would be open to other machines without a
    /// key.
    pub fn renew_api(&self, settings: ApiSettings) -> Result<(), AgentError> {
        if let Some(address) = self.0.api {
            let document = self.lock().membership.document().clone();
            check_api(address, &self.0.options, &settings, &document)?;
        }
        *self.0.api_settings.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(settings);
        // Members learn whether the API is encrypted.
        self.describe_myself();
        Ok(())
    }

    fn api_settings(&self) -> Arc<ApiSettings> {
        self.0.api_settings.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.0.address
    }

    /// The code to show while this node is in no cluster.
    pub fn code(&self) -> Option<String> {
        let state = self.lock();
        state.is_alone().then(|| state.code.to_string())
    }

    /// Changes whenever [`Agent::status`] may return something new.
    pub fn changes(&self) -> watch::Receiver<u64> {
        self.0.version.subscribe()
    }

    /// Becomes true when the agent was asked to end or has failed.
    pub fn ending(&self) -> watch::Receiver<bool> {
        self.0.ending.subscribe()
    }

    /// Why the agent ends, if it has failed: its token was refused.
    pub fn failure(&self) -> Option<String> {
        self.0.failure.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Ends the agent with a failure.
    fn fail(&self, why: String) {
        *self.0.failure.lock().unwrap_or_else(PoisonError::into_inner) = Some(why);
        self.0.ending.send_replace(true);
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn now(&self) -> Duration {
        self.0.began.elapsed()
    }

    fn spawn<F: Future<Output = ()> + Send + 'static>(&self, task: impl FnOnce(Self) -> F) {
        tokio::spawn(task(self.clone()));
    }

    /// Updates this node's own entry, if its name or addresses have changed.
    fn describe_myself(&self) {
        let (id, addresses) = (self.0.id, addresses::own(self.0.address));
        let mut state = self.lock();
        let document = state.membership.document();
        if !document.is_removed(&id) {
            let known = document.member(&id);
            let mut member = known.cloned().unwrap_or_default();
            (member.name, member.addresses) = (self.0.options.name.clone(), addresses);
            if known != Some(&member)
                && let Err(error) = state.membership.change(|document| document.set_member(id, id, member))
            {
                tracing::warn!("this node cannot describe itself: {error}");
            }
        }
        self.report_ranks(&mut state, Some(NodeReport::of_this_machine()));
        self.settle(&mut state);
        // The members of the stored document are trusted from the start.
        self.trust_members(&state);
    }

    fn open_port(&self, listener: tokio::net::TcpListener) -> Result<(), AgentError> {
        let host = self.clone();
        let join = move |connection| {
            let host = host.clone();
            async move { crate::joining::server::serve(connection, &host).await }
        };
        let mut members = gate::open(listener, &self.0.tls, join)?;
        let agent = self.clone();
        tokio::spawn(async move {
            while let Some(connection) = members.recv().await {
                match connection.protocol {
                    Protocol::Peer => {
                        let (peer, remote) = (connection.peer, connection.remote);
                        tokio::spawn(agent.clone().run_link(peer, remote, connection.stream));
                    }
                    Protocol::Call => {
                        tokio::spawn(agent.clone().serve_call(connection));
                    }
                    // The gate has served it.
                    Protocol::Join => {}
                }
            }
        });
        Ok(())
    }

    fn start_discovery(&self) -> Result<(), AgentError> {
        if !self.0.options.discover {
            return Ok(());
        }
        let ip = self.0.address.ip();
        let announcement = Announcement {
            id: self.0.id,
            name: self.0.options.name.clone(),
            port: self.0.address.port(),
            addresses: if ip.is_unspecified() { Vec::new() } else { vec![ip] },
        };
        let mut alone = self.lock().is_alone();
        let (discovery, mut found) = Discovery::start(announcement, alone)?;
        let (agent, mut changes) = (self.clone(), self.changes());
        tokio::spawn(async move {
            loop {
                tokio::select! {
                    node = found.recv() => match node {
                        Some(node) => agent.note_found(node),
                        None => return,
                    },
                    _ = changes.changed() => {
                        let now_alone = agent.lock().is_alone();
                        if now_alone != alone {
                            alone = now_alone;
                            // Fails only if the daemon has ended.
                            let _ = discovery.announce(alone);
                        }
                    }
                }
            }
        });
        Ok(())
    }

    async fn keep_time(self) {
        let mut ticks = tokio::time::interval(TICK);
        ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let mut report_at = self.now() + REPORT_EVERY;
        let mut before = self.now();
        loop {
            ticks.tick().await;
            let now = self.now();
            let late = now.saturating_sub(before + TICK);
            before = now;
            if now >= report_at {
                report_at = now + REPORT_EVERY;
                // Addresses are needed too: a node that has joined by --join has told nobody its
                // own, and the others could not call it.
                self.describe_myself();
                self.write_again(&mut self.lock());
            }
            let mut state = self.lock();
            if late >= HELD_UP {
                state.membership.held_up(late, now);
            }
            state.membership.tick(now);
            state.forget_old(now);
            self.settle(&mut state);
        }
    }
}

/// Binds the API's address, if there is one.
fn bind_api(
    options: &AgentOptions,
    document: &Document,
) -> Result<(Option<tokio::net::TcpListener>, Option<SocketAddr>), AgentError> {
    let Some(address) = options.api else { return Ok((None, None)) };
    check_api(address, options, &options.api_settings, document)?;
    let failed = |why| AgentError::ListenApi { address, why };
    let listener = gate::bind(address).map_err(failed)?;
    let bound = listener.local_addr().map_err(failed)?;
    Ok((Some(listener), Some(bound)))
}

/// Refuses keys that clients cannot send, and an API that would be open to other machines without a
/// key.
fn check_api(
    address: SocketAddr,
    options: &AgentOptions,
    settings: &ApiSettings,
    document: &Document,
) -> Result<(), AgentError> {
    let ApiSettings { keys, needs_keys, .. } = settings;
    if !gateway::check_keys(keys) {
        return Err(AgentError::BadKey);
    }
    let store_has_keys = options.access.as_ref().is_some_and(Access::has_keys);
    let joins = options.token.is_some() || !options.join.is_empty();
    // Until a joining node has the cluster's keys, its gateway refuses requests from other
    // machines.
    let has_keys = store_has_keys || *needs_keys || !document.access().is_empty() || joins;
    if !has_keys && !gateway::check_binding(address, keys) {
        return Err(AgentError::OpenToAll(address));
    }
    Ok(())
}

fn read_json<T: serde::de::DeserializeOwned + Default>(
    folder: &DataFolder,
    name: &str,
) -> Result<T, StorageError> {
    let Some(bytes) = folder.read(name)? else { return Ok(T::default()) };
    serde_json::from_slice(&bytes).map_err(|error| {
        let why = format!("{error}; restore it, or remove it and join the cluster again");
        StorageError::Damaged { path: folder.file(name), why }
    })
}
