//! The machines of a cluster, examined through their node agents.

use std::path::PathBuf;

use anyhow::{Result, bail};
use clap::Args;
use thunder_node::agent::control::{self, Reply, Request};
use thunder_node::agent::{CableBench, Status};
use tokio::task::JoinSet;

use crate::current_thread::runtime;
use crate::node_list;
use crate::up::DataArgs;

/// Nodes of a cluster.
#[derive(Args, Clone)]
pub struct NodesArgs {
    /// Nodes of this machine's cluster, separated by commas, asked through their agents instead of
    /// ssh; without a value, all nodes [default: all nodes, if `thunder up` runs here in a cluster]
    #[arg(long, value_name = "NODE,…", num_args = 0..=1, require_equals = true, default_missing_value = "")]
    nodes: Option<String>,
    #[command(flatten)]
    data: DataArgs,
}

/// The nodes to ask, and the agent that forwards the questions.
pub struct Nodes {
    /// Their names; ids where two have the same name.
    pub names: Vec<String>,
    data: PathBuf,
}

impl NodesArgs {
    /// Whether nodes are requested.
    pub fn is_given(&self) -> bool {
        self.nodes.is_some()
    }

    /// The requested nodes, if there are any.
    pub fn find_given(&self) -> Result<Option<Nodes>> {
        if self.is_given() { self.find() } else { Ok(None) }
    }

    /// The nodes to ask; `None` if none are requested and there is no cluster here.
    pub fn find(&self) -> Result<Option<Nodes>> {
        let data = match (self.data.folder(), self.is_given()) {
            (Ok(data), _) => data,
            (Err(error), true) => return Err(error),
            (Err(_), false) => return Ok(None),
        };
        let status = match runtime()?.block_on(crate::cluster_command::fetch(&data)) {
            Ok(status) => status,
            Err(error) if self.is_given() => return Err(error),
            Err(_) => return Ok(None),
        };
        let names = match self.nodes.as_deref() {
            Some("") => all_names(&status),
            Some(list) => node_list::parse(list)?,
            // An agent without a cluster knows no more than this machine's own commands.
            None if status.members.len() < 2 => return Ok(None),
            None => all_names(&status),
        };
        Ok(Some(Nodes { names, data }))
    }
}

impl Nodes {
    /// The probe's output on each node; all nodes are asked in parallel.
    pub fn ask(&self) -> Result<Vec<Result<String>>> {
        runtime()?.block_on(async {
            let mut asking = JoinSet::new();
            for (index, node) in self.names.iter().cloned().enumerate() {
                let data = self.data.clone();
                asking.spawn(async move {
                    let answer = control::ask(&data, &Request::Look { node: Some(node.clone()) }).await;
                    let answer = match answer {
                        Ok(Reply::Looked(text)) => Ok(text),
                        Ok(_) => Err(format!("{node}: the agent is of another version")),
                        Err(error) => Err(error.to_string()),
                    };
                    (index, answer)
                });
            }
            let mut answers = asking.join_all().await;
            answers.sort_by_key(|(index, _)| *index);
            Ok(answers.into_iter().map(|(_, answer)| answer.map_err(anyhow::Error::msg)).collect())
        })
    }

    /// The output of rank 0 of `thunder bench comm`, run by the agents at both ends of a cable.
    pub fn measure(&self, bench: CableBench) -> Result<String> {
        let request = Request::MeasureCable(bench);
        match runtime()?.block_on(control::ask(&self.data, &request))? {
            Reply::CableMeasured(text) => Ok(text),
            _ => bail!("the agent is of another version"),
        }
    }
}

/// The members' names; the short id if two members have the same name.
fn all_names(status: &Status) -> Vec<String> {
    let name = |index: usize| {
        let member = &status.members[index];
        let same = status.members.iter().filter(|other| other.name == member.name).count();
        if same > 1 { member.short.clone() } else { member.name.clone() }
    };
    (0..status.members.len()).map(name).collect()
}
