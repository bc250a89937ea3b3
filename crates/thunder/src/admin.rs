//! What this program adds to the dashboard of a server or a node: downloads, the planner, settings,
//! sign-in.

mod downloads;
mod settings;

use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use thunder_capacity::plan::{Question, known, plan};
use thunder_capacity::power::PowerWatch;
use thunder_dashboard::{Answer, Ask, Extension};

use crate::signin::{self, Door};
use downloads::Downloads;

/// The extension of `thunder serve` and `thunder up`.
#[derive(Debug)]
pub struct Admin {
    settings: Value,
    downloads: Downloads,
    /// `None`: another process of this machine watches.
    power: Option<PowerWatch>,
    /// `None`: nobody signs in.
    door: Option<Door>,
}

impl Admin {
    /// With the options of this command line, of which `command` is the clap description.
    pub fn new(command: clap::Command, power: Option<PowerWatch>, door: Option<Door>) -> Self {
        let settings = settings::of(command, std::env::args_os());
        Self { settings, downloads: Downloads::default(), power, door }
    }
}

impl Extension for Admin {
    fn answer(&self, ask: &Ask<'_>) -> Option<Answer> {
        Some(match (ask.method, ask.path) {
            ("GET", "/admin/settings") => Answer::ok(self.settings.clone()),
            ("GET", "/admin/energy") => Answer::ok(json!(self.power.as_ref()?.energy())),
            ("GET", "/admin/downloads") => of_result(self.downloads.list()),
            ("POST", "/admin/downloads") => {
                of_result(read::<downloads::PullBody>(ask).and_then(|body| self.downloads.start(&body.model)))
            }
            ("GET", "/admin/planner") => Answer::ok(known()),
            ("POST", "/admin/planner") => of_result(planned(ask.body)),
            _ => return signin::answer(self.door.as_ref(), ask),
        })
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

/// A result as a response; errors are the caller's.
fn of_result(result: anyhow::Result<Value>) -> Answer {
    result.map_or_else(|error| Answer::error(400, "invalid_request", &format!("{error:#}")), Answer::ok)
}

/// An empty object, for acts that have nothing to say.
fn done() -> Value {
    json!({})
}
