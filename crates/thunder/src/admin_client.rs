//! Administers the store of a server: of the server on this machine through its socket, of another
//! one by its address. Opens the store itself if no server runs.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use clap::Args;
use serde_json::Value;
use thunder_access::{Access, AccessError, Retention};
use ureq::tls::{Certificate, PemItem, RootCerts, TlsConfig};

use crate::current_thread;
use crate::store_args::{PROMPTS_KEY, SOCKET, StoreArgs};
use crate::up::DataArgs;

/// Time for an answer to begin, and for each further part of it.
const ANSWER_LIMIT: Duration = Duration::from_secs(60);
/// A starting server has the folder open before its socket exists.
const START_LIMIT: Duration = Duration::from_secs(2);
/// Interval between two checks for its socket.
const RETRY: Duration = Duration::from_millis(20);
/// A longer answer is refused: exports of millions of requests are shorter.
const LONGEST_ANSWER_BYTES: u64 = 4 << 30;
/// The commands must never remove data that the server keeps longer.
const KEEP: Retention = Retention { records_days: u32::MAX, sums_days: u32::MAX };

/// Which server to administer.
#[derive(Args)]
pub struct AdminArgs {
    #[command(flatten)]
    pub store: StoreArgs,
    #[command(flatten)]
    data: DataArgs,
    #[command(flatten)]
    remote: RemoteArgs,
}

/// A server of another machine.
#[derive(Args, Debug, Clone, Default)]
pub struct RemoteArgs {
    /// Address of a server on another machine to administer, e.g. https://10.0.0.5:8000
    ///
    /// Needs an administrator's key in the variable THUNDER_API_KEY.
    #[arg(long, value_name = "URL", env = "THUNDER_URL", global = true)]
    url: Option<String>,
    /// PEM file with the certificate to trust at --url, for a server with --tls
    #[arg(long, value_name = "FILE", global = true)]
    ca: Option<PathBuf>,
}

impl AdminArgs {
    /// A server: the one on this machine, unless `remote` names another.
    pub fn new(store: StoreArgs, data: DataArgs, remote: RemoteArgs) -> Self {
        Self { store, data, remote }
    }

    /// The folder of the store; a node's store if its data folder was given.
    ///
    /// # Errors
    /// When none is given and the user has no home.
    pub fn folder(&self) -> anyhow::Result<PathBuf> {
        self.store.folder_of_node(self.data.given())
    }

    /// Asks, and reads a JSON answer.
    ///
    /// # Errors
    /// When no server answers, or it refuses.
    pub fn ask(&self, method: &str, path: &str, body: Option<&Value>) -> anyhow::Result<Value> {
        let bytes = self.ask_bytes(method, path, body)?;
        serde_json::from_slice(&bytes).context("the server's answer is not JSON: is it another program's?")
    }

    /// Asks, and reads an answer of any kind.
    ///
    /// # Errors
    /// When no server answers, or it refuses.
    pub fn ask_bytes(&self, method: &str, path: &str, body: Option<&Value>) -> anyhow::Result<Vec<u8>> {
        let body = body.map(Value::to_string).unwrap_or_default();
        let (status, bytes) = match &self.remote.url {
            Some(url) => self.remote.ask(url, method, path, &body)?,
            None => {
                let folder = self.folder()?;
                // A name with a typing error must not become a new store.
                if (method == "GET" || path == "/admin/backup") && !Access::exists(&folder) {
                    bail!(
                        "{} has no store: name its folder by --store, a node's by --data; \
                         `thunder keys create NAME` makes a store",
                        folder.display()
                    );
                }
                ask_local(&folder, method, path, &body)?
            }
        };
        if (200..300).contains(&status) {
            return Ok(bytes);
        }
        let error: Value = serde_json::from_slice(&bytes).unwrap_or_default();
        match error["error"]["message"].as_str() {
            Some(message) => bail!("{message}"),
            None => bail!("the server answers with status {status}"),
        }
    }

    /// Whether a server has the store open: one on another machine was named, or one runs here.
    ///
    /// # Errors
    /// When the folder cannot be used.
    pub fn is_served(&self) -> anyhow::Result<bool> {
        if self.remote.url.is_some() {
            return Ok(true);
        }
        let folder = self.folder()?;
        Ok(Access::exists(&folder) && matches!(Keeper::of(&folder)?, Keeper::Server(_)))
    }
}

impl RemoteArgs {
    fn ask(&self, url: &str, method: &str, path: &str, body: &str) -> anyhow::Result<(u16, Vec<u8>)> {
        let key = std::env::var("THUNDER_API_KEY").unwrap_or_default();
        let mut tls = TlsConfig::builder();
        if let Some(file) = &self.ca {
            let pem = std::fs::read(file).with_context(|| format!("cannot read {}", file.display()))?;
            let items = ureq::tls::parse_pem(&pem).filter_map(|item| match item {
                Ok(PemItem::Certificate(certificate)) => Some(certificate),
                _ => None,
            });
            let trusted: Vec<Certificate<'static>> = items.collect();
            if trusted.is_empty() {
                bail!("--ca {}: no certificate in PEM format", file.display());
            }
            tls = tls.root_certs(RootCerts::from(trusted));
        }
        let agent: ureq::Agent = ureq::Agent::config_builder()
            .http_status_as_error(false)
            .tls_config(tls.build())
            .timeout_connect(Some(Duration::from_secs(10)))
            .timeout_recv_response(Some(ANSWER_LIMIT))
            .build()
            .into();
        let url = format!("{}{path}", url.trim_end_matches('/'));
        let request = ureq::http::Request::builder().method(method).uri(&url);
        let request = request.header("content-type", "application/json");
        let request = match key.is_empty() {
            true => request,
            false => request.header("authorization", format!("Bearer {key}")),
        };
        let asked = || format!("cannot ask {url}");
        let response = agent.run(request.body(body.to_owned())?).map_err(|error| {
            let is_unknown = error.to_string().contains("UnknownIssuer");
            let remedy = if is_unknown { "; give the server's tls-cert.pem by --ca" } else { "" };
            anyhow::Error::from(error).context(asked() + remedy)
        })?;
        let status = response.status().as_u16();
        let mut bytes = Vec::new();
        let reader = response.into_body().into_reader();
        reader.take(LONGEST_ANSWER_BYTES).read_to_end(&mut bytes).with_context(asked)?;
        Ok((status, bytes))
    }
}

/// Who has a folder open.
enum Keeper {
    Server(UnixStream),
    /// Nobody has.
    Us(Access),
}

impl Keeper {
    fn of(folder: &Path) -> anyhow::Result<Self> {
        let (socket, began) = (folder.join(SOCKET), Instant::now());
        loop {
            if let Ok(stream) = UnixStream::connect(&socket) {
                return Ok(Self::Server(stream));
            }
            match Access::open(folder, KEEP, None) {
                Err(AccessError::InUse(_)) if began.elapsed() < START_LIMIT => std::thread::sleep(RETRY),
                opened => return Ok(Self::Us(opened?)),
            }
        }
    }
}

/// Asks the server that has the folder open, or opens it.
fn ask_local(folder: &Path, method: &str, path: &str, body: &str) -> anyhow::Result<(u16, Vec<u8>)> {
    let access = match Keeper::of(folder)? {
        Keeper::Server(stream) => {
            return ask_socket(stream, method, path, body)
                .with_context(|| format!("the server with {} does not answer", folder.display()));
        }
        Keeper::Us(access) => access,
    };
    if let Some(key) = std::env::var_os(PROMPTS_KEY) {
        access.use_prompts_key(key.into());
    }
    if method != "GET" && path != "/admin/backup" && access.is_shared()? {
        bail!("these keys and limits are a cluster's: start `thunder up` here, or ask another node by --url");
    }
    let runtime = current_thread::runtime()?;
    let method = method.parse().context("no method of HTTP")?;
    let asked = thunder_server::ask_store(access, method, path, body.to_owned());
    let (status, bytes) = runtime.block_on(asked).context("the store failed")?;
    Ok((status.as_u16(), bytes))
}

/// One exchange in HTTP/1.0, whose answer ends with the connection.
fn ask_socket(
    mut stream: UnixStream,
    method: &str,
    path: &str,
    body: &str,
) -> anyhow::Result<(u16, Vec<u8>)> {
    stream.set_read_timeout(Some(ANSWER_LIMIT))?;
    stream.set_write_timeout(Some(ANSWER_LIMIT))?;
    let length = body.len();
    write!(
        stream,
        "{method} {path} HTTP/1.0\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: \
         {length}\r\n\r\n{body}"
    )?;
    let mut answer = Vec::new();
    stream.take(LONGEST_ANSWER_BYTES).read_to_end(&mut answer)?;
    let end = answer.windows(4).position(|window| window == b"\r\n\r\n").context("its answer breaks off")?;
    let head = String::from_utf8_lossy(&answer[..end]).into_owned();
    let status = head.split(' ').nth(1).and_then(|status| status.parse().ok());
    let status = status.context("its answer is not HTTP")?;
    // An aborted list is shorter than announced, or its connection is reset, which is an error
    // above.
    let announced = head.lines().find_map(|line| {
        let (name, value) = line.split_once(':')?;
        name.eq_ignore_ascii_case("content-length").then(|| value.trim().parse::<usize>().ok())?
    });
    let body = answer.split_off(end + 4);
    if announced.is_some_and(|announced| announced != body.len()) {
        bail!("its answer breaks off");
    }
    Ok((status, body))
}

/// A part of a path: everything but letters, digits and a few signs as `%XX`.
pub fn encoded(text: &str) -> String {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.~".contains(&byte);
    text.bytes()
        .map(|byte| if plain(byte) { char::from(byte).to_string() } else { format!("%{byte:02X}") })
        .collect()
}

/// A query of the parameters that are given.
pub fn query(pairs: &[(&str, Option<String>)]) -> String {
    let given = pairs
        .iter()
        .filter_map(|(name, value)| value.as_ref().map(|value| format!("{name}={}", encoded(value))));
    let given: Vec<String> = given.collect();
    if given.is_empty() { String::new() } else { format!("?{}", given.join("&")) }
}
