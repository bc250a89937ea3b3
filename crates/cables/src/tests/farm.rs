//! A folder of Macs whose commands are doubles on PATH. The tests of `thunder` include this file
//! too.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};

use super::fake::FakeMac;
use super::setups::Wire;

const COMMANDS: [&str; 19] = [
    "ssh",
    "sudo",
    "id",
    "uname",
    "hostname",
    "sw_vers",
    "sysctl",
    "osascript",
    "rdma_ctl",
    "system_profiler",
    "networksetup",
    "ifconfig",
    "netstat",
    "ibv_devices",
    "ibv_devinfo",
    "pmset",
    "socketfilterfw",
    "launchctl",
    "thunder",
];

/// The folder: `bin` with the commands, and `desk` with a folder for each Mac.
pub struct Farm(tempfile::TempDir);

impl Farm {
    /// Writes the Macs.
    pub fn new(macs: &[FakeMac]) -> Self {
        let farm = Self(tempfile::tempdir().unwrap());
        let bin = farm.folder().join("bin");
        fs::create_dir(&bin).unwrap();
        let double = bin.join("double");
        fs::write(&double, include_str!("double.sh")).unwrap();
        fs::set_permissions(&double, fs::Permissions::from_mode(0o755)).unwrap();
        COMMANDS.iter().for_each(|name| symlink("double", bin.join(name)).unwrap());
        macs.iter().for_each(|mac| mac.write_to(&farm.desk().join(&mac.name)));
        farm
    }

    /// The folder of it all.
    pub fn folder(&self) -> &Path {
        self.0.path()
    }

    /// The folder of all Macs.
    pub fn desk(&self) -> PathBuf {
        self.folder().join("desk")
    }

    /// PATH with the doubles first.
    pub fn path(&self) -> String {
        format!("{}:{}", self.folder().join("bin").display(), std::env::var("PATH").unwrap())
    }

    /// Plugs the cables in, for the double of `thunder bench comm`. `fault` of a cable's index is
    /// empty, `slow` or `fails`.
    pub fn plug(&self, macs: &[FakeMac], wires: &[Wire], fault: impl Fn(usize) -> &'static str) {
        let end = |(mac, port): (usize, usize)| {
            format!("{} {}", macs[mac].name, macs[mac].interfaces[port + 1].name)
        };
        let line = |(index, (one, other, gbits)): (usize, &Wire)| {
            format!("{} {} {gbits} {}\n", end(*one), end(*other), fault(index))
        };
        let lines: String = wires.iter().enumerate().map(line).collect();
        fs::write(self.folder().join("wires"), lines).unwrap();
    }

    /// Plugs in again what the fault `vanish` has pulled: macOS makes such an interface anew, and
    /// its bridge takes it back. Returns whether there was one.
    pub fn come_back(&self, macs: &[FakeMac]) -> bool {
        let away = self.folder().join("away");
        let mut any = false;
        for mac in macs {
            let folder = self.desk().join(&mac.name);
            for interface in &mac.interfaces {
                if fs::remove_dir_all(away.join(&mac.name).join(&interface.name)).is_ok() {
                    any = true;
                    interface.write_to(&folder);
                    let members = folder.join("members");
                    let mut now: Vec<String> =
                        fs::read_to_string(&members).unwrap().lines().map(str::to_owned).collect();
                    now.extend(mac.members.iter().find(|member| **member == interface.name).cloned());
                    now.sort();
                    let text: String = now.iter().map(|member| format!("{member}\n")).collect();
                    fs::write(members, text).unwrap();
                }
            }
        }
        any
    }

    /// All files of the Macs, except for what sudo has logged.
    pub fn state(&self) -> BTreeMap<PathBuf, String> {
        let mut found = BTreeMap::new();
        collect(&self.desk(), &mut found);
        found.retain(|path, _| !path.ends_with("log"));
        found
    }
}

fn collect(folder: &Path, found: &mut BTreeMap<PathBuf, String>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            collect(&path, found);
            found.insert(path, "a folder".to_owned());
        } else {
            let text = fs::read_to_string(&path).unwrap();
            found.insert(path, text);
        }
    }
}
