//! Administrative acts on this node, for the audit log of its store.

use serde_json::json;
use thunder_access::{Access, Actor, Now};
use thunder_dashboard::Act;

use super::Agent;
use super::control::{Reply, Request};
use super::models::{ModelAsk, Work};
use crate::id::NodeId;

/// The act of a node that has joined by a token, which somebody has made before.
pub(super) fn joined(name: &str, id: NodeId) -> Act {
    let details = json!({ "id": id.to_string() });
    Act { action: "node.join", subject: Some(name.to_owned()), details }
}

/// The act of a request; `None` if it only reads.
fn act_of(request: &Request) -> Option<Act> {
    let (action, subject, details) = match request {
        Request::Approve(_) => ("node.approve", None, json!({})),
        Request::Token(life_s) => ("cluster.token", None, json!({ "life_s": life_s })),
        Request::Remove(node) => ("node.remove", Some(node), json!({})),
        Request::Drain { node, drained: true } => ("node.drain", Some(node), json!({})),
        Request::Drain { node, drained: false } => ("node.resume", Some(node), json!({})),
        Request::Load {
            model,
            nodes,
            count,
            arguments,
            weights,
            layouts,
            replicas,
            idle_unload_s,
            on_loss,
        } => {
            let details = json!({
                "nodes": nodes, "count": count, "arguments": arguments, "weights": weights, "layouts": layouts,
                "replicas": replicas, "idle_unload_s": idle_unload_s, "on_loss": on_loss,
            });
            ("model.load", Some(model), details)
        }
        Request::Unload(model) => ("model.unload", Some(model), json!({})),
        Request::Models { nodes, ask: ModelAsk::Begin { work, model, revision, .. } } => {
            let action = match work {
                Work::Pull => "model.pull",
                Work::Update => "model.update",
                Work::Verify => "model.verify",
            };
            (action, Some(model), json!({ "nodes": nodes, "revision": revision }))
        }
        Request::Models { nodes, ask: ModelAsk::Remove(model) } => {
            ("model.remove", Some(model), json!({ "nodes": nodes }))
        }
        Request::Leave => ("cluster.leave", None, json!({})),
        Request::Stop => ("cluster.stop", None, json!({})),
        Request::Status
        | Request::Headers(_)
        | Request::Served
        | Request::MeasureLinks
        | Request::MeasureMachines { .. }
        | Request::Logs { .. }
        | Request::Look { .. }
        | Request::MeasureCable(_)
        | Request::Models { ask: ModelAsk::List | ModelAsk::Has(_) | ModelAsk::HasPart { .. }, .. } => {
            return None;
        }
    };
    Some(Act { action, subject: subject.cloned(), details })
}

/// The same act, with the name of its object from the reply.
fn named(act: Act, reply: &Reply) -> Act {
    match reply {
        Reply::Approved(name) | Reply::Changed { name, .. } => Act { subject: Some(name.clone()), ..act },
        _ => act,
    }
}

/// Whether anything was done: if several nodes are asked, each answers for itself.
fn was_done(reply: &Reply) -> bool {
    match reply {
        Reply::Models(answers) => answers.iter().any(|(_, answer)| answer.is_ok()),
        _ => true,
    }
}

impl Agent {
    /// Carries out a request, and records it if it is an act that succeeded.
    ///
    /// # Errors
    /// A message for the user.
    pub(super) async fn answer_as(&self, actor: Actor, request: Request) -> Result<Reply, String> {
        let act = act_of(&request);
        let reply = self.carry_out(request).await?;
        if let Some(act) = act.filter(|_| was_done(&reply)) {
            self.note_act(actor, named(act, &reply)).await;
        }
        Ok(reply)
    }

    /// Writes an act to the audit log, if this node has keys. Without keys, actors cannot be
    /// distinguished.
    pub(super) async fn note_act(&self, actor: Actor, act: Act) {
        let Some(access) = self.0.options.access.clone().filter(Access::has_keys) else { return };
        let Act { action, subject, details } = act;
        let write = move || access.note_act(&actor, action, subject.as_deref(), details, Now::read().time);
        let noted = tokio::task::spawn_blocking(write).await;
        match noted {
            Ok(Ok(())) => {}
            Ok(Err(error)) => tracing::error!("the audit log lacks {action}: {error}"),
            Err(error) => tracing::error!("the audit log lacks {action}: {error}"),
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
    use super::*;
    use crate::document::{OnLoss, PlannedLayout};

    #[test]
    fn acts_name_what_was_done_and_hold_no_code() {
        let act = act_of(&Request::Approve("K7-4F9Q-X2MC".into())).unwrap();
        let act = named(act, &Reply::Approved("bee".into()));
        assert_eq!((act.action, act.subject.as_deref()), ("node.approve", Some("bee")));
        assert!(!act.details.to_string().contains("4F9Q"));
        let drained = Request::Drain { node: "b".into(), drained: false };
        assert_eq!(act_of(&drained).unwrap().action, "node.resume");
        assert_eq!(act_of(&Request::Status), None);
        assert_eq!(act_of(&Request::Stop).unwrap().action, "cluster.stop");
        let layout =
            PlannedLayout { nodes: vec![NodeId([7; 32])], weights: vec![1], arguments: vec!["--pp".into()] };
        let load = Request::Load {
            model: "m".into(),
            nodes: Vec::new(),
            count: None,
            arguments: Vec::new(),
            weights: Vec::new(),
            layouts: vec![vec![layout]],
            replicas: 1,
            idle_unload_s: None,
            on_loss: OnLoss::Wait,
        };
        let details = act_of(&load).unwrap().details;
        assert_eq!(details["layouts"][0][0]["nodes"][0], NodeId([7; 32]).to_string(), "{details}");
        assert_eq!(details["on_loss"], "wait", "{details}");
        let refused = Reply::Models(vec![("bee".into(), Err("no such model".into()))]);
        assert!(!was_done(&refused) && was_done(&Reply::Approved("bee".into())));
    }
}
