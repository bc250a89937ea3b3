//! A desk of Macs that are doubles of their commands, to try `thunder mac` without a Mac:
//!
//! ```text
//! cargo build --release -p thunder
//! cargo run --release -p thunder-cables --example desk              # lists the desks
//! cargo run --release -p thunder-cables --example desk -- line      # a shell with ssh to a, b, c
//! ```

#![allow(clippy::unwrap_used, reason = "an example for developers: its own folder is all it touches")]

#[allow(dead_code, reason = "the tests use the rest")]
#[path = "../src/tests/fake.rs"]
mod fake;
#[allow(dead_code, reason = "the tests use the rest")]
#[path = "../src/tests/farm.rs"]
mod farm;
#[allow(dead_code, reason = "the tests use the rest")]
#[path = "../src/tests/setups.rs"]
mod setups;

use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;
use std::process::{Command, ExitCode};

use farm::Farm;
// The included files name these as their own crate's.
use thunder_cables::{job, machine, network};

fn main() -> ExitCode {
    let mut words = std::env::args().skip(1);
    let wanted = words.next();
    let found = setups::wired().into_iter().find(|(name, ..)| Some(*name) == wanted.as_deref());
    let Some((_, macs, wires)) = found else {
        println!("usage: desk DESK [COMMAND…]. Desks:");
        for (name, macs, wires) in setups::wired() {
            let names: Vec<&str> = macs.iter().map(|mac| mac.name.as_str()).collect();
            println!("  {name:?}: {}; {} cable(s)", names.join(", "), wires.len());
        }
        return ExitCode::FAILURE;
    };
    let thunder = std::env::current_exe().unwrap().ancestors().nth(2).unwrap().join("thunder");
    if !thunder.is_file() {
        eprintln!("{} is not there: cargo build --release -p thunder", thunder.display());
        return ExitCode::FAILURE;
    }
    let farm = Farm::new(&macs);
    farm.plug(&macs, &wires, |_| "");
    // Only these two stand before the user's own commands; over "ssh" all are doubles.
    let front = farm.folder().join("front");
    std::fs::create_dir(&front).unwrap();
    ["ssh", "thunder"].iter().for_each(|name| symlink("../bin/double", front.join(name)).unwrap());

    write_replug(&farm, &macs, &front.join("replug"));

    let names: Vec<&str> = macs.iter().map(|mac| mac.name.as_str()).collect();
    let command: Vec<String> = words.collect();
    if command.is_empty() {
        println!(
            "Try:  thunder mac check --hosts {0}\n      thunder mac setup --hosts {0} --program thunder\n      \
             thunder mac undo\nFaults, before setup or undo: echo 3 >$DESK/drop (ssh drops), or fail, or vanish \
             (an interface does; `replug` brings it back).\nThe desk is gone when you leave this shell.",
            names.join(",")
        );
    }
    let (program, arguments) = match command.split_first() {
        Some((program, arguments)) => (program.as_str(), arguments),
        None => ("sh", &[][..]),
    };
    let path = format!("{}:{}", front.display(), std::env::var("PATH").unwrap());
    let status = Command::new(program)
        .args(arguments)
        .env("PATH", path)
        .env("PS1", "desk$ ")
        .env("DESK", farm.desk())
        .env("THUNDER", thunder)
        // Records and host files, and no agent of this machine.
        .env("XDG_DATA_HOME", farm.folder().join("data"))
        .env("THUNDER_DATA", farm.folder().join("data/no-agent"))
        .status();
    match status {
        Ok(status) if status.success() => ExitCode::SUCCESS,
        Ok(_) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("{program}: {error}");
            ExitCode::FAILURE
        }
    }
}

/// A command that does what `Farm::come_back` does: macOS makes an interface that is plugged in
/// again anew, and its bridge takes it back.
fn write_replug(farm: &Farm, macs: &[fake::FakeMac], path: &Path) {
    let mut script = "#!/bin/sh\ncd \"$DESK/..\" || exit\n".to_owned();
    for mac in macs {
        let fresh = farm.folder().join("fresh").join(&mac.name);
        mac.write_to(&fresh);
        for interface in &mac.interfaces {
            let (mac_name, name) = (&mac.name, &interface.name);
            let back = format!("cp -r fresh/{mac_name}/interfaces/{name} desk/{mac_name}/interfaces/");
            let member = format!("echo {name} >>desk/{mac_name}/members");
            let joins = if mac.members.contains(name) { member } else { "true".to_owned() };
            let test = format!("[ -d away/{mac_name}/{name} ]");
            let said = format!("echo '{mac_name}: {name} is back'");
            script +=
                &format!("if {test}; then rm -r away/{mac_name}/{name} && {back} && {joins} && {said}; fi\n");
        }
    }
    std::fs::write(path, script).unwrap();
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o755)).unwrap();
}
