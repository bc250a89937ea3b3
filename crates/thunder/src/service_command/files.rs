//! The files that describe a service to systemd and to launchd.

use std::fmt::Write as _;
use std::path::Path;

use anyhow::bail;

use super::label;
use crate::log_rotation;

/// What a service starts.
#[derive(Debug, Clone, Copy)]
pub struct Start<'a> {
    pub program: &'a Path,
    pub command: &'a [String],
    pub environment: &'a [(String, String)],
}

impl Start<'_> {
    fn words(&self) -> impl Iterator<Item = String> {
        std::iter::once(self.program.display().to_string()).chain(self.command.iter().cloned())
    }

    /// Whether SIGHUP lets it read its settings again.
    fn reloads(&self) -> bool {
        self.command.first().is_some_and(|word| word == "serve" || word == "up")
    }
}

/// A word of systemd's ExecStart.
fn quoted(word: &str) -> anyhow::Result<String> {
    let escaped = escaped("an argument of the service", word)?.replace('$', "$$");
    let is_plain = escaped.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_./:=,@%+".contains(&byte));
    Ok(if is_plain && !escaped.is_empty() { escaped } else { format!("\"{escaped}\"") })
}

/// A variable of systemd's Environment, in which a dollar has no special meaning.
fn assigned(name: &str, value: &str) -> anyhow::Result<String> {
    Ok(format!("Environment=\"{name}={}\"\n", escaped(name, value)?))
}

/// A text for use between quotes in a unit; `what` names it.
fn escaped(what: &str, text: &str) -> anyhow::Result<String> {
    if text.contains(['\n', '\r', '\0']) {
        bail!("{what} has a line break: {text:?}");
    }
    Ok(text.replace('\\', "\\\\").replace('"', "\\\"").replace('%', "%%"))
}

/// The unit of systemd.
pub fn unit(name: &str, start: &Start<'_>, system: bool) -> anyhow::Result<String> {
    let words = start.words().map(|word| quoted(&word)).collect::<Result<Vec<_>, _>>()?;
    let mut text =
        String::from("[Unit]\nDescription=Thunderhead, an LLM server\nAfter=network-online.target\n");
    // A service of a user cannot wait for the machine's units.
    text.push_str(if system { "Wants=network-online.target\n" } else { "" });
    let _ = write!(
        text,
        "\n[Service]\n# Starting it fails if the program cannot be run.\nType=exec\nExecStart={}\nRestart=on-failure\nRestartSec=5\n\
         # Answers in flight have 30 s to complete (--grace).\nTimeoutStopSec=45\n{reload}\
         LimitNOFILE=65536\nLimitMEMLOCK=infinity\nUMask=0077\nNoNewPrivileges=yes\n",
        words.join(" "),
        reload = if start.reloads() { "ExecReload=kill -HUP $MAINPID\n" } else { "" },
    );
    for (name, value) in start.environment {
        text.push_str(&assigned(name, value)?);
    }
    if system {
        let _ = write!(
            text,
            "DynamicUser=yes\nStateDirectory={name}\nStateDirectoryMode=0700\nProtectSystem=strict\n\
             ProtectHome=read-only\nPrivateTmp=yes\n"
        );
    }
    let target = if system { "multi-user.target" } else { "default.target" };
    let _ = write!(text, "\n[Install]\nWantedBy={target}\n");
    Ok(text)
}

/// The property list of launchd.
pub fn plist(name: &str, start: &Start<'_>, log: &Path) -> anyhow::Result<String> {
    let escaped = |text: &str| text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;");
    let words: String =
        start.words().map(|word| format!("    <string>{}</string>\n", escaped(&word))).collect();
    let variable = |(name, value): &(String, String)| {
        format!("    <key>{}</key>\n    <string>{}</string>\n", escaped(name), escaped(value))
    };
    // launchd does not rotate its files.
    let rotated = (log_rotation::VARIABLE.to_owned(), log.display().to_string());
    let variables: String = start.environment.iter().chain([&rotated]).map(variable).collect();
    let log = escaped(&log.display().to_string());
    if words.contains('\0') {
        bail!("an argument of the service has a zero byte");
    }
    Ok(format!(
        "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n\
         <!DOCTYPE plist PUBLIC \"-//Apple//DTD PLIST 1.0//EN\" \"http://www.apple.com/DTDs/PropertyList-1.0.dtd\">\n\
         <plist version=\"1.0\">\n<dict>\n  <key>Label</key>\n  <string>{label}</string>\n  <key>ProgramArguments</key>\n  \
         <array>\n{words}  </array>\n  <key>EnvironmentVariables</key>\n  <dict>\n{variables}  </dict>\n  <key>RunAtLoad</key>\n  <true/>\n  <key>KeepAlive</key>\n  <dict>\n    \
         <key>SuccessfulExit</key>\n    <false/>\n  </dict>\n  <key>ExitTimeOut</key>\n  <integer>45</integer>\n  \
         <key>SoftResourceLimits</key>\n  <dict>\n    <key>NumberOfFiles</key>\n    <integer>65536</integer>\n  </dict>\n  \
         <key>StandardErrorPath</key>\n  <string>{log}</string>\n  <key>StandardOutPath</key>\n  <string>{log}</string>\n\
         </dict>\n</plist>\n",
        label = label(name),
    ))
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    fn words(words: &[&str]) -> Vec<String> {
        words.iter().map(|word| (*word).to_owned()).collect()
    }

    #[test]
    fn a_unit_starts_the_command_as_it_was_given() {
        let command = words(&["serve", "--api-key", "a b\"c", "100%", "$HOME"]);
        let environment = vec![("THUNDER_STORE".to_owned(), "/a b/$5 100%".to_owned())];
        let program = Path::new("/opt/thunder");
        let start = Start { program, command: &command, environment: &environment };
        let text = unit("thunder", &start, true).unwrap();
        let expected = r#"ExecStart=/opt/thunder serve --api-key "a b\"c" 100%% "$$HOME""#;
        assert!(text.lines().any(|line| line == expected), "{text}");
        let variable = "Environment=\"THUNDER_STORE=/a b/$5 100%%\"";
        assert!(text.contains("WantedBy=multi-user.target") && text.lines().any(|line| line == variable));
        let user = unit("thunder", &start, false).unwrap();
        assert!(user.contains("WantedBy=default.target") && !user.contains("DynamicUser"));
        let bad = words(&["a\nUser=root"]);
        assert!(unit("t", &Start { command: &bad, ..start }, true).is_err());
        let bad = [("HF_HOME".to_owned(), "a\nUser=root".to_owned())];
        assert!(unit("t", &Start { environment: &bad, ..start }, true).is_err());
    }

    /// systemd's own check, where it is installed.
    #[test]
    fn systemd_accepts_the_unit() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("thunder-test.service");
        let program = std::env::current_exe().unwrap();
        let environment = [("THUNDER_STORE".to_owned(), "/var/lib/a b".to_owned())];
        let command = words(&["serve", "a b"]);
        let start = Start { program: &program, command: &command, environment: &environment };
        std::fs::write(&file, unit("thunder-test", &start, true).unwrap()).unwrap();
        match Command::new("systemd-analyze").arg("verify").arg(&file).output() {
            Ok(output) => {
                let text = String::from_utf8_lossy(&output.stderr);
                let own = text.lines().filter(|line| line.contains("thunder-test"));
                assert_eq!(own.collect::<Vec<_>>(), Vec::<&str>::new());
            }
            Err(_) => thunder_testing::skip("systemd_accepts_the_unit", "systemd-analyze is not installed"),
        }
    }

    #[test]
    fn a_property_list_is_xml() {
        let (command, environment) =
            (words(&["serve", "<x>"]), [("THUNDER_STORE".to_owned(), "/a&b".to_owned())]);
        let start = Start { program: Path::new("/opt/a&b"), command: &command, environment: &environment };
        let text = plist("thunder", &start, Path::new("/l")).unwrap();
        assert!(text.contains("<key>THUNDER_STORE</key>\n    <string>/a&amp;b</string>"), "{text}");
        assert!(
            text.contains("<string>/opt/a&amp;b</string>") && text.contains("<string>&lt;x&gt;</string>")
        );
        let log = "<key>StandardErrorPath</key>\n  <string>/l</string>";
        assert!(text.contains(log) && text.contains("THUNDER_LOG_FILE</key>\n    <string>/l<"), "{text}");
        assert_eq!(text.matches("<dict>").count(), text.matches("</dict>").count());
        assert!(text.starts_with("<?xml") && text.contains("<string>org.thunderhead.thunder</string>"));
    }
}
