//! Endpoints that this program adds to the dashboard of a server or a node: downloads, the planner,
//! settings, sign-in.

pub mod downloads;
pub mod settings;

use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Weak};

use anyhow::{Context as _, ensure};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use thunder_capacity::plan::{Question, known, plan};
use thunder_capacity::power::PowerWatch;
use thunder_dashboard::{Act, Answer, Ask, Extension};

use crate::cluster_command::plan::{GoalArg, Plan};
use crate::current_thread;
use crate::model_command::{ask_for, may_plan};
use crate::reload::Reload;
use crate::report;
use crate::session;
use crate::signin::{self, Door};
use downloads::Downloads;

/// The extension of `thunder serve` and `thunder up`.
#[derive(Debug, Clone)]
pub struct Admin {
    /// What it runs in.
    pub process: Weak<dyn Reload>,
    pub downloads: Downloads,
    /// `None`: another process of this machine watches.
    pub power: Option<Arc<PowerWatch>>,
    /// `None`: nobody signs in.
    pub door: Option<Arc<Door>>,
    /// The data folder of this node; `None`: a server without a cluster.
    pub node: Option<PathBuf>,
}

/// The question of a plan, as for `thunder cluster plan`.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct PlanBody {
    model: String,
    #[serde(default)]
    goal: GoalArg,
    #[serde(default)]
    replicas: Option<u16>,
    /// Options for `thunder serve`.
    #[serde(default)]
    arguments: Vec<String>,
}

impl Admin {
    fn process(&self) -> anyhow::Result<Arc<dyn Reload>> {
        self.process.upgrade().context("the server ends")
    }

    /// Reads the settings again.
    fn reloaded(&self) -> Answer {
        match self.process().and_then(|process| process.reload()) {
            Ok(reloaded) => Answer { act: Some(reloaded.act()), ..Answer::ok(json!(reloaded)) },
            Err(error) => of_result(Err(error)),
        }
    }

    /// Starts a download.
    fn pulled(&self, ask: &Ask<'_>) -> anyhow::Result<Answer> {
        let downloads::PullBody { model } = read(ask)?;
        let answer = Answer::ok(self.downloads.start(&model)?);
        let act = Act { action: "model.pull", subject: Some(model), details: json!({}) };
        Ok(Answer { act: Some(act), ..answer })
    }

    /// Plans a model on the nodes of this node's cluster.
    fn placed(&self, ask: &Ask<'_>) -> anyhow::Result<Value> {
        let node = self.node.as_ref().context("this server has no cluster: `thunder up` plans layouts")?;
        let PlanBody { model, goal, replicas, arguments } = read(ask)?;
        ensure!(may_plan(&arguments), "the options decide the layout: {}", arguments.join(" "));
        let wanted = ask_for(goal, replicas.map(usize::from), &arguments);
        current_thread::runtime()?.block_on(async {
            let folder = session::open_headers(node, model.as_ref()).await?;
            Ok(Plan::make(node, &folder, wanted).await?.to_json())
        })
    }
}

impl Extension for Admin {
    fn answer(&self, ask: &Ask<'_>) -> Option<Answer> {
        Some(match (ask.method, ask.path) {
            // A server answers this itself; a node calls this.
            ("GET", "/openapi.json") => Answer::ok(thunder_server::openapi()),
            ("GET", "/admin/settings") => of_result(self.process().map(|process| process.settings())),
            ("POST", "/admin/config/reload") => self.reloaded(),
            ("GET", "/admin/energy") => Answer::ok(json!(self.power.as_ref()?.energy())),
            ("GET", "/admin/downloads") => of_result(self.downloads.list()),
            ("POST", "/admin/downloads") => self.pulled(ask).unwrap_or_else(|error| of_result(Err(error))),
            ("POST", "/admin/models/plan") => of_result(self.placed(ask)),
            ("GET", "/admin/planner") => Answer::ok(known()),
            ("POST", "/admin/planner") => simulated(&PLANS, ask.body),
            _ => return signin::answer(self.door.as_deref(), ask),
        })
    }
}

/// Maximum number of parallel simulations for the planner: each uses a processor for up to minutes.
const MOST_PLANS: usize = 2;
/// Those of this process.
static PLANS: AtomicUsize = AtomicUsize::new(0);
/// Time after which another question may find a place.
const PLAN_RETRY_S: u32 = 10;

/// Answers a question to the planner, unless `running` are too many.
fn simulated(running: &AtomicUsize, body: &[u8]) -> Answer {
    let taken = running.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |count| {
        (count < MOST_PLANS).then_some(count + 1)
    });
    if taken.is_err() {
        let why =
            format!("{MOST_PLANS} questions are being simulated already: ask again in {PLAN_RETRY_S} s");
        return Answer { retry_after_s: Some(PLAN_RETRY_S), ..Answer::error(503, "busy", &why) };
    }
    // This also runs if the simulation panics.
    let _place = Place(running);
    of_result(planned(body))
}

/// A place among the running simulations, which becomes free when this is dropped.
struct Place<'a>(&'a AtomicUsize);

impl Drop for Place<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

fn planned(body: &[u8]) -> anyhow::Result<Value> {
    Ok(serde_json::to_value(plan(&Question::read(body)?)?)?)
}

/// The body of a request.
///
/// # Errors
/// With the words of the JSON reader, which name the field and the place.
fn read<T: DeserializeOwned>(ask: &Ask<'_>) -> anyhow::Result<T> {
    Ok(serde_json::from_slice(ask.body)?)
}

/// A result as a response; the caller caused any error.
fn of_result(result: anyhow::Result<Value>) -> Answer {
    result.map_or_else(|error| Answer::error(400, "invalid_request", &report::line(&error)), Answer::ok)
}

/// An empty object, for acts without a result.
fn done() -> Value {
    json!({})
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wrong_body_is_described_once() {
        let ask = Ask { method: "POST", path: "/admin/downloads", body: b"{}" };
        let of_planner = planned(b"{}").unwrap_err();
        let of_download = read::<downloads::PullBody>(&ask).map(drop).unwrap_err();
        for error in [of_planner, of_download] {
            let answer = of_result(Err(error));
            let message = answer.body["error"]["message"].as_str().unwrap().to_owned();
            assert_eq!(message.matches("missing field").count(), 1, "{message}");
        }
    }

    #[test]
    fn few_questions_are_simulated_at_a_time() {
        let running = AtomicUsize::new(MOST_PLANS);
        let busy = simulated(&running, b"{}");
        assert_eq!((busy.status, busy.retry_after_s), (503, Some(PLAN_RETRY_S)));
        running.store(MOST_PLANS - 1, Ordering::Relaxed);
        let wrong = simulated(&running, b"{");
        assert_eq!((wrong.status, running.into_inner()), (400, MOST_PLANS - 1), "its place is free again");
    }

    /// In both directions: every field in the document is accepted, and no other field.
    #[test]
    fn the_bodies_that_the_program_reads_are_those_of_the_document() {
        let document = thunder_server::openapi();
        let takes = |path: &str, body: &Value| -> anyhow::Result<()> {
            let body = body.to_string();
            let ask = Ask { method: "POST", path, body: body.as_bytes() };
            match path {
                "/admin/downloads" => read::<downloads::PullBody>(&ask).map(drop),
                "/admin/models/plan" => read::<PlanBody>(&ask).map(drop),
                "/admin/planner" => Ok(Question::read(ask.body).map(drop)?),
                other => anyhow::bail!("{other} is new: add its reader here"),
            }
        };
        let mut seen = 0;
        for (path, methods) in document["paths"].as_object().unwrap() {
            let post = &methods["post"];
            if post["x-program"] != true {
                continue;
            }
            seen += 1;
            if post["requestBody"].is_null() {
                continue;
            }
            let content = &post["requestBody"]["content"]["application/json"];
            let (schema, example) = (&content["schema"], &content["example"]);
            takes(path, example).unwrap();
            let fields = schema["properties"].as_object().unwrap();
            for (name, field) in fields {
                let mut body = example.clone();
                body[name] = field["example"].clone();
                takes(path, &body).unwrap_or_else(|error| panic!("{path} {name}: {error}"));
                // A field within a field that the document lists.
                for inner in field["properties"].as_object().into_iter().flatten().map(|(inner, _)| inner) {
                    let mut body = example.clone();
                    body[name] = json!({ inner: if inner == "currency" { json!("EUR") } else { json!(1) } });
                    takes(path, &body).unwrap_or_else(|error| panic!("{path} {name}.{inner}: {error}"));
                }
            }
            for name in schema["required"].as_array().unwrap() {
                let mut body = example.clone();
                body.as_object_mut().unwrap().remove(name.as_str().unwrap());
                assert!(takes(path, &body).is_err(), "{path} without {name}");
            }
            let mut unknown = example.clone();
            unknown["mood"] = json!(1);
            let error = takes(path, &unknown).unwrap_err().to_string();
            assert_eq!(error.split('`').skip(3).step_by(2).count(), fields.len(), "{path}: {error}");
        }
        assert_eq!(seen, 4);
    }
}
