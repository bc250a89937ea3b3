//! Which RDMA devices lead to which ranks.

use std::collections::BTreeMap;
use std::path::Path;

use thunder_verbs::{Mode, Profile};

use crate::InitError;

/// Which RDMA devices lead to which ranks, and how they are used.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RdmaConfig {
    /// For each rank that this rank is cabled to, the names of this rank's devices, one per cable.
    /// Both ends must list their cables in the same order.
    pub devices: BTreeMap<usize, Vec<String>>,
    /// How bytes travel; must be the same on all ranks. `None`: the fastest mode of the platform.
    pub mode: Option<Mode>,
}

impl RdmaConfig {
    /// Reads a device file in the format of MLX's JACCL: a list with one row per rank; a row has
    /// one entry per rank: null, a device's name, or a list of names.
    ///
    /// # Errors
    /// If the file cannot be read or has another format.
    pub fn from_file(path: &Path, rank: usize) -> Result<Self, InitError> {
        let wrong = |why: String| InitError::Hostfile { path: path.to_owned(), why };
        let text = std::fs::read_to_string(path).map_err(|error| wrong(error.to_string()))?;
        let devices = parse_row(&text, rank).map_err(wrong)?;
        Ok(Self { devices, mode: None })
    }

    /// Gives the ranks other numbers, and drops those for which `number` returns `None`.
    pub(crate) fn renumber(&mut self, number: impl Fn(usize) -> Option<usize>) {
        let devices = std::mem::take(&mut self.devices);
        self.devices = devices.into_iter().filter_map(|(old, names)| Some((number(old)?, names))).collect();
    }

    pub(crate) fn mode(&self) -> Mode {
        self.mode.unwrap_or(if Profile::native().reliable { Mode::RcWrite } else { Mode::Uc })
    }
}

fn parse_row(text: &str, rank: usize) -> Result<BTreeMap<usize, Vec<String>>, String> {
    #[derive(serde::Deserialize)]
    #[serde(untagged)]
    enum Entry {
        One(String),
        Many(Vec<String>),
    }
    let rows: Vec<Vec<Option<Entry>>> = serde_json::from_str(text).map_err(|error| {
        format!("{error}; write a row per rank with null, a device or a list of devices per rank")
    })?;
    let count = rows.len();
    let row =
        rows.into_iter().nth(rank).ok_or_else(|| format!("it has {count} rows, none for rank {rank}"))?;
    let names = |entry| match entry {
        Entry::One(name) => vec![name],
        Entry::Many(names) => names,
    };
    let cabled = row.into_iter().enumerate().filter_map(|(peer, entry)| Some((peer, names(entry?))));
    Ok(cabled.filter(|(peer, names)| *peer != rank && !names.is_empty()).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_split_renumbers_the_cables_and_drops_those_to_other_groups() {
        let devices = [(1, "a"), (2, "b"), (3, "c")].map(|(peer, name)| (peer, vec![name.to_string()]));
        let mut config = RdmaConfig { devices: devices.into(), mode: None };
        config.renumber(|old| [3, 0, 1].iter().position(|rank| *rank == old));
        assert_eq!(config.devices, BTreeMap::from([(0, vec!["c".to_string()]), (2, vec!["a".to_string()])]));
    }

    #[test]
    fn device_files_hold_null_a_name_or_a_list() {
        let text = r#"[[null, "rdma_en2", null], [["rdma_en4", "rdma_en5"], null, []], [null, null, null]]"#;
        let names = |names: &[&str]| names.iter().map(|name| name.to_string()).collect::<Vec<_>>();
        assert_eq!(parse_row(text, 0).unwrap(), BTreeMap::from([(1, names(&["rdma_en2"]))]));
        assert_eq!(parse_row(text, 1).unwrap(), BTreeMap::from([(0, names(&["rdma_en4", "rdma_en5"]))]));
        assert_eq!(parse_row(text, 2).unwrap(), BTreeMap::new());
        assert!(parse_row(text, 3).unwrap_err().contains("3 rows"));
        assert!(parse_row("{}", 0).unwrap_err().contains("a row per rank"));
    }
}
