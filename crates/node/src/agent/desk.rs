//! Requests of `thunder mac` to the nodes of a cluster: the output of each machine's own commands,
//! and the measurement of one cable. Only members can send them; they change nothing on a machine.

use std::fmt::Write as _;
use std::net::{IpAddr, Ipv4Addr};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use thunder_cables::plan::action::quoted;
use thunder_cables::shell::{Output, ProcessShell, Shell, last_line};
use thunder_cables::{Network, apply};

use super::Agent;
use super::calls::{Call, CallReply};
use super::ranks::{CABLES, NOT_INHERITED, free_port, random_text};
use crate::id::NodeId;

/// Time for the probe, less than the control socket's: `system_profiler` takes seconds on a Mac.
const LOOK_LIMIT: Duration = Duration::from_secs(45);
/// Maximum length of an answer: a frame must hold it with JSON's escapes. A Mac with six ports
/// prints 40 KiB.
const LONGEST_ANSWER_BYTES: usize = 1 << 20;
/// Maximum time for two ranks to meet, in seconds.
const LONGEST_WAIT_S: u32 = 30;
/// Maximum time for one size of message, in milliseconds.
const LONGEST_TIME_MS: u32 = 5_000;
/// Maximum number of sizes, and the largest size.
const MOST_SIZES: usize = 8;
const LARGEST_BYTES: u64 = 256 << 20;
/// Maximum output of a measurement; the rest is cut off.
const LONGEST_REPORT_BYTES: usize = 64 << 10;

/// A cable to measure with `thunder bench comm` between its two ends.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct CableBench {
    /// Names or ids of the nodes at its ends.
    pub nodes: [String; 2],
    /// Their addresses on the cable.
    pub addresses: [Ipv4Addr; 2],
    /// The cable's network.
    pub network: Network,
    /// Their RDMA devices. Unless both are given, the cable is measured over TCP.
    pub devices: [Option<String>; 2],
    /// Bytes of the messages.
    pub sizes: Vec<u64>,
    /// Milliseconds for each size.
    pub time_ms: u32,
    /// Seconds that the ranks may take to meet.
    pub wait_s: u32,
}

/// One rank of a measurement, for the node that runs it.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct BenchRank {
    bench: CableBench,
    rank: u8,
    port: u16,
    secret: String,
}

impl CableBench {
    fn check(&self) -> Result<(), String> {
        let is_device = |name: &String| {
            !name.is_empty()
                && name.len() < 64
                && name.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_')
        };
        let is_in = |address: &Ipv4Addr| {
            Network::new(*address, self.network.prefix).is_some_and(|own| own.base() == self.network.base())
        };
        if self.network.prefix == 0 || !self.addresses.iter().all(is_in) {
            let [one, other] = self.addresses;
            return Err(format!("{one} and {other} are not both in the cable's network {}", self.network));
        }
        if let Some(device) = self.devices.iter().flatten().find(|device| !is_device(device)) {
            return Err(format!("{device:?} is not the name of an RDMA device"));
        }
        let fits = (1..=MOST_SIZES).contains(&self.sizes.len())
            && self.sizes.iter().all(|bytes| (1..=LARGEST_BYTES).contains(bytes))
            && (1..=LONGEST_TIME_MS).contains(&self.time_ms)
            && self.wait_s <= LONGEST_WAIT_S;
        fits.then_some(()).ok_or_else(|| {
            format!(
                "at most {MOST_SIZES} sizes of {LARGEST_BYTES} bytes, {LONGEST_TIME_MS} ms each and {LONGEST_WAIT_S} s of \
                 waiting can be measured through the agents"
            )
        })
    }

    fn is_rdma(&self) -> bool {
        self.devices.iter().all(Option::is_some)
    }

    /// Time after which both ranks have ended.
    fn limit(&self) -> Duration {
        let sizes = self.sizes.len() as u32 * self.time_ms * 4;
        Duration::from_secs(u64::from(self.wait_s) + 10) + Duration::from_millis(sizes.into())
    }
}

impl BenchRank {
    /// The script that becomes the rank. It gets the secret over standard input, because every user
    /// of a machine can read command lines.
    fn script(&self, program: &str) -> String {
        let bench = &self.bench;
        let own = usize::from(self.rank.min(1));
        let mut script = NOT_INHERITED.iter().fold("unset".to_owned(), |text, name| text + " " + name);
        let (cables, transport) = match &bench.devices[own] {
            Some(device) if bench.is_rdma() => (format!("{}={device}", bench.network), "rdma"),
            _ => (bench.network.to_string(), "tcp"),
        };
        let variables = [
            ("THUNDER_RANK", own.to_string()),
            ("THUNDER_WORLD_SIZE", "2".to_owned()),
            ("THUNDER_COORDINATOR", format!("{}:{}", bench.addresses[0], self.port)),
            (CABLES, cables),
        ];
        for (name, value) in variables {
            // Writing to a string cannot fail.
            let _ = write!(script, "; export {name}={}", quoted(&value));
        }
        let sizes = bench.sizes.iter().map(u64::to_string).collect::<Vec<_>>().join(",");
        let _ = write!(
            script,
            "; IFS= read -r THUNDER_SECRET && export THUNDER_SECRET && exec {} bench comm --json --transport {transport} \
             --op all_reduce --sizes {sizes} --time {} --wait {}",
            quoted(program),
            bench.time_ms,
            bench.wait_s
        );
        script
    }
}

impl Agent {
    /// The output of the probe of `thunder mac check` on a node.
    pub(super) async fn look_at(&self, id: NodeId) -> Result<String, String> {
        if id == self.0.id {
            return self.look_here().await;
        }
        match self.call_within(id, &Call::Look, LOOK_LIMIT).await?.0 {
            CallReply::Looked(text) => Ok(text),
            _ => Err(format!("{} is of a version that does not know `thunder mac`", self.name_of(&id))),
        }
    }

    /// The output of the probe here. Only one runs at a time, because each starts about thirty
    /// processes.
    pub(super) async fn look_here(&self) -> Result<String, String> {
        let look = async {
            let _alone = self.0.looking.lock().await;
            let shell = ProcessShell::local(&self.0.options.name);
            tokio::task::spawn_blocking(move || apply::probe(&shell)).await
        };
        let late = |_| format!("this machine's commands have not ended after {} s", LOOK_LIMIT.as_secs());
        let answer = tokio::time::timeout(LOOK_LIMIT, look).await.map_err(late)?;
        let text = answer.map_err(|error| error.to_string())?.map_err(|error| error.to_string())?;
        if text.len() > LONGEST_ANSWER_BYTES {
            return Err(format!("this machine's commands print {} bytes: too many", text.len()));
        }
        Ok(text)
    }

    /// Measures a cable between two nodes. Returns the output of rank 0 of `thunder bench comm`.
    pub(super) async fn measure_cable(&self, bench: CableBench) -> Result<String, String> {
        bench.check()?;
        let (first, _) = self.find_member(&bench.nodes[0])?;
        if first == self.0.id {
            return self.measure_own_cable(bench).await;
        }
        let limit = bench.limit() + Duration::from_secs(5);
        match self.call_within(first, &Call::MeasureCable(bench), limit).await?.0 {
            CallReply::Benched(text) => Ok(text),
            _ => Err(format!("{} is of a version that does not know `thunder mac`", self.name_of(&first))),
        }
    }

    /// Measures a cable that has its first end here.
    pub(super) async fn measure_own_cable(&self, bench: CableBench) -> Result<String, String> {
        bench.check()?;
        let (second, name) = self.find_member(&bench.nodes[1])?;
        let address = bench.addresses[0];
        let port = free_port(IpAddr::V4(address))
            .map_err(|error| format!("this machine does not have {address}: {error}"))?;
        let secret = random_text().map_err(|error| error.to_string())?;
        let rank = |rank| BenchRank { bench: bench.clone(), rank, port, secret: secret.clone() };
        let limit = bench.limit() + Duration::from_secs(5);
        let call = Call::BenchRank(rank(1));
        let (own, other) = tokio::join!(self.bench_rank(rank(0)), self.call_within(second, &call, limit));
        match (own, other) {
            (Ok(text), Ok(_)) => Ok(text),
            (Err(why), Ok(_)) | (Ok(_), Err(why)) => Err(why),
            // The second rank has failed by itself, or because the first has.
            (Err(own), Err(other)) if own == other => Err(own),
            (Err(own), Err(other)) => Err(format!("{own}; on {name}: {other}")),
        }
    }

    /// Runs one rank of a measurement to its end. Returns its output.
    pub(super) async fn bench_rank(&self, rank: BenchRank) -> Result<String, String> {
        rank.bench.check()?;
        let script = rank.script(&self.0.options.program.to_string_lossy());
        let (shell, input, limit) =
            (ProcessShell::local(&self.0.options.name), rank.secret + "\n", rank.bench.limit());
        let run = tokio::task::spawn_blocking(move || shell.run(&script, &input, limit));
        let output = run.await.map_err(|error| error.to_string())?.map_err(|error| error.to_string())?;
        report_of(output)
    }
}

/// A rank's output, or the line with its error.
pub(super) fn report_of(Output { status, mut out, err }: Output) -> Result<String, String> {
    if status != 0 {
        let lines: Vec<&str> = err.lines().filter(|line| line.contains("error")).collect();
        return Err(last_line(&lines.join("\n"), &last_line(&err, "the rank said nothing")));
    }
    out.truncate(out.floor_char_boundary(LONGEST_REPORT_BYTES));
    Ok(out)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
    use super::*;

    fn bench() -> CableBench {
        CableBench {
            nodes: ["a", "b"].map(str::to_owned),
            addresses: [Ipv4Addr::new(10, 84, 72, 1), Ipv4Addr::new(10, 84, 72, 2)],
            network: "10.84.72.0/30".parse().unwrap(),
            devices: [None, None],
            sizes: vec![4096],
            time_ms: 200,
            wait_s: 20,
        }
    }

    #[test]
    fn a_measurement_is_bounded_and_carries_no_words_of_the_asker_into_the_shell() {
        assert_eq!(bench().check(), Ok(()));
        let wrong: [fn(&mut CableBench); 7] = [
            |bench| bench.network = "10.84.73.0/30".parse().unwrap(),
            |bench| bench.network = "0.0.0.0/0".parse().unwrap(),
            |bench| bench.devices[1] = Some("rdma_en2; true".to_owned()),
            |bench| bench.sizes = vec![1; MOST_SIZES + 1],
            |bench| bench.sizes = vec![LARGEST_BYTES + 1],
            |bench| bench.time_ms = LONGEST_TIME_MS + 1,
            |bench| bench.wait_s = LONGEST_WAIT_S + 1,
        ];
        for (index, change) in wrong.into_iter().enumerate() {
            let mut bench = bench();
            change(&mut bench);
            assert!(bench.check().is_err(), "{index}");
        }
        let rank = BenchRank { bench: bench(), rank: 1, port: 4000, secret: "hidden".to_owned() };
        let script = rank.script("/opt/a b/thunder");
        assert!(script.contains("THUNDER_COORDINATOR=10.84.72.1:4000"), "{script}");
        assert!(
            script.contains("exec '/opt/a b/thunder' bench comm") && !script.contains("hidden"),
            "{script}"
        );
    }

    #[test]
    fn rdma_is_measured_where_both_ends_have_a_device() {
        let script = |devices: [Option<&str>; 2]| {
            let bench = CableBench { devices: devices.map(|name| name.map(str::to_owned)), ..bench() };
            BenchRank { bench, rank: 1, port: 1, secret: String::new() }.script("thunder")
        };
        let both = script([Some("rdma_en2"), Some("rdma_en3")]);
        assert!(both.contains("10.84.72.0/30=rdma_en3") && both.contains("--transport rdma"), "{both}");
        let one = script([Some("rdma_en2"), None]);
        assert!(one.contains("--transport tcp") && !one.contains("rdma_en"), "{one}");
    }

    #[test]
    fn a_rank_that_fails_is_quoted() {
        let output = |status, err: &str| Output { status, out: "{}".to_owned(), err: err.to_owned() };
        assert_eq!(report_of(output(0, "warning")), Ok("{}".to_owned()));
        let failed = report_of(output(1, "thunder: error: no route to 10.84.72.1\nended\n"));
        assert_eq!(failed, Err("thunder: error: no route to 10.84.72.1".to_owned()));
        assert_eq!(report_of(output(1, "odd\n")), Err("odd".to_owned()));
    }
}
