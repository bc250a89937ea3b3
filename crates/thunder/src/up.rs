//! `thunder up`: the node agent in the foreground.

use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};

use anyhow::Context;
use clap::{Args, FromArgMatches};
use etcetera::BaseStrategy;
use serde_json::Value;
use thunder_access::Access;
use thunder_capacity::power::{PowerWatch, Watts};
use thunder_dashboard::Extension;
use thunder_node::agent::{Agent, AgentOptions, ApiSettings, DEFAULT_PORT, Desk, Status};
use thunder_node::joining::server::check_name;
use thunder_node::joining::token::Token;
use thunder_node::storage::{DataFolder, StorageError};
use thunder_server::Certificate;
use tokio::signal::unix::{SignalKind, signal};

use crate::admin::Admin;
use crate::admin::downloads::Downloads;
use crate::desk::StoreDesk;
use crate::key_args::KeyArgs;
use crate::limit_args::LimitArgs;
use crate::log;
use crate::mac_command::keep_awake;
use crate::reload::{Hangups, Reload, Reloaded, Settings};
use crate::serve::gateway_runtime;
use crate::signin::{Door, SignInArgs};
use crate::store_args::{KeepArgs, TraceArgs, introduction};

/// Make this machine a node of a cluster
///
/// Runs until Ctrl-C. The first node of a cluster needs no option. Each further node shows a code;
/// run `thunder cluster approve CODE` on any node that is already a member. Nodes on one network
/// find each other by multicast; on other networks use --join.
#[derive(Args)]
// A node holds the bodies of all its requests until they are answered, and two files for each.
#[command(mut_arg("max_connections", |arg| arg.default_value("512")))]
pub struct UpCommand {
    #[command(flatten)]
    data: DataArgs,
    /// Name of this node in the cluster [default: the machine's name]
    #[arg(long, value_name = "NAME", value_parser = |name: &str| check_name(name.to_owned()))]
    name: Option<String>,
    /// Address or port to listen on for other nodes, e.g. 10.0.0.5, 10.0.0.5:7480 or 7480 [default:
    /// port 7470 of all addresses]
    ///
    /// Port 0 chooses a free port. A stranger that connects can only begin a handshake.
    #[arg(long, value_name = "ADDRESS", value_parser = parse_listen)]
    listen: Option<SocketAddr>,
    /// Address of a node of the cluster to join, as HOST:PORT; may be repeated
    ///
    /// For networks without multicast. This node then waits for approval there.
    #[arg(long, value_name = "ADDRESS", value_parser = parse_join)]
    join: Vec<String>,
    /// Token from `thunder cluster token`, to join without approval by a person
    ///
    /// If the node that issued the token refuses it (because it was used, has expired or is
    /// unknown), the command ends with an error. If this machine is already in a cluster, the token
    /// is ignored. Use THUNDER_TOKEN to keep the token out of the process list.
    #[arg(long, value_name = "TOKEN", env = "THUNDER_TOKEN", hide_env_values = true)]
    token: Option<Token>,
    /// Address on which to serve the API; 0.0.0.0 accepts other machines and requires a key:
    /// `thunder keys create`, or --api-key
    ///
    /// Every node accepts requests for every model of the cluster, with the cluster's keys and
    /// limits.
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1")]
    host: IpAddr,
    /// Port of the API; 0 chooses a free port
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
    #[command(flatten)]
    limits: LimitArgs,
    /// Watts that this machine draws when idle and when busy, e.g. 40,180; for /admin/energy on
    /// machines without a readable power counter
    #[arg(long, value_name = "IDLE,BUSY")]
    watts: Option<Watts>,
    /// Do not announce this node, and do not search for others by multicast
    #[arg(long)]
    no_discovery: bool,
}

/// Where a node keeps its key and the cluster's document.
#[derive(Args, Debug, Clone)]
pub struct DataArgs {
    /// Folder with the node's key and the cluster's document [default: thunderhead/node in the
    /// user's data folder]
    ///
    /// Each `thunder up` on a machine needs its own folder.
    #[arg(long, value_name = "FOLDER", env = "THUNDER_DATA", global = true)]
    data: Option<PathBuf>,
}

impl DataArgs {
    /// The folder that was given.
    pub fn given(&self) -> Option<&Path> {
        self.data.as_deref()
    }

    /// The folder.
    ///
    /// # Errors
    /// When none is given and the user has no home.
    pub fn folder(&self) -> anyhow::Result<PathBuf> {
        if let Some(folder) = &self.data {
            return Ok(folder.clone());
        }
        let base = etcetera::choose_base_strategy().context("no home folder: name a folder by --data")?;
        Ok(base.data_dir().join("thunderhead").join("node"))
    }
}

fn parse_listen(text: &str) -> Result<SocketAddr, String> {
    let any = IpAddr::from([0u16; 8]);
    let address = text
        .parse::<SocketAddr>()
        .ok()
        .or_else(|| text.parse::<IpAddr>().ok().map(|ip| SocketAddr::new(ip, DEFAULT_PORT)))
        .or_else(|| text.parse::<u16>().ok().map(|port| SocketAddr::new(any, port)));
    address.ok_or_else(|| "write an address, an address with a port, or a port".to_owned())
}

/// A node's address as it was written; a name may have an address only later.
fn parse_join(text: &str) -> Result<String, String> {
    let parts = text.rsplit_once(':').filter(|(host, _)| {
        let is_v6 = host.strip_prefix('[').and_then(|host| host.strip_suffix(']'));
        let is_name =
            |host: &str| host.chars().all(|letter| letter.is_alphanumeric() || "-._".contains(letter));
        is_v6.map_or(!host.is_empty() && is_name(host), |v6| v6.parse::<std::net::Ipv6Addr>().is_ok())
    });
    let port = parts.and_then(|(_, port)| port.parse::<u16>().ok()).filter(|port| *port > 0);
    port.map(|_| text.to_owned()).ok_or_else(|| {
        format!("write HOST:PORT, the address and port of a node, e.g. 10.0.0.1:{DEFAULT_PORT} or [fd00::1]:{DEFAULT_PORT}")
    })
}

impl UpCommand {
    /// Refuses addresses, origins and files with which the node would not start.
    ///
    /// # Errors
    /// Names the option, its value and what to do.
    pub fn check(&self) -> anyhow::Result<()> {
        self.limits.check().context("--allow-origin")?;
        self.traces.check()?;
        self.sign_in.check()?;
        self.keep.check()
    }

    /// Runs the command.
    pub fn run(self) -> anyhow::Result<()> {
        raise_open_files();
        self.check()?;
        let data = self.data.folder()?;
        let any = SocketAddr::new(IpAddr::from([0u16; 8]), DEFAULT_PORT);
        let kept = self.keep.open_of_node(self.data.given(), &self.host.to_string());
        let kept = kept.map_err(|error| in_use(&data).unwrap_or(error))?;
        let hangups = Hangups::catch()?;
        let settings = Settings::at_start()?;
        let door = self.sign_in.open(kept.access.as_ref())?;
        door.iter().for_each(Door::put_in_force);
        let power = Some(Arc::new(PowerWatch::start(self.watts)));
        let runtime = gateway_runtime()?;
        // Its certificate is looked for on it.
        let in_runtime = runtime.enter();
        let (tls, traces) = (kept.certificate.as_ref().map(Certificate::tls), self.traces.open()?);
        let access = kept.access.clone();
        let process = Arc::new_cyclic(|process: &Weak<Node>| {
            let process: Weak<dyn Reload> = process.clone();
            let node = Some(data.clone());
            let admin = Admin { process, downloads: Downloads::default(), power, door, node };
            let extension: Arc<dyn Extension> = Arc::new(admin.clone());
            let (keys, needs_keys) = (self.keys.api_keys, admin.door.is_some());
            let api = ApiSettings {
                keys,
                needs_keys,
                tls,
                traces,
                extension: Some(extension),
                limits: self.limits.of_node(),
                allowed_origins: self.limits.allowed_origins,
            };
            Node { settings, access, agent: OnceLock::new(), parts: Mutex::new(Parts { admin, api }) }
        });
        let desk = kept.access.clone().map(|access| Arc::new(StoreDesk(access)) as Arc<dyn Desk>);
        let options = AgentOptions {
            name: self.name.unwrap_or_else(machine_name),
            listen: self.listen.unwrap_or_else(|| if has_ipv6() { any } else { v4(any.port()) }),
            join: self.join,
            token: self.token,
            discover: !self.no_discovery,
            api: Some(SocketAddr::new(self.host, self.port)),
            api_settings: process.parts().api.clone(),
            access: kept.access,
            desk,
            local_socket: kept.socket,
            program: std::env::current_exe().context("cannot find this program")?,
            // A test runs two versions without building two programs.
            version: std::env::var("THUNDER_TEST_VERSION").ok(),
            models: thunder_hub::PullOptions::from_env(),
            data: data.clone(),
        };
        drop(in_runtime);
        runtime.block_on(serve(options, &data, kept.certificate, &process, hangups))
    }
}

/// The likelier reason why this node's store cannot be opened: another agent has its data folder.
fn in_use(data: &Path) -> Option<anyhow::Error> {
    let opened = data.exists().then(|| DataFolder::open(data))?;
    opened.err().filter(|error| matches!(error, StorageError::InUse { .. })).map(Into::into)
}

/// A node that runs.
struct Node {
    settings: Settings,
    access: Option<Access>,
    /// Once it has started.
    agent: OnceLock<Agent>,
    parts: Mutex<Parts>,
}

/// What the API of a node is made of.
#[derive(Clone)]
struct Parts {
    admin: Admin,
    api: ApiSettings,
}

impl Node {
    fn parts(&self) -> MutexGuard<'_, Parts> {
        self.parts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Puts settings in force. Steps that can fail come before steps that change anything. Returns
    /// a new certificate.
    fn renew(&self, command: UpCommand, changed: &Reloaded) -> anyhow::Result<Option<Certificate>> {
        let agent = self.agent.get().context("the node starts: ask again when it has")?;
        command.check()?;
        let mut parts = self.parts().clone();
        let mut certificate = None;
        if changed.touches("tls") {
            let host = command.host.to_string();
            certificate = command.keep.certificate_of_node(command.data.given(), &host)?;
            parts.api.tls = certificate.as_ref().map(Certificate::tls);
        }
        if changed.touches("otlp") {
            parts.api.traces = command.traces.open()?;
        }
        if changed.touches("oidc-") {
            // If sign-in is turned off, requests still need a key until a restart.
            parts.admin.door = command.sign_in.open(self.access.as_ref())?;
            parts.admin.door.iter().for_each(Door::look);
        }
        (parts.api.keys, parts.api.needs_keys) = (command.keys.api_keys, parts.admin.door.is_some());
        (parts.api.limits, parts.api.allowed_origins) =
            (command.limits.of_node(), command.limits.allowed_origins);
        parts.api.extension = Some(Arc::new(parts.admin.clone()));
        agent.renew_api(parts.api.clone())?;
        parts.admin.door.iter().for_each(|door| door.close());
        *self.parts() = parts;
        if let Some(access) = &self.access {
            command.keep.renew(access);
        }
        Ok(certificate)
    }
}

impl Reload for Node {
    fn reload(&self) -> anyhow::Result<Reloaded> {
        self.settings.reload(|options, changed| self.renew(UpCommand::from_arg_matches(options)?, changed))
    }

    fn settings(&self) -> Value {
        self.settings.shown()
    }
}

/// Open files of the agent: two for each request that it passes on, besides nodes and strangers.
const OPEN_FILES: u64 = 16_384;

/// Raises the limit of open files as far as the system lets this user.
fn raise_open_files() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    let wanted = maximum.map_or(OPEN_FILES, |maximum| maximum.min(OPEN_FILES));
    if current.is_some_and(|current| current < wanted)
        && let Err(error) = setrlimit(Resource::Nofile, Rlimit { current: Some(wanted), maximum })
    {
        tracing::warn!("the limit of open files stays at {current:?}: {error}");
    }
}

fn v4(port: u16) -> SocketAddr {
    SocketAddr::from(([0, 0, 0, 0], port))
}

/// Whether this machine has IPv6. A socket for it also takes IPv4.
fn has_ipv6() -> bool {
    std::net::UdpSocket::bind("[::]:0").is_ok()
}

/// The machine's name, without its domain.
pub fn machine_name() -> String {
    let name = rustix::system::uname();
    let name = name.nodename().to_string_lossy();
    let short = name.split('.').next().unwrap_or_default();
    check_name(short.to_owned()).unwrap_or_else(|_| "node".to_owned())
}

async fn serve(
    options: AgentOptions,
    data: &Path,
    certificate: Option<Certificate>,
    process: &Arc<Node>,
    hangups: Option<Hangups>,
) -> anyhow::Result<()> {
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut terminate = signal(SignalKind::terminate())?;
    let agent = Agent::start(options).await?;
    // It is set once, here.
    let _ = process.agent.set(agent.clone());
    if let Some(hangups) = hangups {
        let reloaded: Weak<dyn Reload> = Arc::downgrade(process) as _;
        tokio::spawn(hangups.heed(reloaded, process.access.clone()));
    }
    let _awake = keep_awake();
    let (mut changes, mut ending) = (agent.changes(), agent.ending());
    if let Some(api) = agent.api() {
        let scheme = if certificate.is_some() { "https" } else { "http" };
        log::say(format_args!(
            "the models of the cluster are at {scheme}://{api}/v1, the dashboard at {scheme}://{api}/"
        ));
    }
    if let Some(certificate) = &certificate {
        log::say(introduction(certificate));
    }
    log::say(format_args!(
        "node {} listens on {}; data in {}",
        agent.id().short(),
        agent.address(),
        data.display()
    ));
    let mut shown = Shown::default();
    loop {
        changes.mark_unchanged();
        shown.update(&agent.status());
        tokio::select! {
            _ = changes.changed() => {}
            _ = ending.wait_for(|ending| *ending) => break,
            _ = interrupt.recv() => break,
            _ = terminate.recv() => break,
        }
    }
    let failure = agent.failure();
    let ending = tokio::task::spawn_blocking(move || agent.end_ranks());
    // A second signal does not wait for the ranks, which the guards then end.
    tokio::select! {
        _ = ending => {}
        _ = interrupt.recv() => std::process::exit(130),
        _ = terminate.recv() => std::process::exit(143),
    }
    failure.map_or(Ok(()), |why| Err(anyhow::Error::msg(why)))
}

/// What was last printed.
#[derive(Default)]
struct Shown {
    last: Option<Status>,
}

impl Shown {
    /// Prints what is new.
    fn update(&mut self, status: &Status) {
        let last = self.last.take();
        let before = |id| last.as_ref().and_then(|last| last.members.iter().find(|m| m.id == id));
        if status.removed && last.as_ref().is_none_or(|last| !last.removed) {
            log::say(format_args!(
                "this node was removed from its cluster; `thunder cluster leave` makes it a new node"
            ));
        }
        if let Some(code) = &status.code
            && last.as_ref().is_none_or(|last| last.code.is_none())
        {
            log::say(format_args!(
                "to add this machine to a cluster, type on one of its nodes:\n    thunder cluster approve {code}"
            ));
        }
        for newcomer in &status.newcomers {
            let known = |last: &Status| last.newcomers.iter().any(|known| known.short == newcomer.short);
            if !last.as_ref().is_some_and(known) {
                let name = &newcomer.name;
                log::say(format_args!(
                    "{name} is in sight: approve the code that it shows to make it a node of this cluster"
                ));
            }
        }
        for member in status.members.iter().filter(|member| member.id != status.me) {
            let was_up = before(member.id).map(|before| before.up);
            match (was_up, member.up) {
                (None | Some(false), true) => log::say(format_args!("{} is up", member.name)),
                (Some(true), false) => log::say(format_args!("{} is down", member.name)),
                (None, false) => log::say(format_args!("{} is a member, not reached yet", member.name)),
                _ => {}
            }
        }
        for model in &status.models {
            let was_ready = last.as_ref().and_then(|last| last.models.iter().find(|m| m.name == model.name));
            let was_ready = was_ready.is_some_and(|model| model.ready);
            match (was_ready, model.ready) {
                (false, true) => {
                    let nodes: Vec<&str> = model.ranks.iter().map(|rank| rank.node.as_str()).collect();
                    log::say(format_args!("{} is ready on {}", model.name, nodes.join(", ")));
                }
                (true, false) => log::say(format_args!("{} is not ready any more", model.name)),
                _ => {}
            }
        }
        self.last = Some(status.clone());
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
    use super::*;

    #[test]
    fn a_data_folder_that_another_agent_has_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let data = folder.path().join("data");
        assert!(in_use(&data).is_none() && !data.exists());
        let agent = DataFolder::open(&data).unwrap();
        let why = in_use(&data).unwrap().to_string();
        assert!(why.contains("an agent runs already") && why.contains("--data"), "{why}");
        drop(agent);
        assert!(in_use(&data).is_none());
    }

    #[test]
    fn an_address_to_join_has_a_host_and_a_port() {
        for good in ["10.0.0.1:7470", "studio.local:7470", "[fd00::1]:7470", "my_host-2:1"] {
            assert_eq!(parse_join(good), Ok(good.to_owned()));
        }
        for wrong in [
            "nonsense",
            "10.0.0.1",
            "a:0",
            "a:65536",
            ":7470",
            "fd00::1",
            "[x]:7470",
            "http://a:80",
            "a b:1",
            "",
        ] {
            assert!(parse_join(wrong).is_err_and(|why| why.contains("HOST:PORT")), "{wrong}");
        }
    }
}
