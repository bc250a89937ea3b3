//! `thunder cluster`: what a person does with the cluster of this machine's node.

mod demo;
mod logs;
pub mod plan;
mod start;
pub mod status;
mod watch;

use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

use clap::{Args, Subcommand};
use serde_json::json;
use thunder_node::agent::Status;
use thunder_node::agent::control::{self, ControlError, Reply, Request};

use crate::current_thread;
use crate::up::DataArgs;

/// Show the cluster of this machine, and add or remove nodes
///
/// These commands talk to the agent that `thunder up` runs on this machine.
#[derive(Args)]
pub struct ClusterCommand {
    #[command(subcommand)]
    action: Action,
    #[command(flatten)]
    data: DataArgs,
}

#[derive(Subcommand)]
enum Action {
    /// Show the nodes, and whether they answer
    Status(status::StatusArgs),
    /// Exit with status 0 if all nodes answer and agree, else 1
    Health(JsonArgs),
    /// Admit the new node that shows this code
    Approve {
        /// The code that `thunder up` shows on the new node, like K7-4F9Q-X2MC
        #[arg(value_name = "CODE")]
        code: String,
        #[command(flatten)]
        json: JsonArgs,
    },
    /// Print a token with which one new node can join without approval by a person
    ///
    /// Start the new node with `thunder up --token TOKEN`. Only this node accepts the token, so it
    /// must be running at that time. Anybody who has the token can join: keep it secret.
    Token {
        /// How long the token can be used, e.g. 30m, 12h or 7d
        #[arg(long, value_name = "TIME", default_value = "1h", value_parser = parse_time)]
        expires: Duration,
        #[command(flatten)]
        json: JsonArgs,
    },
    /// Remove a node from the cluster for good
    ///
    /// From then on, every node refuses the removed node's key, as soon as it receives the change.
    Remove {
        /// Name or id of the node
        #[arg(value_name = "NODE")]
        node: String,
        #[command(flatten)]
        json: JsonArgs,
    },
    /// Take this node out of its cluster, and end its agent
    ///
    /// Deletes the cluster's document and the node's key; `thunder up` then starts a new node. API
    /// keys, usage and the audit log stay. Before you give the machine to other people, remove the
    /// folder `server` in the data folder.
    Leave,
    /// Move a node's work to other nodes, and give it no new work
    ///
    /// Each model on the node is formed again on other nodes that may run it; running answers
    /// continue there. A model that no other node may run stays.
    Drain {
        /// Name or id of the node
        #[arg(value_name = "NODE")]
        node: String,
        #[command(flatten)]
        json: JsonArgs,
    },
    /// Let a drained node work again
    Resume {
        /// Name or id of the node
        #[arg(value_name = "NODE")]
        node: String,
        #[command(flatten)]
        json: JsonArgs,
    },
    /// Start the agent on this machine in the background; `thunder up` starts it in the foreground
    Start(start::StartArgs),
    /// Stop the agent on this machine, and wait until it has ended
    Stop,
    Plan(plan::PlanArgs),
    /// Show the resources that the nodes use, or measure the network between them
    Stats(crate::stats::StatsCommand),
    /// Print the latest events on a node
    Logs(logs::LogsArgs),
    Demo(demo::ClusterDemo),
}

#[derive(Args, Debug, Clone, Copy)]
struct JsonArgs {
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

impl ClusterCommand {
    /// Runs the command.
    pub fn run(self) -> anyhow::Result<ExitCode> {
        // It has its own runtime.
        if let Action::Stats(stats) = self.action {
            return stats.run().map(|()| ExitCode::SUCCESS);
        }
        let data = self.data.folder()?;
        current_thread::runtime()?.block_on(self.action.run(&data))
    }
}

impl Action {
    async fn run(self, data: &Path) -> anyhow::Result<ExitCode> {
        let (request, JsonArgs { json }) = match self {
            Self::Status(args) => return args.run(data).await.map(|()| ExitCode::SUCCESS),
            Self::Start(args) => return args.run(data).await.map(|()| ExitCode::SUCCESS),
            Self::Logs(args) => return args.run(data).await.map(|()| ExitCode::SUCCESS),
            Self::Plan(args) => return args.run(data).await.map(|()| ExitCode::SUCCESS),
            Self::Demo(demo) => return demo.run().map(|()| ExitCode::SUCCESS),
            Self::Stats(stats) => return stats.run().map(|()| ExitCode::SUCCESS),
            Self::Health(json) => return health(data, json).await,
            Self::Approve { code, json } => (Request::Approve(code), json),
            Self::Token { expires, json } => (Request::Token(expires.as_secs()), json),
            Self::Remove { node, json } => (Request::Remove(node), json),
            Self::Drain { node, json } => (Request::Drain { node, drained: true }, json),
            Self::Resume { node, json } => (Request::Drain { node, drained: false }, json),
            Self::Leave => (Request::Leave, JsonArgs { json: false }),
            Self::Stop => (Request::Stop, JsonArgs { json: false }),
        };
        match control::ask(data, &request).await? {
            Reply::Done if matches!(request, Request::Leave | Request::Stop) => {
                start::await_end(data).await?
            }
            Reply::Approved(name) if json => println!("{}", json!({ "node": name, "state": "approved" })),
            Reply::Approved(name) => eprintln!("{name} is a node of this cluster now"),
            Reply::Token(token) if json => {
                let life_s = if let Request::Token(life_s) = request { life_s } else { 0 };
                println!("{}", json!({ "token": token, "expires_in_s": life_s }));
            }
            Reply::Token(token) => println!("{token}"),
            Reply::Changed { name, spread } => {
                let (state, words) = match request {
                    Request::Remove(_) => ("removed", "is removed"),
                    Request::Drain { drained: true, .. } => {
                        ("drained", "gets no new work; its models move to other nodes that may run them")
                    }
                    _ => ("resumed", "gets work again"),
                };
                let note = if spread { "" } else { "; no other node has heard of it yet" };
                match json {
                    true => println!("{}", json!({ "node": name, "state": state, "spread": spread })),
                    false => eprintln!("{name} {words}{note}"),
                }
            }
            Reply::Status(_)
            | Reply::Logs(_)
            | Reply::Looked(_)
            | Reply::CableMeasured(_)
            | Reply::Models(_)
            | Reply::Headers(_)
            | Reply::Served(_)
            | Reply::Begun(_)
            | Reply::Done
            | Reply::Failed(_) => {}
        }
        Ok(ExitCode::SUCCESS)
    }
}

/// Asks for the status.
pub async fn fetch(data: &Path) -> anyhow::Result<Status> {
    match control::ask(data, &Request::Status).await? {
        Reply::Status(status) => Ok(*status),
        reply => anyhow::bail!("the agent replied {reply:?}: is it of another version?"),
    }
}

/// Prints what is wrong, a line each.
async fn health(data: &Path, JsonArgs { json }: JsonArgs) -> anyhow::Result<ExitCode> {
    let problems = match control::ask(data, &Request::Status).await {
        Ok(Reply::Status(status)) => status.problems(),
        Err(error @ (ControlError::NoAgent(_) | ControlError::Silent { .. })) => vec![error.to_string()],
        other => anyhow::bail!("the agent replied {other:?}"),
    };
    if json {
        println!("{}", json!({ "healthy": problems.is_empty(), "problems": problems }));
    } else {
        problems.iter().for_each(|problem| println!("{problem}"));
    }
    Ok(if problems.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// A time with a unit.
pub fn parse_time(text: &str) -> Result<Duration, String> {
    let wrong = || "write a number with a unit: s, m, h or d, e.g. 30m".to_owned();
    let unit = text.chars().last().ok_or_else(wrong)?;
    let seconds = match unit {
        's' => 1,
        'm' => 60,
        'h' => 3600,
        'd' => 86_400,
        _ => return Err(wrong()),
    };
    let number: u64 = text[..text.len() - 1].parse().map_err(|_| wrong())?;
    let seconds = number.checked_mul(seconds).filter(|seconds| *seconds > 0).ok_or_else(wrong)?;
    Ok(Duration::from_secs(seconds))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_have_units() {
        for (text, seconds) in [("30m", 1800), ("1h", 3600), ("7d", 604_800), ("5s", 5)] {
            assert_eq!(parse_time(text), Ok(Duration::from_secs(seconds)), "{text}");
        }
        for wrong in ["", "5", "h", "0h", "-1h", "1é", "99999999999999999999d", "18446744073709551615d"] {
            assert!(parse_time(wrong).is_err(), "{wrong}");
        }
    }
}
