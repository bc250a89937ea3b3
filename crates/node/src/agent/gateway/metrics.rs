//! `/metrics` of a node, for Prometheus: this node's view of the cluster, its gateway's answers,
//! and the metrics of the servers of the groups that it heads.

use std::collections::BTreeMap;
use std::fmt::Display;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use serde_json::Value;
use thunder_access::{Access, Outcome, Refusal};
use tokio::io::{AsyncRead, AsyncWrite};

use super::Question;
use super::client::Client;
use crate::agent::{Agent, MemberStatus, ModelStatus, Status};
use crate::report::RankState;

/// Media type of the metrics.
const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";
/// Time for the servers of this node's groups to reply. Prometheus waits for 10 s.
const SERVERS_LIMIT: Duration = Duration::from_secs(5);
/// The label that names a model, as in the metrics of its server.
const MODEL: &str = "model_name=\"";

/// Outcomes of requests, as labels.
const OUTCOMES: [Outcome; 5] =
    [Outcome::Stop, Outcome::Length, Outcome::Calls, Outcome::Cancelled, Outcome::Failed];

/// Counts of the requests that a gateway has accepted.
#[derive(Debug, Default)]
pub(in crate::agent) struct GatewayCounts {
    /// Requests that are being answered.
    open: AtomicU64,
    /// Ended requests by outcome, in the order of [`OUTCOMES`].
    ended: [AtomicU64; OUTCOMES.len()],
    /// Refused requests by scope and limit.
    refused: Mutex<BTreeMap<(&'static str, &'static str), u64>>,
}

impl GatewayCounts {
    /// Counts the beginning of a request.
    pub fn begin(&self) {
        self.open.fetch_add(1, Ordering::Relaxed);
    }

    /// Counts the end of a request; `None`: the request was wrong.
    pub fn end(&self, outcome: Option<Outcome>) {
        self.open.fetch_sub(1, Ordering::Relaxed);
        let nth = OUTCOMES.iter().position(|known| Some(*known) == outcome);
        if let Some(counter) = nth.and_then(|nth| self.ended.get(nth)) {
            counter.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Counts a refusal by a limit.
    pub fn refuse(&self, refusal: &Refusal) {
        let mut refused = self.refused.lock().unwrap_or_else(PoisonError::into_inner);
        *refused.entry((refusal.scope.name(), refusal.limit.name())).or_default() += 1;
    }
}

/// Metrics of several sources. OpenMetrics requires the samples of a family in one place.
#[derive(Debug, Default)]
struct Families {
    families: BTreeMap<String, Family>,
}

#[derive(Debug, Default)]
struct Family {
    /// The lines that begin with `#`.
    about: String,
    samples: String,
}

impl Families {
    /// Adds a family of this node. Each sample has labels, such as `a="1"`, and a value.
    fn add<V: Display>(&mut self, name: &str, kind: &str, help: &str, samples: &[(String, V)]) {
        let family = self.families.entry(name.to_owned()).or_default();
        family.about = format!("# HELP {name} {help}.\n# TYPE {name} {kind}\n");
        let suffix = if kind == "counter" { "_total" } else { "" };
        for (labels, value) in samples {
            let labels = if labels.is_empty() { String::new() } else { format!("{{{labels}}}") };
            family.samples += &format!("{name}{suffix}{labels} {value}\n");
        }
    }

    /// Adds this node's view of nodes and models.
    fn add_cluster(&mut self, status: &Status) {
        let others = || status.members.iter().filter(|member| member.id != status.me);
        let of_members = |value: fn(&MemberStatus) -> bool| -> Vec<_> {
            // Two nodes may have the same name.
            let labels = |member: &MemberStatus| {
                format!("{},{}", label("member", &member.name), label("member_id", &member.short))
            };
            others().map(|member| (labels(member), flag(value(member)))).collect()
        };
        self.add(
            "thunder:member_up",
            "gauge",
            "1 if another node of the cluster answers this one",
            &of_members(|member| member.up),
        );
        self.add(
            "thunder:member_drained",
            "gauge",
            "1 if another node of the cluster takes no new work",
            &of_members(|member| member.drained),
        );
        let disk = [(String::new(), flag(status.disk_error.is_some()))];
        let help = "1 if the cluster's document is in memory only: the disk does not take it";
        self.add("thunder:document_unwritten", "gauge", help, &disk);
        let of_models = |value: fn(&ModelStatus) -> u64| -> Vec<_> {
            status.models.iter().map(|model| (label("model_name", &model.name), value(model))).collect()
        };
        self.add(
            "thunder:model_ready",
            "gauge",
            "1 if a model answers, as far as this node knows",
            &of_models(|model| flag(model.ready)),
        );
        self.add(
            "thunder:model_asleep",
            "gauge",
            "1 if a model was idle, and is loaded again on the next request",
            &of_models(|model| flag(model.asleep)),
        );
        self.add(
            "thunder:model_generation",
            "counter",
            "Groups that were formed for a model",
            &of_models(|model| model.generation),
        );
        let mut ranks = Vec::new();
        for model in &status.models {
            for state in ["starting", "ready", "ended", "unknown"] {
                let count = model.ranks.iter().filter(|rank| state_of(rank.state.as_ref()) == state).count();
                let labels = format!("{},{}", label("model_name", &model.name), label("state", state));
                ranks.push((labels, count as u64));
            }
        }
        self.add("thunder:model_ranks", "gauge", "Ranks of a model in each state", &ranks);
    }

    /// Adds the counts of this node's gateway.
    fn add_gateway(&mut self, counts: &GatewayCounts, is_failing: bool) {
        let ended = OUTCOMES.iter().zip(&counts.ended);
        let outcomes: Vec<_> = ended
            .map(|(outcome, count)| (label("outcome", outcome.name()), count.load(Ordering::Relaxed)))
            .collect();
        let help = "Requests at this node's gateway, wherever their model ran, by how they ended";
        self.add("thunder:gateway_requests", "counter", help, &outcomes);
        let open = [(String::new(), counts.open.load(Ordering::Relaxed))];
        self.add(
            "thunder:gateway_requests_open",
            "gauge",
            "Requests at this node's gateway that have not ended",
            &open,
        );
        let refused = counts.refused.lock().unwrap_or_else(PoisonError::into_inner);
        let refused: Vec<_> = refused
            .iter()
            .map(|((scope, limit), count)| {
                (format!("{},{}", label("scope", scope), label("limit", limit)), *count)
            })
            .collect();
        self.add("thunder:requests_refused", "counter", "Requests that a limit refused", &refused);
        self.add(
            "thunder:usage_recording_failing",
            "gauge",
            "1 if requests are refused because the store's disk takes no records",
            &[(String::new(), flag(is_failing))],
        );
    }

    /// Adds the machine's power, as `/admin/energy` reports it; nothing if the system does not
    /// report it.
    fn add_energy(&mut self, energy: &Value) {
        let names = [
            ("joules", "thunder:energy_joules", "counter", "What the machine has drawn since the start"),
            ("watts", "thunder:power_watts", "gauge", "What the machine draws"),
        ];
        for (field, name, kind, help) in names {
            if let Some(value) = energy[field].as_f64() {
                let help = format!("{help}, measured or by --watts");
                self.add(name, kind, &help, &[(String::new(), value)]);
            }
        }
    }

    /// Adds the metrics of a group's server, with the group's name in the cluster.
    fn add_server(&mut self, group: &str, text: &str) {
        let mut name = String::new();
        for line in text.lines().filter(|line| *line != "# EOF") {
            if let Some(about) = line.strip_prefix("# ") {
                let named = about.split(' ').nth(1).unwrap_or_default();
                let family = self.families.entry(named.to_owned()).or_default();
                // The first of several servers describes the family.
                if named != name && family.samples.is_empty() {
                    family.about.clear();
                }
                if family.samples.is_empty() {
                    family.about += &format!("{line}\n");
                }
                named.clone_into(&mut name);
            } else if let Some(family) = self.families.get_mut(&name) {
                family.samples += &format!("{}\n", with_model(line, group));
            }
        }
    }

    fn text(&self) -> String {
        let families = self.families.values().map(|family| format!("{}{}", family.about, family.samples));
        families.chain(["# EOF\n".to_owned()]).collect()
    }
}

/// A sample with the model's name replaced.
fn with_model(line: &str, model: &str) -> String {
    let Some(begin) = line.find(MODEL).map(|at| at + MODEL.len()) else { return line.to_owned() };
    let mut escaped = false;
    let end = line[begin..].find(|letter| {
        let ends = letter == '"' && !escaped;
        escaped = letter == '\\' && !escaped;
        ends
    });
    let end = end.map_or(line.len(), |end| begin + end);
    format!("{}{}{}", &line[..begin], escape(model), &line[end..])
}

/// A label's value.
fn escape(text: &str) -> String {
    text.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

fn label(name: &str, value: &str) -> String {
    format!("{name}=\"{}\"", escape(value))
}

fn flag(is_so: bool) -> u64 {
    u64::from(is_so)
}

impl Agent {
    /// Answers `GET /metrics`, whatever is loaded.
    pub(super) async fn answer_metrics<S: AsyncRead + AsyncWrite + Unpin>(&self, client: &mut S) {
        let mut families = Families::default();
        families.add_cluster(&self.status());
        let is_failing = self.0.options.access.as_ref().is_some_and(Access::is_failing);
        families.add_gateway(&self.0.gateway_counts, is_failing);
        families.add_energy(&self.extended("GET", "/admin/energy", Vec::new()).await.body);
        for (group, text) in self.servers_metrics().await {
            families.add_server(&group, &text);
        }
        let header = format!("content-type: {CONTENT_TYPE}\r\n");
        // If the client has left, this is not an error.
        let _ = Client::new(client).whole("200 OK", &header, families.text().as_bytes()).await;
    }

    /// The metrics of the servers of the groups that this node heads. A server that does not answer
    /// is omitted: [`Families::add_cluster`] reports that its model is not ready.
    async fn servers_metrics(&self) -> Vec<(String, String)> {
        let document = self.lock().membership.document().clone();
        let mut asking = tokio::task::JoinSet::new();
        for (group, _) in document.models() {
            let Some((head, placement)) = self.ready_now(group).filter(|(head, _)| *head == self.0.id) else {
                continue;
            };
            let (agent, group) = (self.clone(), group.to_owned());
            let path = "/metrics".to_owned();
            let question =
                Question { looks: true, ..Question::without_body("GET".into(), path, group.clone()) };
            asking.spawn(async move {
                let asked = agent.fetch(&question, head, placement);
                let body = tokio::time::timeout(SERVERS_LIMIT, asked).await.ok()?.ok()?;
                Some((group, String::from_utf8(body).ok()?))
            });
        }
        asking.join_all().await.into_iter().flatten().collect()
    }
}

/// A rank's state as a label.
fn state_of(state: Option<&RankState>) -> &'static str {
    match state {
        Some(RankState::Starting) => "starting",
        Some(RankState::Ready) => "ready",
        Some(RankState::Ended(_)) => "ended",
        None => "unknown",
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::agent::RankStatus;
    use crate::document::OnLoss;
    use crate::id::NodeId;

    /// The file lists what rules and dashboards may use: `crates/server/tests/api/deploy.rs` reads
    /// it.
    #[test]
    fn a_nodes_own_metrics_are_those_of_the_example() {
        let me = NodeId([1; 32]);
        let member = |id: NodeId, name: &str, up| MemberStatus {
            id,
            short: id.short(),
            name: name.to_owned(),
            up,
            cut_off_from: Vec::new(),
            refused: None,
            drained: false,
            addresses: Vec::new(),
            report: None,
        };
        let rank = |state| RankStatus { node: "ant".to_owned(), state, words: String::new() };
        let status = Status {
            me,
            code: None,
            removed: false,
            document: String::new(),
            disk_error: None,
            members: vec![
                member(me, "ant", true),
                member(NodeId([2; 32]), "bee", true),
                member(NodeId([3; 32]), "cat", false),
            ],
            newcomers: Vec::new(),
            models: vec![ModelStatus {
                name: "org/model".to_owned(),
                ready: true,
                generation: 2,
                ranks: vec![rank(Some(RankState::Ready)), rank(None)],
                replica_of: None,
                asleep: false,
                active: 0,
                on_loss: OnLoss::Replace,
                lost: Vec::new(),
                failed: None,
            }],
            links: Vec::new(),
            tasks: Vec::new(),
            sent_bytes: 0,
        };
        let counts = GatewayCounts::default();
        for outcome in [Some(Outcome::Stop), Some(Outcome::Failed), None] {
            counts.begin();
            counts.end(outcome);
        }
        counts.begin();
        let mut families = Families::default();
        families.add_cluster(&status);
        families.add_gateway(&counts, false);
        families.add_energy(&json!({ "joules": 12.5, "watts": null }));
        let example = include_str!("../../../../../deploy/prometheus/node-metrics.txt");
        assert_eq!(families.text(), example);
    }

    #[test]
    fn metrics_of_several_servers_are_one_list_with_the_clusters_names() {
        let server = |count: u64| {
            format!(
                "# HELP vllm:x Things.\n# TYPE vllm:x counter\nvllm:x_total{{model_name=\"a\\\"b\"}} {count}\n\
                 # HELP vllm:t_seconds Times.\n# TYPE vllm:t_seconds histogram\n\
                 # UNIT vllm:t_seconds seconds\n\
                 vllm:t_seconds_bucket{{le=\"1.0\",model_name=\"a\"}} {count}\n# EOF\n"
            )
        };
        let mut families = Families::default();
        families.add("thunder:m", "gauge", "One", &[(label("member", "a\"b"), 1)]);
        families.add_server("org/one", &server(1));
        families.add_server("two", &server(2));
        let expected = "# HELP thunder:m One.\n# TYPE thunder:m gauge\nthunder:m{member=\"a\\\"b\"} 1\n\
             # HELP vllm:t_seconds Times.\n# TYPE vllm:t_seconds histogram\n\
             # UNIT vllm:t_seconds seconds\n\
             vllm:t_seconds_bucket{le=\"1.0\",model_name=\"org/one\"} 1\n\
             vllm:t_seconds_bucket{le=\"1.0\",model_name=\"two\"} 2\n\
             # HELP vllm:x Things.\n# TYPE vllm:x counter\n\
             vllm:x_total{model_name=\"org/one\"} 1\nvllm:x_total{model_name=\"two\"} 2\n# EOF\n";
        assert_eq!(families.text(), expected);
    }
}
