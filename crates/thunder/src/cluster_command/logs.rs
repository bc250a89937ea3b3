//! `thunder cluster logs`.

use std::path::Path;
use std::time::Duration;

use clap::Args;
use thunder_node::agent::LogLine;
use thunder_node::agent::control::{self, Reply, Request};

/// Interval of `--follow`.
const FOLLOW_EVERY: Duration = Duration::from_millis(500);

#[derive(Args)]
pub struct LogsArgs {
    /// Name or id of the node [default: this one]
    #[arg(value_name = "NODE")]
    node: Option<String>,
    /// Maximum number of past events to print; an agent keeps its last 500
    #[arg(long, value_name = "LINES", default_value_t = 100)]
    lines: usize,
    /// Print new events too, until Ctrl-C
    #[arg(long)]
    follow: bool,
    /// Print one JSON object a line
    #[arg(long)]
    json: bool,
}

impl LogsArgs {
    /// Runs the command.
    pub async fn run(self, data: &Path) -> anyhow::Result<()> {
        let mut after = 0;
        let mut lines = self.lines;
        loop {
            let request = Request::Logs { node: self.node.clone(), lines, after };
            let Reply::Logs(found) = control::ask(data, &request).await? else {
                anyhow::bail!("the agent is of another version: it has no logs");
            };
            for line in &found {
                after = line.number;
                println!("{}", if self.json { serde_json::to_string(line)? } else { text_of(line) });
            }
            if !self.follow {
                return Ok(());
            }
            lines = usize::MAX;
            tokio::time::sleep(FOLLOW_EVERY).await;
        }
    }
}

fn text_of(line: &LogLine) -> String {
    format!("{}  {}", moment(line.unix_s), line.text)
}

/// A time in UTC, as `2026-11-23 09:05:01`. The date by Howard Hinnant's `civil_from_days`.
fn moment(unix_s: u64) -> String {
    let (days, seconds) = (unix_s / 86_400, unix_s % 86_400);
    let shifted = days + 719_468;
    let (era, day_of_era) = (shifted / 146_097, shifted % 146_097);
    let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month_from_march = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month_from_march + 2) / 5 + 1;
    let month = if month_from_march < 10 { month_from_march + 3 } else { month_from_march - 9 };
    let year = year_of_era + era * 400 + u64::from(month <= 2);
    let (hour, minute, second) = (seconds / 3600, seconds / 60 % 60, seconds % 60);
    format!("{year:04}-{month:02}-{day:02} {hour:02}:{minute:02}:{second:02}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_in_utc() {
        assert_eq!(moment(0), "1970-01-01 00:00:00");
        assert_eq!(moment(951_782_400), "2000-02-29 00:00:00");
        assert_eq!(moment(1_795_424_701), "2026-11-23 09:05:01");
    }
}
