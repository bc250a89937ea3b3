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
/// The same failure is told again after this time, and then after twice the pause before, up to the
/// second.
const TOLD_AGAIN_AFTER: Duration = Duration::from_secs(60);
const TOLD_AGAIN_WITHIN: Duration = Duration::from_secs(3600);

impl Agent {
    /// Admits the new node that shows `code`. Returns its name.
    ///
    /// # Errors
    /// A message for the user.
    pub async fn approve(&self, code: &str) -> Result<String, String> {
        let code: Code = code.parse().map_err(|error| format!("{error}"))?;
        self.check_approval(&code)?;
        let known = self.members_with(&code);
        // A member's code is most likely typed twice, and nobody is waited for.
        let candidates =
            if known.is_empty() { self.candidates(&code).await } else { self.candidates_now(&code) };
        if candidates.is_empty() {
            let known = match known.is_empty() {
                true => String::new(),
                false => {
                    format!("{} has this code and is a node of this cluster already; ", known.join(" or "))
                }
            };
            return Err(format!(
                "{known}no new node with this code is in sight: is `thunder up` running on it? Where multicast does \
                 not reach, start it with --join ADDRESS-OF-THIS-NODE"
            ));
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

    /// Refuses what cannot succeed.
    fn check_approval(&self, code: &Code) -> Result<(), String> {
        let state = self.lock();
        if state.membership.document().is_removed(&self.0.id) {
            let why = "this node was removed from its cluster: approve the code on a node of the cluster, or make this \
                       one a new node by `thunder cluster leave`";
            return Err(why.to_owned());
        }
        if state.is_alone() && state.code == *code {
            let why =
                "this is this node's own code: type it on a node of the cluster that this node shall join";
            return Err(why.to_owned());
        }
        Ok(())
    }

    /// Names of the members that may have shown this code.
    fn members_with(&self, code: &Code) -> Vec<String> {
        let state = self.lock();
        let members = state.membership.document().members().filter(|(id, _)| code.may_be_of(id));
        members.map(|(_, member)| member.name.clone()).collect()
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
        let (mut waits, mut failures) = (false, Seldom::default());
        while !self.0.options.join.is_empty() {
            if self.lock().is_alone() {
                match self.knock_everywhere().await {
                    Ok(()) => {
                        if !waits {
                            tracing::info!("waiting to be approved");
                        }
                        (waits, failures) = (true, Seldom::default());
                    }
                    Err(why) => {
                        if failures.tells(&why, self.now()) {
                            tracing::warn!("{why}");
                        }
                        waits = false;
                    }
                }
            }
            tokio::time::sleep(KNOCK_EVERY).await;
        }
    }

    fn introduction(&self) -> Introduction {
        Introduction { name: self.0.options.name.clone(), version: self.own_version().to_owned() }
    }

    async fn knock_everywhere(&self) -> Result<(), String> {
        let mut heard = false;
        let (addresses, mut failures) = resolve(&self.0.options.join).await;
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
        let mut failures = Seldom::default();
        while self.lock().is_alone() {
            let given = [&token.addresses[..], &self.0.options.join[..]].concat();
            let (mut addresses, unresolved) = resolve(&given).await;
            let found = self.lock().seen.get(&token.issuer).map(|seen| seen.addresses.clone());
            addresses.extend(found.unwrap_or_default());
            let mut failure = format!("the token's issuer {} is not in sight", token.issuer.short());
            if !unresolved.is_empty() {
                failure = format!("{failure}; {}", unresolved.join("; "));
            }
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
            if failures.tells(&failure, self.now()) {
                tracing::warn!("{failure}");
            }
            tokio::time::sleep(KNOCK_EVERY).await;
        }
    }
}

/// Failures that may be repeated for days: a new one is told at once, the same ever more rarely.
#[derive(Debug, Default)]
struct Seldom {
    /// What was told last, when it is told again, and the pause after that.
    told: Option<(String, Duration, Duration)>,
}

impl Seldom {
    /// Whether to tell this failure at this time.
    fn tells(&mut self, failure: &str, now: Duration) -> bool {
        let pause = match &self.told {
            Some((told, again_at, _)) if told == failure && now < *again_at => return false,
            Some((told, _, pause)) if told == failure => *pause,
            _ => TOLD_AGAIN_AFTER,
        };
        self.told = Some((failure.to_owned(), now + pause, (pause * 2).min(TOLD_AGAIN_WITHIN)));
        true
    }
}

/// The addresses, and why others have none.
async fn resolve(addresses: &[String]) -> (Vec<SocketAddr>, Vec<String>) {
    let (mut resolved, mut failures) = (Vec::new(), Vec::new());
    for address in addresses {
        match lookup_host(address).await {
            Ok(found) => resolved.extend(found),
            Err(error) => failures.push(format!("{address}: {error}")),
        }
    }
    (resolved, failures)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_is_told_ever_more_rarely() {
        let mut failures = Seldom::default();
        let day_s = 24 * 3600;
        let told = (0..day_s).step_by(2).filter(|s| failures.tells("nosuchhost", Duration::from_secs(*s)));
        let told: Vec<u64> = told.collect();
        assert_eq!(told[..4], [0, 60, 180, 420]);
        assert!(told.len() < 35, "hourly at most: {told:?}");
        assert!(failures.tells("another", Duration::from_secs(day_s)));
        assert!(failures.tells("nosuchhost", Duration::from_secs(day_s + 2)));
    }
}
