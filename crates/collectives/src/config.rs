//! How a rank finds its group, and how patient it is: fields, and the environment variables that set them.

use std::net::{TcpListener, ToSocketAddrs};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use thunder_verbs::Mode;

use crate::link::rdma::RdmaConfig;
use crate::{InitError, Wire};

/// More would only take descriptors.
const MAX_CONNECTIONS: usize = 16;

/// Which transports a group may use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum TransportChoice {
    /// Shared memory inside a host; between hosts RDMA where `Config::rdma` has a device, else TCP.
    #[default]
    Auto,
    /// Shared memory only; a rank on another host is an error.
    Shm,
    /// TCP everywhere, also inside a host.
    Tcp,
    /// RDMA wherever `Config::rdma` has a device, also inside a host; the rest as `Auto`.
    Rdma,
}

impl std::str::FromStr for TransportChoice {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        match name {
            "auto" => Ok(Self::Auto),
            "shm" => Ok(Self::Shm),
            "tcp" => Ok(Self::Tcp),
            "rdma" => Ok(Self::Rdma),
            _ => Err("use auto, shm, tcp or rdma".to_owned()),
        }
    }
}

/// What [`crate::Group::init`] needs to know. Start from [`Config::new`] or [`Config::from_env`] and change fields.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Config {
    /// This rank, from 0.
    pub rank: usize,
    /// Number of ranks.
    pub size: usize,
    /// Where rank 0 listens, `host:port`.
    pub coordinator: String,
    /// What all ranks know and strangers do not. Needed as soon as the coordinator is not on loopback.
    pub secret: Vec<u8>,
    /// Which transports may be used.
    pub transport: TransportChoice,
    /// The RDMA devices that lead to other ranks.
    pub rdma: Option<RdmaConfig>,
    /// How long a rank that is alive may send nothing within an operation. Long enough for the slowest rank's compute
    /// between two operations; short enough that a stopped process is noticed.
    pub stall_limit: Duration,
    /// After how long a host that no longer answers counts as lost, 500 ms or more. Shorter notices a cut cable earlier,
    /// longer survives a longer disturbance.
    pub loss_limit: Duration,
    /// How long ranks may take to come.
    pub rendezvous_limit: Duration,
    /// How long a wait spins before it sleeps. Longer costs a core, shorter costs some 10 µs per late peer. `None`:
    /// 200 µs where each local rank can have a core, next to nothing where they cannot.
    pub spin: Option<Duration>,
    /// The same for `recv_idle` and `broadcast_idle`.
    pub idle_spin: Duration,
    /// Overrides the host's identity: ranks with equal ones try shared memory.
    pub host: Option<String>,
    /// Bytes of each shared-memory ring, one a rank for reductions and one each way a pair, a power of two. Larger takes more cache, smaller makes long messages stop more often.
    pub ring_bytes: usize,
    /// TCP connections between two ranks; of two ranks that differ, the lower number counts. More than one carry long
    /// messages together, where one alone does not fill the wire or the ranks have several; each costs buffers.
    pub connections: usize,
    /// How sums travel between hosts, the same on all ranks.
    pub wire: Wire,
    /// An already bound listener for the coordinator (rank 0 only), so that a port can be chosen by the system.
    pub listener: Option<Arc<TcpListener>>,
}

impl Config {
    /// Defaults for a rank of a group.
    pub fn new(rank: usize, size: usize, coordinator: impl Into<String>) -> Self {
        Self {
            rank,
            size,
            coordinator: coordinator.into(),
            secret: Vec::new(),
            transport: TransportChoice::Auto,
            rdma: None,
            stall_limit: Duration::from_secs(10),
            loss_limit: Duration::from_millis(1300),
            rendezvous_limit: Duration::from_secs(60),
            spin: None,
            idle_spin: Duration::from_micros(100),
            host: None,
            ring_bytes: 512 << 10,
            connections: 1,
            wire: Wire::Exact,
            listener: None,
        }
    }

    /// The configuration of this rank in a group without another one: the ranks above it move down. If that was rank 0, the
    /// new one must listen, at a `coordinator` that all know.
    ///
    /// # Errors
    /// When `lost` is no other rank of the group.
    pub fn without(&self, lost: usize) -> Result<Self, InitError> {
        if lost == self.rank || lost >= self.size {
            let remedy = format!("rank {} of {} can go on without another rank only", self.rank, self.size);
            return Err(InitError::Setting {
                name: "the lost rank".to_owned(),
                value: lost.to_string(),
                remedy,
            });
        }
        let moved = |rank: usize| rank - usize::from(rank > lost);
        let mut config = self.clone();
        (config.rank, config.size) = (moved(self.rank), self.size - 1);
        if let Some(rdma) = &mut config.rdma {
            rdma.renumber(|rank| (rank != lost).then(|| moved(rank)));
        }
        Ok(config)
    }

    /// Reads `THUNDER_RANK`, `THUNDER_WORLD_SIZE`, `THUNDER_COORDINATOR`, `THUNDER_SECRET`, `THUNDER_TRANSPORT`
    /// (`auto`, `shm`, `tcp`, `rdma`), `THUNDER_RDMA_DEVICES` (else `MLX_IBV_DEVICES`: a device file), `THUNDER_RDMA_MODE`
    /// (`uc`, `rc`, `rc-write`), `THUNDER_STALL_LIMIT_MS`, `THUNDER_LOSS_LIMIT_MS`, `THUNDER_RENDEZVOUS_LIMIT_MS`,
    /// `THUNDER_SPIN_US`, `THUNDER_IDLE_SPIN_US`, `THUNDER_HOST`, `THUNDER_RING_BYTES`, `THUNDER_CONNECTIONS`,
    /// `THUNDER_WIRE` (`exact`, `int8`); where `THUNDER_RANK` is not set,
    /// MLX's `MLX_RANK` with `MLX_HOSTFILE` (ring) or `MLX_JACCL_COORDINATOR` and `MLX_WORLD_SIZE` or `MLX_IBV_DEVICES`.
    /// `None` when neither rank is set: this process is alone.
    ///
    /// # Errors
    /// When a variable is missing or makes no sense.
    pub fn from_env() -> Result<Option<Self>, InitError> {
        Self::from_variables(&|name| std::env::var(name).ok().filter(|value| !value.is_empty()))
    }

    /// [`Config::from_env`] on any source of variables.
    ///
    /// # Errors
    /// When a variable is missing or makes no sense.
    pub fn from_variables(variable: &dyn Fn(&str) -> Option<String>) -> Result<Option<Self>, InitError> {
        let mut config = if let Some(rank) = variable("THUNDER_RANK") {
            let missing =
                |missing| InitError::Incomplete { present: "THUNDER_RANK", missing, remedy: LAUNCH };
            let size = variable("THUNDER_WORLD_SIZE").ok_or_else(|| missing("THUNDER_WORLD_SIZE"))?;
            let size = number("THUNDER_WORLD_SIZE", &size)?;
            let coordinator = match variable("THUNDER_COORDINATOR") {
                Some(coordinator) => coordinator,
                None if size == 1 => String::new(),
                None => return Err(missing("THUNDER_COORDINATOR")),
            };
            Self::new(number("THUNDER_RANK", &rank)?, size, coordinator)
        } else if let Some(rank) = variable("MLX_RANK") {
            let (size, coordinator) = mlx(variable)?;
            Self::new(number("MLX_RANK", &rank)?, size, coordinator)
        } else {
            return Ok(None);
        };
        config.secret = variable("THUNDER_SECRET").unwrap_or_default().into_bytes();
        if let Some(value) = variable("THUNDER_TRANSPORT") {
            config.transport =
                value.parse().map_err(|remedy: String| setting("THUNDER_TRANSPORT", &value, &remedy))?;
        }
        config.rdma = rdma(variable, config.rank)?;
        let milliseconds = |name: &str, field: &mut Duration| -> Result<(), InitError> {
            if let Some(value) = variable(name) {
                *field = Duration::from_millis(number(name, &value)? as u64);
            }
            Ok(())
        };
        milliseconds("THUNDER_STALL_LIMIT_MS", &mut config.stall_limit)?;
        milliseconds("THUNDER_LOSS_LIMIT_MS", &mut config.loss_limit)?;
        milliseconds("THUNDER_RENDEZVOUS_LIMIT_MS", &mut config.rendezvous_limit)?;
        if let Some(value) = variable("THUNDER_SPIN_US") {
            config.spin = Some(Duration::from_micros(number("THUNDER_SPIN_US", &value)? as u64));
        }
        if let Some(value) = variable("THUNDER_IDLE_SPIN_US") {
            config.idle_spin = Duration::from_micros(number("THUNDER_IDLE_SPIN_US", &value)? as u64);
        }
        if let Some(value) = variable("THUNDER_RING_BYTES") {
            config.ring_bytes = number("THUNDER_RING_BYTES", &value)?;
        }
        if let Some(value) = variable("THUNDER_CONNECTIONS") {
            config.connections = number("THUNDER_CONNECTIONS", &value)?;
        }
        if let Some(value) = variable("THUNDER_WIRE") {
            config.wire = value.parse().map_err(|_| setting("THUNDER_WIRE", &value, "use exact or int8"))?;
        }
        config.host = variable("THUNDER_HOST");
        config.check()?;
        Ok(Some(config))
    }

    pub(crate) fn check(&self) -> Result<(), InitError> {
        if self.size == 0 || self.size > MAX_RANKS {
            return Err(setting("world size", &self.size.to_string(), &format!("use 1 to {MAX_RANKS}")));
        }
        if self.rank >= self.size {
            let remedy = format!("ranks of a group of {} are 0 to {}", self.size, self.size - 1);
            return Err(setting("rank", &self.rank.to_string(), &remedy));
        }
        if !self.ring_bytes.is_power_of_two() || !(4096..=1 << 30).contains(&self.ring_bytes) {
            let remedy = "use a power of two from 4096 to 2^30";
            return Err(setting("ring bytes", &self.ring_bytes.to_string(), remedy));
        }
        for (name, limit) in [
            ("stall limit", self.stall_limit),
            ("loss limit", self.loss_limit),
            ("rendezvous limit", self.rendezvous_limit),
        ] {
            if limit > LONGEST_LIMIT {
                return Err(setting(name, &format!("{limit:?}"), "use a year (31536000000 ms) at most"));
            }
        }
        if self.loss_limit < LEAST_LOSS_LIMIT {
            let remedy = "use 500 ms or more: TCP takes 200 ms to repeat a packet that was lost";
            return Err(setting("loss limit", &format!("{:?}", self.loss_limit), remedy));
        }
        if !(1..=MAX_CONNECTIONS).contains(&self.connections) {
            let remedy = format!("use 1 to {MAX_CONNECTIONS}");
            return Err(setting("connections", &self.connections.to_string(), &remedy));
        }
        if self.transport == TransportChoice::Rdma && self.rdma.is_none() {
            let remedy =
                "set THUNDER_RDMA_DEVICES to a device file, a row per rank with its device towards each rank";
            return Err(setting("transport", "rdma", remedy));
        }
        if self.size > 1 && self.secret.is_empty() && self.listener.is_none() {
            let unusable = |error: std::io::Error| {
                setting("coordinator", &self.coordinator, &format!("use host:port ({error})"))
            };
            let mut addresses = self.coordinator.to_socket_addrs().map_err(unusable)?;
            if !addresses.all(|address| address.ip().is_loopback()) {
                return Err(InitError::NoSecret { coordinator: self.coordinator.clone() });
            }
        }
        Ok(())
    }
}

/// Ranks have two bytes on the wire.
pub const MAX_RANKS: usize = u16::MAX as usize;
/// Clocks end somewhere: a time limit beyond this could not be added to the time of day.
const LONGEST_LIMIT: Duration = Duration::from_secs(365 * 24 * 60 * 60);
const LEAST_LOSS_LIMIT: Duration = Duration::from_millis(500);
const LAUNCH: &str = "set it, or start the ranks with `thunder launch`";

fn setting(name: &str, value: &str, remedy: &str) -> InitError {
    InitError::Setting { name: name.to_owned(), value: value.to_owned(), remedy: remedy.to_owned() }
}

fn number(name: &str, value: &str) -> Result<usize, InitError> {
    value.trim().parse().map_err(|_| setting(name, value, "use a whole number"))
}

/// The devices and the mode, if a device file is named.
fn rdma(variable: &dyn Fn(&str) -> Option<String>, rank: usize) -> Result<Option<RdmaConfig>, InitError> {
    let Some(path) = variable("THUNDER_RDMA_DEVICES").or_else(|| variable("MLX_IBV_DEVICES")) else {
        return Ok(None);
    };
    let mode = match variable("THUNDER_RDMA_MODE").as_deref() {
        None => None,
        Some("uc") => Some(Mode::Uc),
        Some("rc") => Some(Mode::Rc),
        Some("rc-write") => Some(Mode::RcWrite),
        Some(value) => return Err(setting("THUNDER_RDMA_MODE", value, "use uc, rc or rc-write")),
    };
    Ok(Some(RdmaConfig { mode, ..RdmaConfig::from_file(Path::new(&path), rank)? }))
}

/// World size and coordinator from MLX's variables.
fn mlx(variable: &dyn Fn(&str) -> Option<String>) -> Result<(usize, String), InitError> {
    let missing = |missing, remedy| InitError::Incomplete { present: "MLX_RANK", missing, remedy };
    if let Some(coordinator) = variable("MLX_JACCL_COORDINATOR") {
        let size = match (variable("MLX_WORLD_SIZE"), variable("MLX_IBV_DEVICES")) {
            (Some(size), _) => number("MLX_WORLD_SIZE", &size)?,
            (None, Some(path)) => rows(Path::new(&path))?.len(),
            (None, None) => return Err(missing("MLX_IBV_DEVICES or MLX_WORLD_SIZE", LAUNCH)),
        };
        return Ok((size, coordinator));
    }
    let path = variable("MLX_HOSTFILE").ok_or_else(|| {
        missing(
            "MLX_HOSTFILE or MLX_JACCL_COORDINATOR",
            "start the ranks with mlx.launch or `thunder launch`",
        )
    })?;
    let path = Path::new(&path);
    let rows = rows(path)?;
    let first = rows.first().and_then(first_address).ok_or_else(|| InitError::Hostfile {
        path: path.to_owned(),
        why: "the first entry names no address; write [[\"ip:port\"], …] or [{\"ips\": [\"ip:port\"]}, …]"
            .to_owned(),
    })?;
    Ok((rows.len(), first))
}

fn rows(path: &Path) -> Result<Vec<serde_json::Value>, InitError> {
    let wrong = |why: String| InitError::Hostfile { path: path.to_owned(), why };
    let text = std::fs::read_to_string(path).map_err(|error| wrong(error.to_string()))?;
    let value: serde_json::Value = serde_json::from_str(&text).map_err(|error| wrong(error.to_string()))?;
    let value = match value {
        serde_json::Value::Object(mut object) => object.remove("hosts").unwrap_or_default(),
        value => value,
    };
    match value {
        serde_json::Value::Array(rows) if !rows.is_empty() => Ok(rows),
        _ => Err(wrong("a list with one entry per rank was expected".to_owned())),
    }
}

fn first_address(row: &serde_json::Value) -> Option<String> {
    let addresses = row.get("ips").unwrap_or(row);
    let address = addresses.get(0).unwrap_or(addresses).as_str()?;
    Some(address.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn from(pairs: &[(&str, &str)]) -> Result<Option<Config>, InitError> {
        Config::from_variables(&|name| {
            pairs.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned())
        })
    }

    #[test]
    fn alone_without_variables() {
        assert!(from(&[]).unwrap().is_none());
    }

    #[test]
    fn the_ranks_above_a_lost_one_move_down() {
        let mut config = Config::new(2, 4, "127.0.0.1:1");
        let devices = [(0, "a"), (1, "b"), (3, "c")].map(|(rank, name)| (rank, vec![name.to_owned()]));
        config.rdma = Some(RdmaConfig { devices: devices.into(), mode: None });
        let after = |lost| {
            let config = config.without(lost).unwrap();
            (config.rank, config.size, config.rdma.unwrap().devices.into_keys().collect::<Vec<_>>())
        };
        assert_eq!(after(0), (1, 3, vec![0, 2]));
        assert_eq!(after(3), (2, 3, vec![0, 1]));
        for wrong in [2, 4] {
            assert!(config.without(wrong).unwrap_err().to_string().contains("rank 2 of 4"));
        }
        let mut first = Config::new(0, 3, "127.0.0.1:1");
        first.listener = Some(Arc::new(TcpListener::bind("127.0.0.1:0").unwrap()));
        assert!(first.without(1).unwrap().listener.is_some(), "rank 0 goes on listening where it did");
    }

    #[test]
    fn own_variables() {
        let config = from(&[
            ("THUNDER_RANK", "1"),
            ("THUNDER_WORLD_SIZE", "3"),
            ("THUNDER_COORDINATOR", "127.0.0.1:9000"),
            ("THUNDER_TRANSPORT", "tcp"),
            ("THUNDER_STALL_LIMIT_MS", "1234"),
            ("THUNDER_CONNECTIONS", "4"),
        ])
        .unwrap()
        .unwrap();
        assert_eq!((config.rank, config.size), (1, 3));
        assert_eq!((config.transport, config.connections), (TransportChoice::Tcp, 4));
        assert_eq!(config.stall_limit, Duration::from_millis(1234));
    }

    #[test]
    fn errors_name_the_variable() {
        let message = |pairs: &[(&str, &str)]| from(pairs).unwrap_err().to_string();
        assert!(message(&[("THUNDER_RANK", "1")]).contains("THUNDER_WORLD_SIZE"));
        let base = [("THUNDER_RANK", "x"), ("THUNDER_WORLD_SIZE", "2"), ("THUNDER_COORDINATOR", "[::1]:1")];
        assert!(message(&base).contains("\"x\""));
        let base = [("THUNDER_RANK", "2"), ("THUNDER_WORLD_SIZE", "2"), ("THUNDER_COORDINATOR", "[::1]:1")];
        assert!(message(&base).contains("0 to 1"));
        let base =
            [("THUNDER_RANK", "0"), ("THUNDER_WORLD_SIZE", "2"), ("THUNDER_COORDINATOR", "10.0.0.1:1")];
        assert!(message(&base).contains("THUNDER_SECRET"));
        let base = [
            ("THUNDER_RANK", "0"),
            ("THUNDER_WORLD_SIZE", "2"),
            ("THUNDER_COORDINATOR", "[::1]:1"),
            ("THUNDER_LOSS_LIMIT_MS", "0"),
        ];
        assert!(message(&base).contains("500 ms"));
        for name in ["THUNDER_STALL_LIMIT_MS", "THUNDER_RENDEZVOUS_LIMIT_MS", "THUNDER_LOSS_LIMIT_MS"] {
            let limit = [&base[..3], &[(name, "18446744073709551615")]].concat();
            assert!(message(&limit).contains("a year"), "{name}");
        }
    }

    #[test]
    fn rdma_needs_a_device_file_and_a_mode_that_exists() {
        let path = std::env::temp_dir().join(format!("thunder-devices-{}", std::process::id()));
        std::fs::write(&path, r#"[[null, "rdma_en2"], ["rdma_en3", null]]"#).unwrap();
        let file = path.to_str().unwrap();
        let base = [
            ("THUNDER_RANK", "1"),
            ("THUNDER_WORLD_SIZE", "2"),
            ("THUNDER_COORDINATOR", "127.0.0.1:9000"),
            ("THUNDER_TRANSPORT", "rdma"),
        ];
        let with = |more: &[(&'static str, &str)]| from(&[&base[..], more].concat());
        let rdma = with(&[("MLX_IBV_DEVICES", file), ("THUNDER_RDMA_MODE", "uc")]).unwrap().unwrap().rdma;
        let unknown = with(&[("MLX_IBV_DEVICES", file), ("THUNDER_RDMA_MODE", "ud")]).unwrap_err();
        std::fs::remove_file(&path).unwrap();
        let rdma = rdma.unwrap();
        assert_eq!((rdma.devices[&0].as_slice(), rdma.mode), (&["rdma_en3".to_owned()][..], Some(Mode::Uc)));
        assert!(unknown.to_string().contains("rc-write"), "{unknown}");
        assert!(with(&[]).unwrap_err().to_string().contains("THUNDER_RDMA_DEVICES"));
    }

    #[test]
    fn mlx_hostfiles_old_and_new() {
        let forms = [
            r#"[["127.0.0.1:5000"], ["127.0.0.1:5001"]]"#,
            r#"[{"ssh": "a", "ips": ["127.0.0.1:5000"]}, {"ssh": "b", "ips": ["127.0.0.1:5001"]}]"#,
            r#"{"hosts": [["127.0.0.1:5000"], ["127.0.0.1:5001"]]}"#,
        ];
        for (index, form) in forms.iter().enumerate() {
            let path = std::env::temp_dir().join(format!("thunder-hosts-{}-{index}", std::process::id()));
            std::fs::write(&path, form).unwrap();
            let config = from(&[("MLX_RANK", "1"), ("MLX_HOSTFILE", path.to_str().unwrap())]);
            std::fs::remove_file(&path).unwrap();
            let config = config.unwrap().unwrap();
            assert_eq!((config.rank, config.size, config.coordinator.as_str()), (1, 2, "127.0.0.1:5000"));
        }
    }
}
