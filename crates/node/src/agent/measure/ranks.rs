//! Measures what a link gives to the ranks of a model. Ranks spin while they wait, use their own
//! encryption, and may use shared memory or RDMA, so a TLS connection between agents says little
//! about them. Therefore two ranks of `thunder bench comm` form a group like a model's ranks, and
//! sum.

use std::fmt::Write as _;
use std::net::SocketAddr;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use thunder_cables::plan::action::quoted;
use thunder_cables::shell::{ProcessShell, Shell};

use super::super::Agent;
use super::super::calls::{Call, CallReply};
use super::super::desk::report_of;
use super::super::groups::reached_at;
use super::super::ranks::{CABLES, ENCRYPT, NOT_INHERITED, free_port, preferred_networks, random_text};
use crate::id::NodeId;
use crate::report::RanksLink;

/// Bytes of the sums: a token's activations, and a part of a prompt's.
const SHORT_BYTES: u64 = 8 << 10;
const LONG_BYTES: u64 = 1 << 20;
/// Milliseconds for each size.
const TIME_MS: u32 = 60;
/// Maximum time for the ranks to meet, in seconds.
const WAIT_S: u32 = 5;
/// Time after which both ranks have ended.
const LIMIT: Duration = Duration::from_secs(12);

/// Where two ranks meet.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(in crate::agent) struct MeetingPlace {
    /// The port of the first rank, on the machine that asks.
    port: u16,
    /// The group's secret.
    secret: String,
}

/// A row of the output of `thunder bench comm`.
#[derive(Deserialize)]
struct Row {
    bytes: u64,
    transport: String,
    median_us: f64,
}

#[derive(Deserialize)]
struct Printed {
    rows: Vec<Row>,
}

impl Agent {
    /// Measures two ranks, one on each node; `None` if they do not meet, or the other node's
    /// version does not support this.
    pub(super) async fn measure_ranks(&self, to: NodeId) -> Option<RanksLink> {
        let own = self.0.address.ip();
        let (port, secret) = (free_port(own).ok()?, random_text().ok()?);
        let coordinator = SocketAddr::new(own, port);
        let call = Call::MeasureRanks(MeetingPlace { port, secret: secret.clone() });
        let (first, second) =
            tokio::join!(self.run_rank(0, coordinator, secret), self.call_within(to, &call, LIMIT));
        let measured = first.and_then(|text| fit(&text));
        match (measured, second) {
            (Ok(measured), Ok((CallReply::Benched(_), _))) => Some(measured),
            (Err(why), _) | (_, Err(why)) => {
                self.0.log.add(format!("ranks here and on {} cannot be measured: {why}", self.name_of(&to)));
                None
            }
            (Ok(_), Ok(_)) => None,
        }
    }

    /// Runs the second of two ranks. Returns its output.
    pub(in crate::agent) async fn second_rank(
        &self,
        asked_from: SocketAddr,
        place: MeetingPlace,
    ) -> Result<String, String> {
        self.run_rank(1, reached_at(asked_from, place.port), place.secret).await
    }

    async fn run_rank(&self, rank: u32, coordinator: SocketAddr, secret: String) -> Result<String, String> {
        let (program, machine) = (self.0.options.program.clone(), self.0.options.name.clone());
        let measured = self.measured_interfaces();
        let run = tokio::task::spawn_blocking(move || {
            let script = script(&program.to_string_lossy(), rank, coordinator, &measured);
            ProcessShell::local(&machine).run(&script, &(secret + "\n"), LIMIT)
        });
        report_of(run.await.map_err(|error| error.to_string())?.map_err(|error| error.to_string())?)
    }
}

/// The script that becomes the rank, with the variables of a model's rank. It gets the secret over
/// standard input, because every user of a machine can read command lines.
fn script(program: &str, rank: u32, coordinator: SocketAddr, measured: &[String]) -> String {
    let mut script = NOT_INHERITED.iter().fold("unset".to_owned(), |text, name| text + " " + name);
    let is_set = |name: &str| std::env::var_os(name).is_some();
    let cables = if is_set(CABLES) { None } else { preferred_networks(measured) };
    let variables = [
        ("THUNDER_RANK", Some(rank.to_string())),
        ("THUNDER_WORLD_SIZE", Some("2".to_owned())),
        ("THUNDER_COORDINATOR", Some(coordinator.to_string())),
        (ENCRYPT, (!is_set(ENCRYPT)).then(|| "1".to_owned())),
        (CABLES, cables),
    ];
    for (name, value) in variables {
        if let Some(value) = value {
            // Writing to a string cannot fail.
            let _ = write!(script, "; export {name}={}", quoted(&value));
        }
    }
    let program = quoted(program);
    let _ = write!(
        script,
        "; IFS= read -r THUNDER_SECRET && export THUNDER_SECRET && exec {program} bench comm --json \
         --op all_reduce --sizes {SHORT_BYTES},{LONG_BYTES} --time {TIME_MS} --wait {WAIT_S}"
    );
    script
}

/// The latency and the bandwidth that fit both times.
fn fit(printed: &str) -> Result<RanksLink, String> {
    let printed: Printed = serde_json::from_str(printed).map_err(|error| format!("bench comm: {error}"))?;
    let row = |bytes: u64| {
        let found = printed.rows.iter().find(|row| row.bytes == bytes && row.median_us > 0.0);
        found.ok_or_else(|| format!("bench comm printed no time for {bytes} bytes"))
    };
    let (short, long) = (row(SHORT_BYTES)?, row(LONG_BYTES)?);
    let us_per_byte = (long.median_us - short.median_us) / (LONG_BYTES - SHORT_BYTES) as f64;
    // With noise, the long sum may appear to be no slower.
    let us_per_byte = us_per_byte.max(1e-6);
    let latency_us = (short.median_us - SHORT_BYTES as f64 * us_per_byte).max(short.median_us * 0.1);
    Ok(RanksLink {
        over: short.transport.clone(),
        latency_ns: (latency_us * 1e3) as u64,
        bytes_s: (1e6 / us_per_byte) as u64,
    })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
    use super::*;

    #[test]
    fn a_latency_and_a_bandwidth_are_fitted() {
        let text = |short: f64, long: f64| {
            format!(
                r#"{{"rows": [{{"bytes": 8192, "transport": "tcp", "median_us": {short}, "p99_us": 1}},
                             {{"bytes": 1048576, "transport": "tcp", "median_us": {long}}}]}}"#
            )
        };
        // 10 µs, and 1 ns per byte.
        let fitted = fit(&text(18.192, 1058.576)).unwrap();
        assert_eq!((fitted.over.as_str(), fitted.latency_ns / 10), ("tcp", 1000));
        assert!((999_999_000..=1_000_001_000).contains(&fitted.bytes_s), "{fitted:?}");
        // Inconsistent times still give finite figures.
        let odd = fit(&text(50.0, 40.0)).unwrap();
        assert!(odd.latency_ns > 0 && odd.bytes_s <= 1_000_000_000_000, "{odd:?}");
        assert!(fit("{}").is_err() && fit(r#"{"rows": []}"#).unwrap_err().contains("8192 bytes"));
    }

    #[test]
    fn the_secret_is_not_on_the_command_line() {
        let script = script("/opt/a b/thunder", 1, ([10, 0, 0, 1], 4000).into(), &[]);
        assert!(script.contains("THUNDER_COORDINATOR=10.0.0.1:4000"), "{script}");
        assert!(
            script.contains("read -r THUNDER_SECRET") && script.contains("'/opt/a b/thunder'"),
            "{script}"
        );
    }
}
