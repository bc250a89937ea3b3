//! What ranks talk over.

use serde::{Deserialize, Serialize};

/// What a pair of ranks talks over.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Transport {
    /// The rank is this rank itself.
    Itself,
    /// Memory that the processes of a host share.
    Shm,
    /// TCP.
    Tcp,
    /// RDMA verbs.
    Rdma,
}

impl std::fmt::Display for Transport {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Itself => "itself",
            Self::Shm => "shared memory",
            Self::Tcp => "tcp",
            Self::Rdma => "rdma",
        })
    }
}

/// Which transports a group may use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum TransportChoice {
    /// Shared memory inside a host. Between hosts RDMA where `Config::rdma` has a device, otherwise
    /// TCP.
    #[default]
    Auto,
    /// Shared memory only; a rank on another host is an error.
    Shm,
    /// TCP everywhere, including inside a host.
    Tcp,
    /// RDMA wherever `Config::rdma` has a device, including inside a host; otherwise as `Auto`.
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
