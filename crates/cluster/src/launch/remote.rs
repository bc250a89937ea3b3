//! What runs at the other end of `ssh`: a `sh` script that starts a rank in a process group of its
//! own and supervises it.
//!
//! The script arrives as one line over standard input, because it holds secrets and every user of a
//! machine can read command lines. Orders follow, one per line: `T` and `K` send TERM and KILL to
//! the group, `E` closes the rank's standard input. When the script's input closes, because the
//! launcher or the connection is gone, the script ends the group. The rank's own standard input
//! arrives over a second connection, into a named pipe: if the two shared a connection, a full pipe
//! would hold up the orders.

use std::fmt::Write;

use super::plan::PlannedRank;
use super::secret::random_hex;
use super::shell::{join, quote};
use super::{Launch, LaunchError};

/// What `ssh` runs at the other end. Every login shell understands it.
pub(super) const BOOTSTRAP: &str = r#"exec sh -c 'IFS= read -r s && eval "$(printf %b "$s")"'"#;

/// Options of `ssh`. A host that stops answering is given up after 3 times 5 s without a reply.
const OPTIONS: [&str; 11] = [
    "-T",
    "-o",
    "BatchMode=yes",
    "-o",
    "ConnectTimeout=10",
    "-o",
    "ServerAliveInterval=5",
    "-o",
    "ServerAliveCountMax=3",
    "-o",
    "LogLevel=ERROR",
];

/// A folder with an unguessable name on the other machine, for the rank's files and its named pipe.
#[derive(Debug, Clone)]
pub(super) struct Folder(String);

impl Folder {
    pub fn random() -> Result<Self, LaunchError> {
        Ok(Self(format!("/tmp/thunder-launch-{}", &random_hex()?[..32])))
    }

    /// For text that is only shown, never run.
    pub fn example() -> Self {
        Self("/tmp/thunder-launch-0".to_owned())
    }

    /// What the second connection runs: waits until the script has made the pipe, then fills it.
    pub fn feed(&self) -> String {
        let wait = format!("until [ -p {}/in ]; do", self.0);
        let step = "i=$((i+1)); [ $i -gt 150 ] && exit 1; sleep 0.1 2>/dev/null || sleep 1; done;";
        format!("exec sh -c 'i=0; {wait} {step} exec cat >{}/in'", self.0)
    }
}

/// `ssh` with its options, the host, and what to run there.
pub(super) fn ssh_command(ssh: &[String], host: &str, run: &str) -> Vec<String> {
    let options = OPTIONS.iter().map(|option| (*option).to_owned());
    ssh.iter().cloned().chain(options).chain([host.to_owned(), run.to_owned()]).collect()
}

/// The script for a rank, as readable text.
pub(super) fn script(rank: &PlannedRank, launch: &Launch, folder: &Folder) -> String {
    let mut text = String::new();
    let mut line = |part: std::fmt::Arguments<'_>| {
        // Writing to a string cannot fail.
        let _ = text.write_fmt(part);
        text.push('\n');
    };
    let who = quote(&format!("thunder launch: rank {} on {}: ", rank.rank, rank.host));
    line(format_args!("say() {{ printf '%s%s\\n' {who} \"$1\" >&2; }}"));
    line(format_args!("d={}", quote(&folder.0)));
    line(format_args!("exec 4<&0 </dev/null"));
    match &rank.directory {
        Some(directory) => {
            let directory = quote(&directory.to_string_lossy());
            line(format_args!(
                "cd -- {directory} 2>/dev/null || {{ say \"no directory \"{directory}; exit 126; }}"
            ));
        }
        None => {
            let here = std::env::current_dir().unwrap_or_default();
            line(format_args!("cd -- {} 2>/dev/null", quote(&here.to_string_lossy())));
        }
    }
    line(format_args!("mkdir -m 700 \"$d\" || {{ say \"cannot create $d\"; exit 126; }}"));
    line(format_args!("trap 'rm -rf \"$d\"' EXIT"));
    for (name, value) in &rank.environment {
        line(format_args!("export {name}={}", quote(value)));
    }
    for (name, content) in &rank.files {
        line(format_args!("printf %s {} >\"$d/{name}\"", quote(content)));
        line(format_args!("export {name}=\"$d/{name}\""));
    }
    line(format_args!("set -- {}", join(&rank.command)));
    let tenths = (launch.grace.as_millis() / 100).max(1);
    line(format_args!("tenths={tenths}"));
    if launch.input.reaches(rank.rank) {
        // Opening a pipe for both directions does not wait for its other end. The loop that reads
        // orders keeps it open.
        line(format_args!("mkfifo -m 600 \"$d/in\" && exec 5<>\"$d/in\" || exit 126"));
        line(format_args!("input=$d/in"));
    } else {
        line(format_args!("input=/dev/null"));
    }
    text.push_str(SUPERVISE);
    text
}

/// The part of the script that starts and supervises the rank. Linux shells may lack job control
/// and need `setsid` to make a process group; macOS has no `setsid`, but a shell with job control.
/// Until `setsid` has made the group, only the process itself can be signalled. After `wait` it
/// must not be signalled, because its number may belong to another process.
const SUPERVISE: &str = r#"command -v "$1" >/dev/null 2>&1 || {
  case $1 in
    */*) say "cannot start $1: no such program on that machine, or not executable" ;;
    *) say "cannot start $1: not on the PATH that ssh gives there ($PATH): give its full path" ;;
  esac
  exit 127
}
own= ended=
if command -v setsid >/dev/null 2>&1; then own=setsid; else set -m; fi
stop() { kill -s "$1" -- "-$p" || { [ -z "$ended" ] && kill -s "$1" "$p"; }; } 2>/dev/null
alive() { stop 0; }
gone() {
  i=0
  while alive; do
    [ "$i" -lt "$tenths" ] || return 1
    i=$((i+1)); sleep 0.1 2>/dev/null || sleep 1
  done
}
(exec $own "$@") <"$input" 4<&- 5>&- &
p=$!
{
  while IFS= read -r order; do
    case $order in
      T) stop TERM ;;
      K) stop KILL ;;
      E) exec 5>&- ;;
    esac
  done
  stop TERM; gone || stop KILL
} <&4 >/dev/null 2>&1 &
r=$!
exec 4<&- 5>&-
exec 2>/dev/null
wait "$p"; status=$? ended=1
[ "$status" -ne 0 ] || gone
stop TERM; gone || stop KILL
kill "$r"
exit "$status"
"#;

/// The script as one line, which `printf %b` decodes.
pub(super) fn encode(script: &str) -> String {
    let mut line = String::with_capacity(script.len() + 64);
    for letter in script.trim_end().chars() {
        match letter {
            '\\' => line.push_str("\\\\"),
            '\n' => line.push_str("\\n"),
            _ => line.push(letter),
        }
    }
    line.push('\n');
    line
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use proptest::prelude::*;

    use super::*;

    fn shell(command: &str) -> String {
        let output = Command::new("sh").args(["-c", command]).output().unwrap();
        String::from_utf8(output.stdout).unwrap()
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 40, failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn a_shell_decodes_what_was_quoted(text in "[^\0]{0,40}") {
            prop_assert_eq!(shell(&format!("printf %s {}", quote(&text))), text);
        }

        #[test]
        fn printf_decodes_what_was_encoded(text in "[^\0]{0,40}x") {
            let command = format!("printf %s {} | {{ IFS= read -r s; printf %b \"$s\"; }}", quote(&encode(&text)));
            prop_assert_eq!(shell(&command), text);
        }
    }
}
