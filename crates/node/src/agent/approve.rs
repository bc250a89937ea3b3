//! Joining, from the side that connects: a member on which a code was typed, and a newcomer that
//! connects to given addresses.

use std::net::SocketAddr;
use std::time::Duration;

use tokio::net::lookup_host;

use super::Agent;
use super::state::Seen;
use crate::id::NodeId;
use crate::joining::client::{Introduction, JoinError, join_with_token, knock, pair};
use crate::joining::code::Code;
use crate::joining::token::Token;

/// Maximum nodes that are tried for one code. An attacker can announce keys with the same two first
/// characters; each of them gets one guess at the code.
const MOST_CANDIDATES: usize = 4;
/// Time to wait until a node with the code is found.
const FIND_LIMIT: Duration = Duration::from_secs(4);
/// Interval at which a newcomer tries its addresses.
const KNOCK_EVERY: Duration = Duration::from_secs(2);

impl Agent {
    /// Admits the new node that shows `code`. Returns its name.
    ///
    /// # Errors
    /// A message for the user.
    pub async fn approve(&self, code: &str) -> Result<String, String> {
        let code: Code = code.parse().map_err(|error| format!("{error}"))?;
        let candidates = self.candidates(&code).await;
        if candidates.is_empty() {
            return Err("no new node with this code is in sight: is `thunder up` running on it? Where \
                        multicast does not reach, start it with --join ADDRESS-OF-THIS-NODE"
                .to_owned());
        }
        if candidates.len() > MOST_CANDIDATES {
            return Err(format!(
                "{} nodes in sight could have this code, so one of them may be guessing: use `thunder \
                 cluster token` in place of the code",
                candidates.len()
            ));
        }
        let mut failures = Vec::new();
        for (newcomer, seen) in candidates {
            match self.pair_with(&code, newcomer, &seen).await {
                Ok(()) => return Ok(seen.name),
                Err(error) => failures.push(error.to_string()),
            }
        }
        Err(failures.join("; "))
    }

    /// The visible nodes that may show this code. Waits a moment for one.
    async fn candidates(&self, code: &Code) -> Vec<(NodeId, Seen)> {
        let mut changes = self.changes();
        let deadline = tokio::time::Instant::now() + FIND_LIMIT;
        loop {
            let found = self.candidates_now(code);
            if !found.is_empty() || tokio::time::timeout_at(deadline, changes.changed()).await.is_err() {
                return found;
            }
        }
    }

    fn candidates_now(&self, code: &Code) -> Vec<(NodeId, Seen)> {
        let state = self.lock();
        let document = state.membership.document();
        let fits =
            |id: &NodeId, seen: &Seen| seen.alone && code.may_be_of(id) && document.member(id).is_none();
        let found = state.seen.iter().filter(|(id, seen)| fits(id, seen));
        found.map(|(id, seen)| (*id, seen.clone())).collect()
    }

    /// Pairs with a newcomer at the first of its addresses that answers.
    async fn pair_with(&self, code: &Code, newcomer: NodeId, seen: &Seen) -> Result<(), JoinError> {
        let mut failure = None;
        for address in &seen.addresses {
            let admit = |name: String| {
                let mut state = self.lock();
                self.admit(&mut state, newcomer, name, vec![address.to_string()])
            };
            let paired =
                pair(&self.0.tls, (self.0.id, self.own_version()), code, newcomer, *address, admit).await;
            match paired {
                // Nobody answered there.
                Err(error @ JoinError::Connection { .. }) => failure = Some(error),
                decided => return decided,
            }
        }
        let address = seen.addresses.first().copied();
        let address = address.unwrap_or_else(|| SocketAddr::from(([0, 0, 0, 0], 0)));
        Err(failure.unwrap_or(JoinError::WrongCode { address }))
    }

    /// While this node is alone: presents its token, or tries the addresses that the user gave.
    pub(super) async fn keep_joining(self) {
        if let Some(token) = self.0.options.token.clone() {
            self.use_token(&token).await;
        }
        let mut told = None;
        while !self.0.options.join.is_empty() {
            if self.lock().is_alone() {
                let asked = self.knock_everywhere().await;
                if told.as_ref() != Some(&asked) {
                    match &asked {
                        Ok(()) => tracing::info!("waiting to be approved"),
                        Err(why) => tracing::warn!("{why}"),
                    }
                    told = Some(asked);
                }
            }
            tokio::time::sleep(KNOCK_EVERY).await;
        }
    }

    fn introduction(&self) -> Introduction {
        Introduction { name: self.0.options.name.clone(), version: self.own_version().to_owned() }
    }

    async fn knock_everywhere(&self) -> Result<(), String> {
        let (mut heard, mut failures) = (false, Vec::new());
        let addresses = resolve(&self.0.options.join).await;
        if addresses.is_empty() {
            return Err("no --join leads to an address: nothing is asked".to_owned());
        }
        for address in addresses {
            match knock(&self.0.tls, address, self.introduction(), self.0.address.port()).await {
                Ok(_) => heard = true,
                Err(error) => failures.push(error.to_string()),
            }
        }
        if heard { Ok(()) } else { Err(format!("no node at --join answers: {}", failures.join("; "))) }
    }

    /// Joins with a token, at the issuer's addresses, those that the user gave, and those that were
    /// found.
    async fn use_token(&self, token: &Token) {
        let mut told = String::new();
        while self.lock().is_alone() {
            let given = [&token.addresses[..], &self.0.options.join[..]].concat();
            let mut addresses = resolve(&given).await;
            let found = self.lock().seen.get(&token.issuer).map(|seen| seen.addresses.clone());
            addresses.extend(found.unwrap_or_default());
            let mut failure = format!("the token's issuer {} is not in sight", token.issuer.short());
            for address in addresses {
                match join_with_token(&self.0.tls, token, address, self.introduction()).await {
                    Ok(document) => {
                        let mut state = self.lock();
                        if state.is_alone() {
                            self.adopt(&mut state, document);
                        }
                        return;
                    }
                    Err(error @ JoinError::Refused { .. }) => {
                        // Otherwise the node would run alone, and nobody would notice.
                        self.fail(format!("not joined: {error}"));
                        return;
                    }
                    Err(error) => failure = error.to_string(),
                }
            }
            if failure != told {
                tracing::warn!("{failure}");
                told = failure;
            }
            tokio::time::sleep(KNOCK_EVERY).await;
        }
    }
}

async fn resolve(addresses: &[String]) -> Vec<SocketAddr> {
    let mut resolved = Vec::new();
    for address in addresses {
        match lookup_host(address).await {
            Ok(found) => resolved.extend(found),
            Err(error) => tracing::warn!("{address}: {error}; write HOST:PORT"),
        }
    }
    resolved
}
