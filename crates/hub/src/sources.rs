//! The sources of a pull: peers, then the hub.

use std::{mem, thread, time::Duration};

use crate::{
    client::{Client, FILE_LIST},
    error::HubError,
    failure::Failure,
    listing::Listing,
    options::PullOptions,
    progress::PullEvent,
};

/// The sources with a revision, and its files.
pub(crate) struct Sources {
    /// Peers with the whole model, then the hub, unless the hub must not be used.
    pub(crate) clients: Vec<Client>,
    pub(crate) listing: Listing,
}

impl Sources {
    /// Asks all peers in parallel for a revision. Asks the hub if no peer has it, or if the newest
    /// commit is needed, which only the hub knows.
    pub(crate) fn find(
        repo: &str,
        revision: &str,
        options: &PullOptions,
        progress: &(dyn Fn(PullEvent<'_>) + Sync),
    ) -> Result<Self, HubError> {
        let peers = options.peers.iter().map(|peer| Client::of_peer(peer, options)).collect();
        let hub = Client::new(options)?;
        let mut answers = ask_all(peers, repo, revision);
        let of_hub = || {
            let list = || hub.listing(repo, revision);
            let retry = |failure: &Failure, wait| {
                progress(PullEvent::Retry { file: FILE_LIST, reason: &failure.reason, wait });
            };
            let answer = hub.retrying(list, retry);
            let failed = |(failure, attempts)| hub.error(repo, revision, FILE_LIST, failure, attempts);
            Listing::parse(repo, &answer.map_err(failed)?)
        };
        let listing = match answers.first() {
            Some((_, listing)) if !options.refresh => listing.clone(),
            None if options.offline => return Err(HubError::Offline { repo: repo.into() }),
            _ => of_hub()?,
        };
        // A peer may have the commit under another revision, or may have a newer one too.
        let (same, others): (Vec<_>, Vec<_>) =
            answers.drain(..).partition(|(_, of_peer)| of_peer.sha == listing.sha);
        let others = others.into_iter().map(|(client, _)| client).collect();
        let mut clients: Vec<Client> = same.into_iter().map(|(client, _)| client).collect();
        clients.extend(ask_all(others, repo, &listing.sha).into_iter().map(|(client, _)| client));
        if !options.offline {
            clients.push(hub);
        }
        Ok(Self { clients, listing })
    }
}

/// The sources with the revision, in the same order, with their lists of files.
fn ask_all(clients: Vec<Client>, repo: &str, revision: &str) -> Vec<(Client, Listing)> {
    let ask = |client: Client| {
        let bytes = client.listing(repo, revision).ok()?;
        let listing = Listing::parse(repo, &bytes).ok()?;
        Some((client, listing))
    };
    let answers: Vec<_> = thread::scope(|scope| {
        let asking: Vec<_> = clients.into_iter().map(|client| scope.spawn(|| ask(client))).collect();
        asking.into_iter().map(thread::ScopedJoinHandle::join).collect()
    });
    answers.into_iter().filter_map(|answer| answer.ok().flatten()).collect()
}

/// A file of a revision, for messages.
pub(crate) struct Wanted<'a> {
    pub(crate) repo: &'a str,
    pub(crate) revision: &'a str,
    pub(crate) file: &'a str,
}

impl Sources {
    /// Asks one source after the other, beginning with number `first`, until one answers.
    pub(crate) fn ask<T>(
        &self,
        wanted: &Wanted<'_>,
        first: usize,
        progress: &(dyn Fn(PullEvent<'_>) + Sync),
        ask: impl Fn(&Client) -> Result<T, Failure>,
    ) -> Result<T, HubError> {
        let &Wanted { repo, revision, file } = wanted;
        let mut turns = Turns::new(&self.clients, first, &[]);
        loop {
            let client = turns.client();
            let failure = match ask(client) {
                Ok(answer) => return Ok(answer),
                Err(failure) => failure,
            };
            let reason = failure.reason.clone();
            match turns.failed(failure) {
                Ok(wait) => progress(PullEvent::Retry { file, reason: &reason, wait }),
                Err((failure, attempts)) => {
                    return Err(client.error(repo, revision, file, failure, attempts));
                }
            }
        }
    }
}

/// Takes turns among the sources of one file: after a failure, the next source; a pause only after
/// all have failed.
pub(crate) struct Turns<'a> {
    clients: Vec<&'a Client>,
    turn: usize,
    /// Number of consecutive failures without a new byte.
    failed: u32,
    /// Whether one of the sources may disappear.
    may_retry: bool,
    /// Sources that have sent bytes.
    pub(crate) used: Vec<String>,
}

impl<'a> Turns<'a> {
    /// Peers in turn, beginning with number `first`, so that several files use several peers; then
    /// the hub.
    pub(crate) fn new(clients: &'a [Client], first: usize, without: &[String]) -> Self {
        let peers = clients.len().saturating_sub(1);
        let mut order: Vec<&Client> = clients.iter().collect();
        if peers > 0 {
            order[..peers].rotate_left(first % peers);
        }
        order.retain(|client| !without.contains(&client.name));
        Self { clients: order, turn: 0, failed: 0, may_retry: false, used: Vec::new() }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.clients.is_empty()
    }

    /// The source to ask now.
    pub(crate) fn client(&self) -> &'a Client {
        self.clients[self.turn % self.clients.len()]
    }

    /// Notes that the source has sent bytes.
    pub(crate) fn gained(&mut self) {
        let name = &self.client().name;
        if !self.used.contains(name) {
            let name = name.clone();
            self.used.push(name);
        }
        (self.failed, self.may_retry) = (0, false);
    }

    /// The peers among the sources, in turn.
    pub(crate) fn peers(&self) -> Vec<&'a Client> {
        self.clients.iter().copied().filter(|client| client.is_peer).collect()
    }

    /// Changes to the next source. Returns the pause before the next attempt, or `Err` if every
    /// source has failed too often.
    pub(crate) fn failed(&mut self, failure: Failure) -> Result<Duration, (Failure, u32)> {
        let sources = self.clients.len() as u32;
        let client = self.client();
        self.turn += 1;
        self.failed += 1;
        self.may_retry |= failure.retry;
        if !self.failed.is_multiple_of(sources) {
            return Ok(Duration::ZERO);
        }
        let round = self.failed / sources;
        if !mem::take(&mut self.may_retry) {
            return Err((failure, round));
        }
        client.pause(failure.wait, round).ok_or((failure, round))
    }
}
