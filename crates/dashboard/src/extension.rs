//! Administrative requests that a server passes on to the program around it.

use std::fmt::Debug;

use serde_json::{Value, json};

/// A request below `/admin`, or below `/auth` of somebody without a key.
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
    /// What was done, if the audit log is to have it.
    pub act: Option<Act>,
    /// Seconds after which asking again may succeed, for the header `retry-after`.
    pub retry_after_s: Option<u32>,
}

/// An administrative act, as the audit log tells it.
#[derive(Debug, Clone, PartialEq)]
pub struct Act {
    /// What was done, as in `model.pull`.
    pub action: &'static str,
    /// What it was done to.
    pub subject: Option<String>,
    /// More about it, without secrets.
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

    /// Status 404: nothing has this path.
    pub fn unknown(ask: &Ask<'_>) -> Self {
        let message = format!("no endpoint {} {}: docs/dashboard.md lists them", ask.method, ask.path);
        Self::error(404, "unknown_url", &message)
    }
}

/// What the program around a server adds to its administrative paths: downloads, the planner,
/// settings. A server below knows none of these.
pub trait Extension: Debug + Send + Sync {
    /// Answers a request, or `None` if the path is not one of these. May take seconds: call it
    /// where waiting is allowed.
    fn answer(&self, ask: &Ask<'_>) -> Option<Answer>;
}
