//! Loading and unloading: turns the operator's wish for a model into wishes for its groups.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::process::Stdio;
use std::time::Duration;

use super::Agent;
use super::canary::setting;
use super::control::Reply;
use crate::document::{Document, MOST_MEMBERS, ModelWish, PlannedLayout};
use crate::id::NodeId;
use crate::placement::value_of;

/// Time for reading a model's headers.
const CHECK_LIMIT: Duration = Duration::from_secs(60);

/// The name of a model's group: the first has the model's name.
fn group_name(model: &str, replica: u32) -> String {
    if replica == 0 { model.to_owned() } else { format!("{model}#{}", replica + 1) }
}

impl Agent {
    /// Makes `replicas` groups serve a model, each with its own layouts. Returns whether another
    /// node holds the change.
    pub(super) async fn load(
        &self,
        wish: ModelWish,
        layouts: Vec<Vec<PlannedLayout>>,
        replicas: u32,
    ) -> Result<bool, String> {
        if !layouts.is_empty() && layouts.len() != replicas as usize {
            return Err(format!(
                "{} lists of layouts for {replicas} replicas: give one for each, or none",
                layouts.len()
            ));
        }
        let document = self.lock().membership.document().clone();
        let may = if wish.nodes.is_empty() { document.members().count() } else { wish.nodes.len() };
        if replicas == 0 || replicas as usize > may.min(MOST_MEMBERS) {
            return Err(format!(
                "{replicas} replicas: each needs a node of its own, and {may} may run the model"
            ));
        }
        let wanted = wish.count.unwrap_or(1) as usize * replicas as usize;
        if wanted > may {
            let of = if replicas == 1 { String::new() } else { format!(" for each of {replicas} replicas") };
            return Err(format!(
                "{} nodes{of} are asked for, and {may} may run the model: `thunder cluster status` lists them",
                wish.count.unwrap_or(1)
            ));
        }
        if document.model(&wish.model).is_some_and(|known| known.replica_of.is_some()) {
            return Err(format!("{} is the name of another model's replica: load that model", wish.model));
        }
        // Without a plan or a number, replicas share the nodes evenly.
        let share = (replicas > 1).then_some((may as u32 / replicas).max(1));
        let groups: Vec<(String, ModelWish)> = (0..replicas)
            .map(|replica| {
                let wish = ModelWish {
                    count: wish.count.or(share),
                    layouts: layouts.get(replica as usize).cloned().unwrap_or_default(),
                    replica_of: (replica > 0).then(|| wish.model.clone()),
                    ..wish.clone()
                };
                (group_name(&wish.model, replica), wish)
            })
            .collect();
        let kept: BTreeSet<&str> = groups.iter().map(|(name, _)| name.as_str()).collect();
        self.check_nodes(&wish, &document)?;
        self.check_model(&wish).await?;
        let me = self.0.id;
        // Another load may have made groups while this one was checked.
        let change = |document: &mut Document| {
            let old: Vec<String> = document
                .groups_of(&wish.model)
                .filter(|(name, _)| !kept.contains(name))
                .map(|(name, _)| name.to_owned())
                .collect();
            old.iter().try_for_each(|name| document.set_model(me, name, None))?;
            groups.iter().try_for_each(|(name, wish)| document.set_model(me, name, Some(wish.clone())))
        };
        self.change(change).await
    }

    /// Refuses a wish that no node can meet now.
    fn check_nodes(&self, wish: &ModelWish, document: &Document) -> Result<(), String> {
        if document.member(&self.0.id).is_none() {
            let why = "this node was removed from its cluster, so it loads no model there: `thunder cluster leave` \
                       makes it a new node";
            return Err(why.to_owned());
        }
        let may_run = |id: &NodeId| wish.nodes.is_empty() || wish.nodes.contains(id);
        if document.members().filter(|(id, _)| may_run(id)).all(|(_, member)| member.drained) {
            let why =
                "all nodes that may run it are drained: `thunder cluster resume NODE` gives one work again";
            return Err(why.to_owned());
        }
        Ok(())
    }

    /// Refuses a model or options that cannot work, before they take the place of what does.
    async fn check_model(&self, wish: &ModelWish) -> Result<(), String> {
        let (model, cache) = (&wish.model, &self.0.options.models.cache);
        let is_elsewhere = thunder_hub::is_hub_name(model) && thunder_hub::locate_in(model, cache).is_err();
        let path = if is_elsewhere { self.headers_of(model.clone()).await? } else { PathBuf::from(model) };
        // Files of others need not be here.
        let runs_here = wish.nodes.is_empty() || wish.nodes.contains(&self.0.id);
        if !runs_here && (path.is_absolute() || value_of(&wish.arguments, "--lora").is_some()) {
            return Ok(());
        }
        let mut command = self.serve_command(path, &wish.arguments, "none");
        command.arg("--check").stdin(Stdio::null());
        let program = self.0.options.program.display().to_string();
        let output = tokio::process::Command::from(command).kill_on_drop(true).output();
        let output = match tokio::time::timeout(CHECK_LIMIT, output).await {
            Ok(output) => output.map_err(|error| format!("{program}: {error}"))?,
            Err(_) => return Err(format!("the check of {model} takes more than {CHECK_LIMIT:?}")),
        };
        match refusal(&String::from_utf8_lossy(&output.stderr)) {
            _ if output.status.success() => Ok(()),
            said if said.is_empty() => Err(format!("the check of {model} ended with {}", output.status)),
            said => Err(said),
        }
    }

    /// Stops serving a model, with all its replicas.
    pub(super) async fn unload(&self, name: String) -> Result<Reply, String> {
        let document = self.lock().membership.document().clone();
        match document.model(&name) {
            None => return Err(format!("no model {name} is loaded: `thunder cluster status` lists them")),
            Some(ModelWish { replica_of: Some(model), .. }) => {
                return Err(format!("{name} is a replica: unload {model}, or load it with fewer --replicas"));
            }
            Some(_) => {}
        }
        let me = self.0.id;
        let groups: Vec<String> = document.groups_of(&name).map(|(group, _)| group.to_owned()).collect();
        let change = |document: &mut Document| {
            for group in &groups {
                document.set_model(me, group, None)?;
                if document.setting(&setting(group)).is_some() {
                    document.set_setting(me, &setting(group), None)?;
                }
            }
            Ok(())
        };
        let spread = self.change(change).await?;
        Ok(Reply::Changed { name, spread })
    }
}

/// What a program says that has refused its options: its error and tip, without its usage.
fn refusal(said: &str) -> String {
    let error = said.split_once("error: ").map_or(said, |(_, error)| error);
    let end = ["\n\nUsage:", "\n\nFor more information"].iter().filter_map(|mark| error.find(mark)).min();
    error[..end.unwrap_or(error.len())].trim().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_is_the_error_with_its_tip() {
        let said = "error: unexpected argument '--contxt' found\n\n  tip: a similar argument exists: \
                    '--context'\n\nUsage: thunder serve [OPTIONS] [MODEL]\n\nFor more information, try '--help'.\n";
        let words = "unexpected argument '--contxt' found\n\n  tip: a similar argument exists: '--context'";
        assert_eq!(refusal(said), words);
        assert_eq!(refusal("error: no such file\n"), "no such file");
        assert_eq!(refusal(""), "");
    }
}
