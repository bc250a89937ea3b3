//! Host files in MLX's JSON: machines, their addresses, and the RDMA device from each machine
//! towards each other.
//!
//! Both forms are read: a bare list of hosts, and an object with `backend`, `envs` and `hosts`.
//!
//! ```
//! let text = r#"{"backend": "jaccl", "envs": ["MLX_METAL_FAST_SYNCH=1"], "hosts": [
//!     {"ssh": "mac1", "ips": ["10.0.0.1"], "rdma": [null, "rdma_en2"]},
//!     {"ssh": "mac2", "ips": ["10.0.0.2"], "rdma": [["rdma_en2", "rdma_en3"], null]}]}"#;
//! let hostfile = thunder_cluster::hostfile::Hostfile::parse(text)?;
//! assert_eq!(hostfile.hosts[1].ssh, "mac2");
//! # Ok::<(), thunder_cluster::hostfile::HostfileError>(())
//! ```

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize, Serializer};
use serde_json::Value;

/// A host file.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize)]
pub struct Hostfile {
    /// The backend that the file asks for, if any.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub backend: Option<String>,
    /// `NAME=VALUE` for every rank.
    #[serde(rename = "envs", serialize_with = "as_pairs")]
    pub envs: Vec<(String, String)>,
    /// One entry per rank, in rank order.
    pub hosts: Vec<Host>,
}

/// One entry of a host file.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Host {
    /// The machine's name for `ssh`.
    pub ssh: String,
    /// Addresses at which the other ranks reach the machine.
    pub ips: Vec<String>,
    /// The devices towards each rank; empty without RDMA.
    pub rdma: Vec<Devices>,
}

/// The RDMA devices from one host towards another.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Devices {
    /// No cable, or the host itself: JSON `null`.
    None,
    /// One device.
    One(String),
    /// Several cables.
    Several(Vec<String>),
}

/// What is wrong with a host file. Entries are counted from 0, like ranks.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum HostfileError {
    /// The file cannot be read.
    #[error("the host file cannot be read: {why}")]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// The system's error.
        why: String,
    },
    /// The file is not JSON.
    #[error("the host file is not JSON: {0}")]
    NotJson(String),
    /// A value is not of the expected kind.
    #[error("{at} in the host file is {found}: {expected}")]
    Entry {
        /// Path of the value, e.g. `hosts[1].rdma[0]`.
        at: String,
        /// The value.
        found: String,
        /// What was expected.
        expected: &'static str,
    },
    /// The RDMA devices do not form the matrix that JACCL needs.
    #[error("host file, hosts[{index}] ({ssh}): {why}")]
    Rdma {
        /// The entry.
        index: usize,
        /// The entry's name.
        ssh: String,
        /// What is missing or superfluous.
        why: String,
    },
}

impl Hostfile {
    /// Reads a file.
    ///
    /// # Errors
    /// When the file cannot be read or is malformed.
    pub fn read(path: &Path) -> Result<Self, HostfileError> {
        let text = std::fs::read_to_string(path)
            .map_err(|error| HostfileError::Unreadable { path: path.to_owned(), why: error.to_string() })?;
        Self::parse(&text)
    }

    /// Reads the text of a file.
    ///
    /// # Errors
    /// Names the entry that is malformed.
    pub fn parse(text: &str) -> Result<Self, HostfileError> {
        let value: Value =
            serde_json::from_str(text).map_err(|error| HostfileError::NotJson(error.to_string()))?;
        let (backend, envs, hosts) = match &value {
            Value::Array(_) => (None, Vec::new(), &value),
            Value::Object(object) => {
                let backend = match object.get("backend") {
                    None | Some(Value::Null) => None,
                    Some(backend) => Some(string("backend", backend)?).filter(|name| !name.is_empty()),
                };
                let envs = match object.get("envs") {
                    None | Some(Value::Null) => Vec::new(),
                    Some(envs) => list("envs", envs)?
                        .iter()
                        .enumerate()
                        .map(|(index, entry)| variable(&format!("envs[{index}]"), entry))
                        .collect::<Result<_, _>>()?,
                };
                let hosts = object
                    .get("hosts")
                    .ok_or_else(|| wrong("the object", &value, "it needs \"hosts\", a list of hosts"))?;
                (backend, envs, hosts)
            }
            _ => {
                return Err(wrong(
                    "the top level",
                    &value,
                    "expected a list of hosts, or an object with one",
                ));
            }
        };
        let entries = list("hosts", hosts)?;
        if entries.is_empty() {
            return Err(wrong("hosts", hosts, "expected at least one host"));
        }
        let hosts = entries.iter().enumerate().map(host).collect::<Result<_, _>>()?;
        Ok(Self { backend, envs, hosts })
    }

    /// The file's text, as an object.
    pub fn to_json(&self) -> String {
        // Strings and lists of strings always serialise.
        serde_json::to_value(self).map(|value| value.to_string()).unwrap_or_default()
    }

    /// Checks that the devices form JACCL's matrix: a row per host and an entry per host in it,
    /// `null` towards the host itself, and a device towards every other host (with `ring`: towards
    /// both neighbours).
    ///
    /// # Errors
    /// Names the first host whose row is wrong.
    pub fn check_rdma(&self, ring: bool) -> Result<(), HostfileError> {
        let count = self.hosts.len();
        for (index, host) in self.hosts.iter().enumerate() {
            let fail = |why: String| Err(HostfileError::Rdma { index, ssh: host.ssh.clone(), why });
            if host.rdma.len() != count {
                let why = format!(
                    "\"rdma\" has {} entries for {count} hosts; give one per host, null for itself",
                    host.rdma.len()
                );
                return fail(why);
            }
            if host.rdma[index] != Devices::None {
                return fail(format!("\"rdma\" entry {index} is the host itself and must be null"));
            }
            let neighbours = [(index + count - 1) % count, (index + 1) % count];
            let needed = |other: &usize| *other != index && (!ring || neighbours.contains(other));
            if let Some(other) = (0..count).filter(needed).find(|other| host.rdma[*other] == Devices::None) {
                return fail(format!(
                    "no RDMA device towards hosts[{other}] ({}); name it in \"rdma\" entry {other}",
                    self.hosts[other].ssh
                ));
            }
        }
        Ok(())
    }
}

/// Splits `NAME=VALUE`. `None` if a shell could not export the name.
pub fn split_variable(text: &str) -> Option<(String, String)> {
    let (name, value) = text.split_once('=')?;
    let mut letters = name.chars();
    let first = letters.next()?;
    let valid = (first.is_ascii_alphabetic() || first == '_')
        && letters.all(|letter| letter.is_ascii_alphanumeric() || letter == '_')
        && !value.contains('\0');
    valid.then(|| (name.to_owned(), value.to_owned()))
}

/// Whether `name` can be passed to `ssh` as a host: not taken for an option, and without spaces or
/// commas.
pub fn is_host_name(name: &str) -> bool {
    !name.is_empty()
        && !name.starts_with('-')
        && !name.chars().any(|letter| letter.is_whitespace() || letter.is_control() || letter == ',')
}

fn host((index, entry): (usize, &Value)) -> Result<Host, HostfileError> {
    let at = format!("hosts[{index}]");
    let Value::Object(object) = entry else {
        return Err(wrong(&at, entry, "expected an object with \"ssh\", and if known \"ips\" and \"rdma\""));
    };
    let ssh = object
        .get("ssh")
        .ok_or_else(|| wrong(&at, entry, "\"ssh\" is missing: the machine's name for ssh"))?;
    let name = string(&format!("{at}.ssh"), ssh)?;
    if !is_host_name(&name) {
        return Err(wrong(
            &format!("{at}.ssh"),
            ssh,
            "expected a host name without spaces or a leading dash",
        ));
    }
    let ips = rows(object.get("ips"), &format!("{at}.ips"), |at, value| {
        let address = string(at, value)?;
        if address.is_empty() || address.contains(|letter: char| letter.is_whitespace() || letter == '/') {
            return Err(wrong(at, value, "expected an address such as \"10.0.0.1\""));
        }
        Ok(address)
    })?;
    let rdma = rows(object.get("rdma"), &format!("{at}.rdma"), devices)?;
    Ok(Host { ssh: name, ips, rdma })
}

fn devices(at: &str, value: &Value) -> Result<Devices, HostfileError> {
    const EXPECTED: &str = "expected null, the name of a device, or a list of names";
    let name = |value: &Value| {
        let name = value.as_str().filter(|name| !name.is_empty());
        name.map(str::to_owned).ok_or_else(|| wrong(at, value, EXPECTED))
    };
    match value {
        Value::Null => Ok(Devices::None),
        Value::String(_) => name(value).map(Devices::One),
        Value::Array(names) if !names.is_empty() => {
            names.iter().map(name).collect::<Result<_, _>>().map(Devices::Several)
        }
        _ => Err(wrong(at, value, EXPECTED)),
    }
}

fn rows<T>(
    value: Option<&Value>,
    at: &str,
    read: impl Fn(&str, &Value) -> Result<T, HostfileError>,
) -> Result<Vec<T>, HostfileError> {
    match value {
        None | Some(Value::Null) => Ok(Vec::new()),
        Some(value) => list(at, value)?
            .iter()
            .enumerate()
            .map(|(index, entry)| read(&format!("{at}[{index}]"), entry))
            .collect(),
    }
}

fn list<'a>(at: &str, value: &'a Value) -> Result<&'a Vec<Value>, HostfileError> {
    value.as_array().ok_or_else(|| wrong(at, value, "expected a list"))
}

fn string(at: &str, value: &Value) -> Result<String, HostfileError> {
    value.as_str().map(str::to_owned).ok_or_else(|| wrong(at, value, "expected a string"))
}

fn variable(at: &str, value: &Value) -> Result<(String, String), HostfileError> {
    let text = string(at, value)?;
    split_variable(&text).ok_or_else(|| wrong(at, value, "expected \"NAME=VALUE\""))
}

fn wrong(at: &str, value: &Value, expected: &'static str) -> HostfileError {
    const SHOWN: usize = 60;
    let mut found = value.to_string();
    if let Some((cut, _)) = found.char_indices().nth(SHOWN) {
        found.truncate(cut);
        found.push('…');
    }
    HostfileError::Entry { at: at.to_owned(), found, expected }
}

fn as_pairs<S: Serializer>(pairs: &[(String, String)], serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_seq(pairs.iter().map(|(name, value)| format!("{name}={value}")))
}
