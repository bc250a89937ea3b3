//! Administrative requests that a server forwards to the program around it.

use std::fmt::Debug;

use serde_json::{Value, json};

/// A request below `/admin`, or below `/auth` from a person without a key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ask<'a> {
    /// `GET`, `POST`, …
    pub method: &'a str,
    /// The path, without the query.
    pub path: &'a str,
    /// The body; empty if there is none.
    pub body: &'a [u8],
}

/// A JSON response.
#[derive(Debug, Clone, PartialEq)]
pub struct Answer {
    /// The HTTP status.
    pub status: u16,
    /// The body.
    pub body: Value,
    /// The act, if it belongs in the audit log.
    pub act: Option<Act>,
    /// Seconds after which a retry may succeed, for the header `retry-after`.
    pub retry_after_s: Option<u32>,
}

/// An administrative act for the audit log.
#[derive(Debug, Clone, PartialEq)]
pub struct Act {
    /// The kind of act, such as `model.pull`.
    pub action: &'static str,
    /// What it was done to.
    pub subject: Option<String>,
    /// Details, without secrets.
    pub details: Value,
}

impl Answer {
    /// Status 200.
    pub fn ok(body: Value) -> Self {
        Self { status: 200, body, act: None, retry_after_s: None }
    }

    /// An error in the form of OpenAI's API, with a code for programs and a message for people.
    pub fn error(status: u16, code: &str, message: &str) -> Self {
        let kind = if status < 500 { "invalid_request_error" } else { "server_error" };
        let body = json!({"error": {"message": message, "type": kind, "param": null, "code": code}});
        Self { status, body, act: None, retry_after_s: None }
    }

    /// Status 404: there is no such path.
    pub fn unknown(ask: &Ask<'_>) -> Self {
        let message = format!("no endpoint {} {}: docs/dashboard.md lists them", ask.method, ask.path);
        Self::error(404, "unknown_url", &message)
    }
}

/// The administrative paths that the program around a server adds: downloads, the planner,
/// settings. The server itself knows none of these.
pub trait Extension: Debug + Send + Sync {
    /// Answers a request; `None` if the path is not one of these. May take seconds: call it only
    /// where blocking is allowed.
    fn answer(&self, ask: &Ask<'_>) -> Option<Answer>;
}
