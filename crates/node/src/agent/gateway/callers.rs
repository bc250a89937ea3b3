//! The sender of a request at the gateway, and its rights.

use std::net::SocketAddr;

use subtle::ConstantTimeEq;
use thunder_access::{AuthError, Caller, Now, Role};

use crate::agent::Agent;
use crate::http::{Head, HttpError};

/// The sender of a request and its address; `None`: a command of this machine's user.
#[derive(Debug, Clone)]
pub(in crate::agent) struct Asker {
    pub caller: Caller,
    pub remote: Option<SocketAddr>,
}

/// Paths below `/admin` for every key: its own usage, and the models that the cluster serves.
const OF_EVERYONE: [&str; 5] =
    ["/admin/me", "/admin/usage", "/admin/usage/records", "/admin/cluster", "/admin/models"];

/// Paths that need no key.
const OPEN: [&str; 4] = ["/health", "/health/live", "/health/ready", "/openapi.json"];

/// Whether a path is for users who sign in, and so have no key yet.
pub(super) fn is_sign_in(path: &str) -> bool {
    matches!(path, "/auth" | "/auth/begin" | "/auth/finish")
}

impl Agent {
    fn store_has_keys(&self) -> bool {
        self.0.options.access.as_ref().is_some_and(thunder_access::Access::has_keys)
    }

    /// The sender of this head. Without keys only this machine can connect, and only requests
    /// addressed to it are answered, because a web page could direct a browser here by a name of
    /// its own.
    ///
    /// # Errors
    /// If a key is needed, and the request has no valid key.
    pub(super) fn caller(&self, head: &Head, peer: Option<SocketAddr>) -> Result<Caller, HttpError> {
        let Some(peer) = peer else { return Ok(Caller::Local) };
        let is_here = peer.ip().to_canonical().is_loopback();
        let settings = self.api_settings();
        let fixed = &settings.keys;
        // Load balancers send requests without a key, and learn little more than that the node is
        // up.
        let is_open = head.method == "GET" && OPEN.contains(&head.path.as_str());
        if fixed.is_empty() && !self.store_has_keys() {
            if is_here {
                return head.check_host().map(|()| Caller::Open);
            }
            if is_open {
                return Ok(Caller::Fixed);
            }
            let message = "this node has no keys yet: it gets those of the cluster when it joins, or make one with \
                           `thunder keys create NAME`";
            return Err(HttpError::new(401, "no_keys", message));
        }
        if is_open || is_sign_in(&head.path) {
            return Ok(Caller::Fixed);
        }
        let Some(token) = head.key().filter(|token| !token.is_empty()) else {
            let message = "send the header \"Authorization: Bearer KEY\" with a valid key";
            return Err(HttpError::new(401, "invalid_api_key", message));
        };
        let same = |key: &String| key.as_bytes().ct_eq(token.as_bytes());
        // Compares all keys, so that timing reveals nothing about similar keys.
        if bool::from(fixed.iter().fold(subtle::Choice::from(0), |known, key| known | same(key))) {
            // Without other keys, users of this machine administer the cluster, as with the command
            // line.
            let administers = is_here && !self.store_has_keys();
            return Ok(if administers { Caller::Local } else { Caller::Fixed });
        }
        let access = self.0.options.access.as_ref();
        let found =
            access.map_or(Err(AuthError::Unknown), |access| access.authenticate(token, Now::read().time));
        found.map_err(|error| {
            let code = match &error {
                AuthError::Unknown => "invalid_api_key",
                AuthError::Expired { .. } => "expired_api_key",
                AuthError::Revoked { .. } => "revoked_api_key",
            };
            HttpError::new(401, code, &error.to_string())
        })
    }

    /// The claimant for the head's scheduler, as JSON: the engine's time is divided among teams,
    /// and among keys within a team.
    pub(super) fn claimant(&self, caller: &Caller) -> Option<String> {
        let access = self.0.options.access.as_ref().filter(|access| access.has_keys())?;
        serde_json::to_string(&caller.claimant(&access.policy())).ok()
    }

    /// Refuses administration to users.
    ///
    /// # Errors
    /// If the path is for administrators, and the caller is none.
    pub(super) fn check_administration(
        &self,
        head: &Head,
        caller: &Caller,
        peer: Option<SocketAddr>,
    ) -> Result<(), HttpError> {
        let path = head.path.split('?').next().unwrap_or_default();
        if !path.starts_with("/admin/") || caller.role() == Role::Admin {
            return Ok(());
        }
        if caller.key().is_some() && OF_EVERYONE.contains(&path) && head.method == "GET" {
            return Ok(());
        }
        if self.store_has_keys() || peer.is_none() {
            let message = "this needs a key with the role admin: on a node of the cluster, \
                           `thunder keys create NAME --role admin` makes one";
            return Err(HttpError::new(403, "admin_key_required", message));
        }
        let message = "a cluster is administered from its nodes: use `thunder cluster` and `thunder model` there, make \
                       an admin key with `thunder keys create NAME --role admin`, or open the dashboard through \
                       `ssh -L 8000:localhost:8000 NODE`";
        Err(HttpError::new(403, "not_on_the_node", message))
    }
}
