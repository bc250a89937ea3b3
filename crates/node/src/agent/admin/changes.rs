//! Translates requests to `/admin` that change something into requests of the command line.

use serde::Deserialize;
use serde::de::DeserializeOwned;

use crate::agent::control::Request;
use crate::agent::models::{ModelAsk, Work, split_revision};
use crate::document::{OnLoss, PlannedLayout};

/// The body of `/admin/models/load`, with the options of `thunder model load`. Without nodes, a
/// count, weights or layouts, the plan's pick is used, as there.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct LoadBody {
    model: String,
    #[serde(default)]
    nodes: Vec<String>,
    #[serde(default)]
    count: Option<u32>,
    #[serde(default)]
    arguments: Vec<String>,
    #[serde(default)]
    weights: Vec<(String, u32)>,
    /// Layouts to try, best first, for each replica, as `/admin/models/plan` returns them.
    #[serde(default)]
    layouts: Vec<Vec<PlannedLayout>>,
    #[serde(default)]
    replicas: Option<u32>,
    #[serde(default)]
    idle_unload_s: Option<u64>,
    #[serde(default)]
    on_loss: OnLoss,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ModelBody {
    model: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct NodeBody {
    node: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct DrainBody {
    node: String,
    drained: bool,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct CodeBody {
    code: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct TokenBody {
    /// Validity of the token in seconds.
    life_s: u64,
}

/// A model on nodes' disks.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct FilesBody {
    model: String,
    /// Names or ids; empty: all nodes that answer.
    #[serde(default)]
    nodes: Vec<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Nothing {}

/// Paths that change something.
pub(super) const CHANGES: [&str; 12] = [
    "/admin/models/load",
    "/admin/models/unload",
    "/admin/models/pull",
    "/admin/models/update",
    "/admin/models/verify",
    "/admin/models/delete",
    "/admin/cluster/drain",
    "/admin/cluster/remove",
    "/admin/cluster/approve",
    "/admin/cluster/token",
    "/admin/cluster/stop",
    "/admin/cluster/leave",
];

/// Whether a change ends the agent.
pub(super) fn ends(path: &str) -> bool {
    matches!(path, "/admin/cluster/stop" | "/admin/cluster/leave")
}

/// The request for a change.
pub(super) fn request_of(path: &str, body: &[u8]) -> Result<Request, serde_json::Error> {
    fn read<T: DeserializeOwned>(body: &[u8]) -> Result<T, serde_json::Error> {
        serde_json::from_slice(body)
    }
    let files = |work: Option<Work>| {
        let FilesBody { model, nodes } = read(body)?;
        let ask = match work {
            None => ModelAsk::Remove(model),
            Some(work) => {
                let (model, revision) = split_revision(&model);
                ModelAsk::Begin {
                    work,
                    model: model.to_owned(),
                    revision: revision.to_owned(),
                    commit: None,
                    part: None,
                }
            }
        };
        Ok(Request::Models { nodes, ask })
    };
    Ok(match path {
        "/admin/models/load" => {
            let body: LoadBody = read(body)?;
            Request::Load {
                model: body.model,
                nodes: body.nodes,
                count: body.count,
                arguments: body.arguments,
                weights: body.weights,
                layouts: body.layouts,
                replicas: body.replicas.unwrap_or(1),
                idle_unload_s: body.idle_unload_s,
                on_loss: body.on_loss,
            }
        }
        "/admin/models/unload" => Request::Unload(read::<ModelBody>(body)?.model),
        "/admin/models/pull" => return files(Some(Work::Pull)),
        "/admin/models/update" => return files(Some(Work::Update)),
        "/admin/models/verify" => return files(Some(Work::Verify)),
        "/admin/models/delete" => return files(None),
        "/admin/cluster/drain" => {
            let DrainBody { node, drained } = read(body)?;
            Request::Drain { node, drained }
        }
        "/admin/cluster/remove" => Request::Remove(read::<NodeBody>(body)?.node),
        "/admin/cluster/token" => Request::Token(read::<TokenBody>(body)?.life_s),
        "/admin/cluster/stop" => read::<Nothing>(body).map(|_| Request::Stop)?,
        "/admin/cluster/leave" => read::<Nothing>(body).map(|_| Request::Leave)?,
        _ => Request::Approve(read::<CodeBody>(body)?.code),
    })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
    use serde_json::{Value, json};

    use super::*;

    /// Everything that the document describes is accepted, and nothing else.
    #[test]
    fn the_bodies_of_changes_are_those_of_the_document() {
        let document = include_str!("../../../../server/src/api/openapi.json");
        let document: Value = serde_json::from_str(document).unwrap();
        let described = document["paths"].as_object().unwrap().iter();
        let described = described.filter(|(_, methods)| methods["post"]["x-node"] == true);
        let mut described: Vec<&str> = described.map(|(path, _)| path.as_str()).collect();
        let mut changes = CHANGES;
        described.sort_unstable();
        changes.sort_unstable();
        assert_eq!(described, changes);
        for path in CHANGES {
            let content = &document["paths"][path]["post"]["requestBody"]["content"]["application/json"];
            let (schema, example) = (&content["schema"], &content["example"]);
            let takes = |body: &Value| request_of(path, body.to_string().as_bytes());
            takes(example).unwrap();
            for (name, field) in schema["properties"].as_object().unwrap() {
                let mut body = example.clone();
                body[name] = field["example"].clone();
                takes(&body).unwrap_or_else(|error| panic!("{path} {name}: {error}"));
            }
            for name in schema["required"].as_array().unwrap() {
                let mut body = example.clone();
                body.as_object_mut().unwrap().remove(name.as_str().unwrap());
                assert!(takes(&body).is_err(), "{path} without {name}");
            }
            // The reader's own error lists all fields.
            let mut unknown = example.clone();
            unknown["mood"] = json!(1);
            let error = takes(&unknown).unwrap_err().to_string();
            let fields = error.split('`').skip(3).step_by(2).count();
            assert_eq!(fields, schema["properties"].as_object().unwrap().len(), "{path}: {error}");
        }
    }

    #[test]
    fn changes_are_the_requests_of_the_command_line() {
        let load = request_of("/admin/models/load", br#"{"model":"m","count":2}"#).unwrap();
        assert!(matches!(load, Request::Load { model, count: Some(2), .. } if model == "m"));
        let error = request_of("/admin/models/load", br#"{"model":"m","nods":[]}"#).unwrap_err();
        assert!(error.to_string().contains("nods"), "{error}");
        assert!(request_of("/admin/cluster/drain", b"{}").is_err());
        assert!(request_of("/admin/cluster/approve", b"\xff").is_err());
    }
}
