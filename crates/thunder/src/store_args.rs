//! Options of a server's store and of HTTPS, shared by the commands that serve.

use std::path::{Path, PathBuf};

use anyhow::Context;
use clap::Args;
use etcetera::BaseStrategy;
use thunder_access::{Access, Retention, private};
use thunder_server::Certificate;
use thunder_traces::{Traces, TracesError};

/// The socket for local commands, in the store's folder.
pub const SOCKET: &str = "admin.sock";
/// Variable with the file of the key of kept prompts.
pub const PROMPTS_KEY: &str = "THUNDER_PROMPTS_KEY";

/// Folder of a server's keys, limits, usage and audit log.
#[derive(Args, Debug, Clone)]
pub struct StoreArgs {
    /// Folder with the server's keys, limits, usage and audit log [default: thunderhead/server in
    /// the user's data folder, if `thunder keys create` or `thunder config init` has made it]
    ///
    /// Only one server at a time can use a folder.
    #[arg(long, value_name = "FOLDER", env = "THUNDER_STORE", global = true)]
    pub store: Option<PathBuf>,
}

impl StoreArgs {
    /// The folder, which need not exist.
    ///
    /// # Errors
    /// When none is given and the user has no home.
    pub fn folder(&self) -> anyhow::Result<PathBuf> {
        if let Some(folder) = &self.store {
            return Ok(folder.clone());
        }
        let base = etcetera::choose_base_strategy().context("no home folder: name a folder by --store")?;
        Ok(base.data_dir().join("thunderhead").join("server"))
    }

    /// The folder of a node's store in the node's data folder, if that was given.
    ///
    /// # Errors
    /// When none is given and the user has no home.
    pub fn folder_of_node(&self, data: Option<&Path>) -> anyhow::Result<PathBuf> {
        match (&self.store, data) {
            (None, Some(data)) => Ok(data.join(thunder_node::storage::STORE)),
            _ => self.folder(),
        }
    }
}

/// A server's stored data, and its HTTPS settings.
#[derive(Args)]
pub struct KeepArgs {
    #[command(flatten)]
    store: StoreArgs,
    /// File with settings for these options [default: config.toml in the --store folder, for
    /// `thunder up` node.toml, if it is there]
    ///
    /// `thunder config init` writes such a file. Options on the command line override it.
    #[arg(long, value_name = "FILE", env = "THUNDER_CONFIG")]
    config: Option<PathBuf>,
    /// Do not use a store, even if there is one: no keys except --api-key, no limits, no usage
    #[arg(long)]
    no_store: bool,
    /// Days to keep single requests of the usage report; sums are kept for --keep-usage
    #[arg(long, value_name = "DAYS", default_value_t = 30)]
    keep_requests: u32,
    /// Days to keep sums of usage (for each hour, key and model)
    #[arg(long, value_name = "DAYS", default_value_t = 1100)]
    keep_usage: u32,
    /// File with the key that encrypts kept prompts (`thunder audit keep`) [default: prompts.key in
    /// the --store folder, created when needed]
    ///
    /// Use another disk than the store's, so that the store's disk alone cannot be decrypted. Each
    /// node of a cluster has its own key.
    #[arg(long, value_name = "FILE", env = PROMPTS_KEY)]
    prompts_key: Option<PathBuf>,
    /// Serve HTTPS with a certificate that the server makes at its first start, in the --store
    /// folder
    ///
    /// Clients must trust its file tls-cert.pem. Use --tls-cert if you have a certificate that they
    /// already trust.
    #[arg(long, conflicts_with = "tls_cert")]
    tls: bool,
    /// Serve HTTPS with this certificate: a PEM file with the chain to its authority
    ///
    /// A renewed file takes effect within seconds, without a restart.
    #[arg(long, value_name = "FILE", requires = "tls_key")]
    tls_cert: Option<PathBuf>,
    /// The private key of --tls-cert, a PEM file
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    tls_key: Option<PathBuf>,
}

/// Destination of the traces of requests.
#[derive(Args)]
pub struct TraceArgs {
    /// Address of an OpenTelemetry collector that receives traces of requests (OTLP over HTTP),
    /// e.g. http://127.0.0.1:4318
    ///
    /// A trace shows the request's stages gateway, queue, prefill and decode, and each rank's work
    /// in prefill and decode. A node of a cluster sends the traces of the requests at its own
    /// gateway.
    #[arg(long, value_name = "URL", env = "OTEL_EXPORTER_OTLP_ENDPOINT")]
    otlp: Option<String>,
    /// Header for the collector as NAME=VALUE; may be repeated
    #[arg(
        long,
        value_name = "NAME=VALUE",
        env = "OTEL_EXPORTER_OTLP_HEADERS",
        value_delimiter = ',',
        hide_env_values = true
    )]
    otlp_header: Vec<String>,
}

impl TraceArgs {
    /// Refuses what [`TraceArgs::open`] would refuse, without sending.
    ///
    /// # Errors
    /// When the address or a header is malformed.
    pub fn check(&self) -> anyhow::Result<()> {
        let Some(address) = self.otlp.as_ref().filter(|address| !address.is_empty()) else { return Ok(()) };
        Traces::check(address, &self.otlp_header).map(drop).map_err(|error| {
            let name = if matches!(error, TracesError::Header(_)) { "--otlp-header" } else { "--otlp" };
            anyhow::Error::from(error).context(name)
        })
    }

    /// Starts to send, if there is a collector.
    ///
    /// # Errors
    /// When the address or a header is malformed.
    pub fn open(&self) -> anyhow::Result<Option<Traces>> {
        let service = std::env::var("OTEL_SERVICE_NAME").unwrap_or_else(|_| "thunder".to_owned());
        let start = |address: &String| Traces::start(address, &self.otlp_header, &service);
        Ok(self.otlp.as_ref().filter(|address| !address.is_empty()).map(start).transpose()?)
    }
}

/// What [`KeepArgs`] open.
#[derive(Default)]
pub struct Kept {
    /// The store.
    pub access: Option<Access>,
    /// The socket for local commands.
    pub socket: Option<PathBuf>,
    /// The certificate.
    pub certificate: Option<Certificate>,
}

impl KeepArgs {
    /// Refuses files that cannot be used: a certificate that is missing or does not belong to its
    /// key, a folder that is missing. Makes nothing.
    ///
    /// # Errors
    /// Names the option.
    pub fn check(&self) -> anyhow::Result<()> {
        if let (Some(certificate), Some(key)) = (&self.tls_cert, &self.tls_key) {
            Certificate::open(certificate, key).context("--tls-cert")?;
        }
        if let Some(folder) = self.prompts_key.as_deref().and_then(Path::parent) {
            let is_there = folder.as_os_str().is_empty() || folder.is_dir();
            anyhow::ensure!(
                is_there,
                "--prompts-key: the folder {} is not there: make it first",
                folder.display()
            );
        }
        Ok(())
    }

    /// Opens the store and the certificate. At most `at_once` answers are computed in parallel;
    /// `host` is the server's name for clients.
    ///
    /// # Errors
    /// When the store is in use or damaged, or the certificate cannot be used.
    pub fn open(&self, at_once: usize, host: &str) -> anyhow::Result<Kept> {
        anyhow::ensure!(
            !(self.no_store && self.tls),
            "--tls keeps its certificate in the store: leave out --no-store, or give --tls-cert and --tls-key"
        );
        let folder = self.store.folder();
        let wanted = self.store.store.is_some() || self.tls;
        let found = folder.as_ref().is_ok_and(|folder| Access::exists(folder));
        let mut kept = Kept::default();
        if !self.no_store && (wanted || found) {
            let folder = folder?;
            let access = Access::open(&folder, self.retention(), Some(at_once));
            let access =
                access.context("choose another --store, or --no-store for a server that keeps nothing")?;
            self.use_prompts_key(&access);
            kept.socket = Some(folder.join(SOCKET));
            kept.access = Some(access);
        }
        kept.certificate = self.certificate(host)?;
        Ok(kept)
    }

    /// Opens the store and the certificate of a node, whose data folder is `data` if one was given.
    /// A node always has a store, because keys may come from the cluster.
    ///
    /// # Errors
    /// When the store is in use or damaged, or the certificate cannot be used.
    pub fn open_of_node(&self, data: Option<&Path>, host: &str) -> anyhow::Result<Kept> {
        let folder = self.store.folder_of_node(data)?;
        let mut kept = Kept::default();
        if !self.no_store {
            let access = Access::open(&folder, self.retention(), None);
            let access = access.context("choose another --store for this node")?;
            self.use_prompts_key(&access);
            kept.access = Some(access);
            kept.socket = Some(folder.join(SOCKET));
        }
        kept.certificate = self.certificate_of_node(data, host)?;
        Ok(kept)
    }

    fn retention(&self) -> Retention {
        Retention { records_days: self.keep_requests, sums_days: self.keep_usage }
    }

    /// Keeps usage as long as these options say.
    pub fn renew(&self, access: &Access) {
        access.retain(self.retention());
    }

    /// Encrypts kept prompts with the given key file.
    fn use_prompts_key(&self, access: &Access) {
        if let Some(key) = &self.prompts_key {
            access.use_prompts_key(key.clone());
        }
    }

    /// The certificate of a server; `host` is the server's name for clients.
    ///
    /// # Errors
    /// When it cannot be read or made.
    pub fn certificate(&self, host: &str) -> anyhow::Result<Option<Certificate>> {
        self.certificate_in(host, self.store.folder().ok())
    }

    /// The certificate of a node, whose data folder is `data` if one was given.
    ///
    /// # Errors
    /// When it cannot be read or made.
    pub fn certificate_of_node(
        &self,
        data: Option<&Path>,
        host: &str,
    ) -> anyhow::Result<Option<Certificate>> {
        self.certificate_in(host, Some(self.store.folder_of_node(data)?))
    }

    fn certificate_in(&self, host: &str, folder: Option<PathBuf>) -> anyhow::Result<Option<Certificate>> {
        if let (Some(certificate), Some(key)) = (&self.tls_cert, &self.tls_key) {
            return Ok(Some(Certificate::open(certificate, key)?));
        }
        if !self.tls {
            return Ok(None);
        }
        let mut names = vec![crate::up::machine_name()];
        // The address for all interfaces is not a name of this machine.
        let is_name = host.parse::<std::net::IpAddr>().map_or(true, |address| !address.is_unspecified());
        names.extend(is_name.then(|| host.to_owned()));
        let folder = folder.context("no home folder: name a folder by --store")?;
        private::make_folder(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
        Ok(Some(Certificate::self_signed(&folder, &names)?))
    }
}

/// How people can trust a certificate.
pub fn introduction(certificate: &Certificate) -> String {
    let (path, fingerprint) = (certificate.path().display(), certificate.fingerprint());
    format!("the certificate {path} has the SHA-256 fingerprint\n    {fingerprint}")
}
