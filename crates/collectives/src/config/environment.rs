//! The environment variables that set a configuration: Thunderhead's and MLX's.

use std::path::Path;
use std::time::Duration;

use thunder_verbs::Mode;

use super::{Config, RdmaConfig, setting};
use crate::InitError;

const LAUNCH: &str = "set it, or start the ranks with `thunder launch`";

impl Config {
    /// Reads `THUNDER_RANK`, `THUNDER_WORLD_SIZE`, `THUNDER_COORDINATOR`, `THUNDER_SECRET`,
    /// `THUNDER_TRANSPORT` (`auto`, `shm`, `tcp`, `rdma`), `THUNDER_RDMA_DEVICES` (a device file;
    /// if not set, `MLX_IBV_DEVICES`), `THUNDER_RDMA_MODE` (`uc`, `rc`, `rc-write`),
    /// `THUNDER_CABLES` (`10.84.72.0/30=rdma_en2,192.168.1.0/24`), `THUNDER_STALL_LIMIT_MS`,
    /// `THUNDER_LOSS_LIMIT_MS`, `THUNDER_RENDEZVOUS_LIMIT_MS`, `THUNDER_SPIN_US`,
    /// `THUNDER_IDLE_SPIN_US`, `THUNDER_HOST`, `THUNDER_RING_BYTES`, `THUNDER_CONNECTIONS`,
    /// `THUNDER_ENCRYPT` (`1`: encrypt TCP links), `THUNDER_WIRE` (`exact`, `int8`) and
    /// `THUNDER_PORTS` (`FIRST-LAST`).
    ///
    /// If `THUNDER_RANK` is not set, reads MLX's `MLX_RANK` with `MLX_HOSTFILE` (ring), or with
    /// `MLX_JACCL_COORDINATOR` and `MLX_WORLD_SIZE` or `MLX_IBV_DEVICES`. Returns `None` if nothing
    /// of a group is set: then this process is alone.
    ///
    /// # Errors
    /// If a variable is missing or invalid.
    pub fn from_env() -> Result<Option<Self>, InitError> {
        Self::from_variables(&|name| std::env::var(name).ok().filter(|value| !value.is_empty()))
    }

    /// [`Config::from_env`] with variables from another source than the environment.
    ///
    /// # Errors
    /// If a variable is missing or invalid.
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
            // Whoever sets these means a group: alone, this process would answer as if it were one.
            let meant = ["THUNDER_WORLD_SIZE", "THUNDER_COORDINATOR"];
            return match meant.into_iter().find(|name| variable(name).is_some_and(|value| value != "1")) {
                Some(present) => {
                    Err(InitError::Incomplete { present, missing: "THUNDER_RANK", remedy: LAUNCH })
                }
                None => Ok(None),
            };
        };
        config.secret = variable("THUNDER_SECRET").unwrap_or_default().into_bytes();
        if let Some(value) = variable("THUNDER_TRANSPORT") {
            config.transport =
                value.parse().map_err(|remedy: String| setting("THUNDER_TRANSPORT", &value, &remedy))?;
        }
        config.rdma = rdma(variable, config.rank)?;
        if let Some(value) = variable("THUNDER_CABLES") {
            let networks = value.split(',').map(str::parse).collect::<Result<_, String>>();
            config.cables = networks.map_err(|remedy| setting("THUNDER_CABLES", &value, &remedy))?;
        }
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
        if let Some(value) = variable("THUNDER_ENCRYPT") {
            config.encrypt = match value.as_str() {
                "0" => false,
                "1" => true,
                _ => return Err(setting("THUNDER_ENCRYPT", &value, "use 1 or 0")),
            };
        }
        if let Some(value) = variable("THUNDER_WIRE") {
            config.wire = value.parse().map_err(|_| setting("THUNDER_WIRE", &value, "use exact or int8"))?;
        }
        if let Some(value) = variable("THUNDER_PORTS") {
            config.ports =
                Some(super::parse_ports(&value).map_err(|remedy| setting("THUNDER_PORTS", &value, &remedy))?);
        }
        config.host = variable("THUNDER_HOST");
        config.check()?;
        Ok(Some(config))
    }
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
    use crate::TransportChoice;

    fn from(pairs: &[(&str, &str)]) -> Result<Option<Config>, InitError> {
        Config::from_variables(&|name| {
            pairs.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned())
        })
    }

    #[test]
    fn without_variables_a_process_is_alone() {
        assert!(from(&[]).unwrap().is_none());
    }

    #[test]
    fn own_variables_set_the_fields() {
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
        for lonely in [("THUNDER_WORLD_SIZE", "2"), ("THUNDER_COORDINATOR", "10.0.0.1:1")] {
            assert!(message(&[lonely]).contains("THUNDER_RANK"), "{lonely:?}");
        }
        assert!(from(&[("THUNDER_WORLD_SIZE", "1")]).unwrap().is_none());
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
    fn ports_are_a_range() {
        let base =
            [("THUNDER_RANK", "0"), ("THUNDER_WORLD_SIZE", "2"), ("THUNDER_COORDINATOR", "127.0.0.1:9000")];
        let with = |ports| from(&[&base[..], &[("THUNDER_PORTS", ports)]].concat());
        assert_eq!(with("42000-42063").unwrap().unwrap().ports, Some(42000..=42063));
        assert_eq!(with("42000").unwrap().unwrap().ports, Some(42000..=42000));
        for wrong in ["0-5", "42063-42000", "42000-70000", "-", "ssh"] {
            let error = with(wrong).unwrap_err().to_string();
            assert!(error.contains("THUNDER_PORTS") && error.contains("42000-42063"), "{error}");
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
    fn old_and_new_mlx_hostfiles_are_read() {
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
