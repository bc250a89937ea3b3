//! The canary: before a model is announced, its group answers a known prompt. The answer is
//! compared with that of a single rank. If they differ, every node answers alone, and the wrong one
//! is named.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use thunder_cluster::watched::WatchedRank;
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;
use tokio::sync::oneshot;

use super::Agent;
use super::calls::{Call, CallReply};
use super::ranks::{StartRank, random_text, served_at};
use crate::canary::{self, CanaryAnswer};
use crate::document::Stamp;
use crate::http_response::ResponseReader;
use crate::id::NodeId;
use crate::wire::{self, LONGEST_FRAME_BYTES};

/// Time for a group to answer.
const ANSWER_LIMIT: Duration = Duration::from_secs(60);
/// Time from the loss of a rank until the head's process has ended.
const LOSS_SHOWS: Duration = Duration::from_secs(2);
/// Loading the whole model on one node may take this many times as long as the group took.
const ALONE_LIMIT_TIMES: u32 = 4;
/// Minimum and maximum time for this. A group that took longer than the maximum is not compared.
const ALONE_LIMITS: (Duration, Duration) = (Duration::from_secs(10), Duration::from_secs(60));
/// Options of `thunder serve` that a single rank does not have; each has a value. Only the head of
/// a group has the draft model, and no answer depends on it.
const OF_GROUPS: [&str; 5] = ["--split", "--parallel", "--stages", "--experts", "--draft"];
/// Enough for the tokens of the canary and its answer.
const CONTEXT: &str = "256";

/// A group that begins to serve.
pub(super) struct Check {
    pub start: StartRank,
    pub api: SocketAddr,
    pub key: String,
    /// Time since its start.
    pub loading: Duration,
}

/// The answer of a single rank, in the document's settings.
#[derive(Serialize, Deserialize)]
struct Reference {
    /// The wish that it belongs to.
    wish: Stamp,
    answer: CanaryAnswer,
}

impl Agent {
    /// Checks the groups that have their head here and have just begun to serve.
    pub(super) fn check_new_groups(&self) {
        let now: Vec<Check> = self.groups().own.values_mut().filter_map(|rank| rank.begin_check()).collect();
        for check in now {
            let agent = self.clone();
            tokio::spawn(async move {
                let outcome = agent.check_group(&check).await;
                if let Err(why) = &outcome {
                    agent.0.log.add(format!("{} is not announced: {why}", check.start.name));
                }
                agent.groups().end_check(&check.start, outcome);
                agent.0.version.send_modify(|version| *version += 1);
            });
        }
    }

    async fn check_group(&self, check: &Check) -> Result<(), String> {
        let start = &check.start;
        let answer = ask(check.api, &check.key).await;
        if start.ranks == 1 {
            return answer.map(drop);
        }
        let limit = (check.loading * ALONE_LIMIT_TIMES).clamp(ALONE_LIMITS.0, ALONE_LIMITS.1);
        let answer = match answer {
            Ok(answer) => answer,
            // For example numbers that are not finite, for which one rank may be responsible. A
            // group that has lost a rank is formed again elsewhere.
            Err(why) => {
                tokio::time::sleep(LOSS_SHOWS).await;
                if !self.groups().is_alive(start) {
                    return Err(why);
                }
                return self.find_wrong(start, None, limit).await.map_err(|rank| format!("{why}; {rank}"));
            }
        };
        let known = self.reference(&start.name);
        let is_known = known.is_some();
        let reference = match known {
            Some(reference) => Ok(reference),
            None if check.loading > ALONE_LIMITS.1 => Err("one rank would load for too long".to_owned()),
            None => self.answer_of_one(start, limit).await,
        };
        match reference {
            Ok(reference) if canary::agree(&answer, &reference) => {
                if !is_known {
                    self.keep_reference(&start.name, reference);
                }
                Ok(())
            }
            Ok(_) => self.find_wrong(start, Some(&answer), limit).await,
            Err(why) => {
                let name = &start.name;
                self.0.log.add(format!("{name}: the canary was not compared with one rank: {why}"));
                Ok(())
            }
        }
    }

    /// The answer of a single rank: on this node, or on a node of the group that has the whole
    /// model if this node has a part only.
    async fn answer_of_one(&self, start: &StartRank, limit: Duration) -> Result<CanaryAnswer, String> {
        if !thunder_hub::is_hub_name(&start.model) {
            return self.answer_alone(start, limit).await;
        }
        let document = self.lock().membership.document().clone();
        let nodes = document.placement(&start.name).map(|(_, placement)| placement.nodes.clone());
        let holders = self.nodes_with(&start.model, &nodes.unwrap_or_default(), true).await;
        match holders.first() {
            Some(node) if !holders.contains(&self.0.id) => self.ask_alone(*node, start.clone(), limit).await,
            _ => self.answer_alone(start, limit).await,
        }
    }

    /// Makes every node of a group answer alone. Succeeds if the group's answer equals theirs.
    async fn find_wrong(
        &self,
        start: &StartRank,
        answer: Option<&CanaryAnswer>,
        limit: Duration,
    ) -> Result<(), String> {
        let document = self.lock().membership.document().clone();
        let placement = document.placement(&start.name).filter(|(stamp, _)| *stamp == start.placement);
        let (_, placement) = placement.ok_or("it was placed anew meanwhile")?;
        let mut asking = tokio::task::JoinSet::new();
        for (rank, node) in placement.nodes.iter().enumerate() {
            let (agent, node, start) = (self.clone(), *node, start.clone());
            asking.spawn(async move {
                let alone = if node == agent.0.id {
                    agent.answer_alone(&start, limit).await
                } else {
                    agent.ask_alone(node, start, limit).await
                };
                if let Err(why) = &alone {
                    agent.0.log.add(format!("{} does not answer alone: {why}", agent.name_of(&node)));
                }
                (rank, agent.name_of(&node), alone)
            });
        }
        let mut alone = asking.join_all().await;
        alone.sort_by_key(|(rank, ..)| *rank);
        let alone: Vec<_> = alone.into_iter().map(|(_, node, answer)| (node, answer)).collect();
        let mut known = alone.iter().filter_map(|(_, alone)| alone.as_ref().ok()).peekable();
        if let Some(answer) = answer
            && known.peek().is_some()
            && known.all(|alone| canary::agree(answer, alone))
        {
            self.keep_reference(&start.name, answer.clone());
            return Ok(());
        }
        Err(canary::verdict(&alone))
    }

    /// The answer of a single rank, if the cluster knows it.
    fn reference(&self, name: &str) -> Option<CanaryAnswer> {
        let document = self.lock().membership.document().clone();
        let (_, wish) = document.models().find(|(known, _)| *known == name)?;
        let kept: Reference = serde_json::from_str(document.setting(&setting(name))?).ok()?;
        (kept.wish == wish.stamp).then_some(kept.answer)
    }

    fn keep_reference(&self, name: &str, answer: CanaryAnswer) {
        let mut state = self.lock();
        let document = state.membership.document().clone();
        let Some((_, wish)) = document.models().find(|(known, _)| *known == name) else { return };
        let Ok(json) = serde_json::to_string(&Reference { wish: wish.stamp, answer }) else { return };
        let me = self.0.id;
        let kept = state.membership.change(|document| document.set_setting(me, &setting(name), Some(json)));
        if let Err(why) = kept {
            tracing::warn!("the canary of {name} is asked again next time: {why}");
        }
        self.settle(&mut state);
    }

    /// Loads a group's model on this node alone, and gets its answer to the canary.
    pub(super) async fn answer_alone(
        &self,
        start: &StartRank,
        limit: Duration,
    ) -> Result<CanaryAnswer, String> {
        let _alone = self.0.alone.try_lock().map_err(|_| "it answers another canary".to_owned())?;
        let key = random_text().map_err(|error| error.to_string())?;
        let command = self.serve_command(&start.model, &arguments_alone(&start.arguments), &key);
        let (serves, served) = oneshot::channel();
        let serves = Mutex::new(Some(serves));
        let on_line = move |line: &str| {
            if let Some(api) = served_at(line)
                && let Some(serves) = serves.lock().unwrap_or_else(PoisonError::into_inner).take()
            {
                let _ = serves.send(api);
            }
        };
        let process = WatchedRank::start(command, 0, on_line).map_err(|error| error.to_string())?;
        let process = Arc::new(Mutex::new(Some(process)));
        let ended = process.clone();
        let (began, deadline) = (Instant::now(), Instant::now() + limit);
        let watch = async move {
            loop {
                tokio::time::sleep(Duration::from_millis(100)).await;
                let mut process = ended.lock().unwrap_or_else(PoisonError::into_inner);
                if let Some(words) = process.as_mut().and_then(WatchedRank::ended) {
                    return words;
                }
                if Instant::now() >= deadline {
                    return format!("it does not serve within {} s", began.elapsed().as_secs());
                }
            }
        };
        let outcome = tokio::select! {
            words = watch => Err(words),
            api = served => match api {
                Ok(api) => ask(api, &key).await,
                Err(_) => Err("it ended".to_owned()),
            },
        };
        let stop = move || {
            let process = process.lock().unwrap_or_else(PoisonError::into_inner).take();
            if let Some(process) = process {
                process.stop();
            }
        };
        // Frees its memory before anything else is started.
        let _ = tokio::task::spawn_blocking(stop).await;
        outcome
    }

    /// Makes another node answer alone.
    async fn ask_alone(
        &self,
        node: NodeId,
        start: StartRank,
        limit: Duration,
    ) -> Result<CanaryAnswer, String> {
        let call = Call::Canary { start, limit_s: limit.as_secs() };
        let (CallReply::Singing, mut stream) = self.call(node, &call).await? else {
            return Err("a strange reply".to_owned());
        };
        let reply = wire::within(limit + ANSWER_LIMIT, wire::receive(&mut stream, LONGEST_FRAME_BYTES));
        match reply.await.map_err(|error| error.to_string())? {
            CallReply::Canary(answer) => Ok(answer),
            CallReply::Refused(why) => Err(why),
            _ => Err("a strange reply".to_owned()),
        }
    }
}

/// Sends the canary to the API of a head, in the form for its model.
async fn ask(api: SocketAddr, key: &str) -> Result<CanaryAnswer, String> {
    for (path, body) in canary::questions() {
        if let Some(answer) = ask_at(api, key, (path, &body)).await? {
            return Ok(answer);
        }
    }
    Err("its model answers none of the canary's questions".to_owned())
}

/// One of the canary's questions; `None` if it does not apply to the model.
async fn ask_at(
    api: SocketAddr,
    key: &str,
    (path, body): (&str, &str),
) -> Result<Option<CanaryAnswer>, String> {
    let request = format!(
        "POST {path} HTTP/1.0\r\nhost: localhost\r\nauthorization: Bearer {key}\r\ncontent-type: \
         application/json\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    );
    let exchange = async {
        let mut stream = TcpStream::connect(api).await?;
        stream.write_all(request.as_bytes()).await?;
        let mut reader = ResponseReader::new(stream);
        reader.head().await?;
        reader.rest().await
    };
    let late = |_| format!("its canary was not answered within {} s", ANSWER_LIMIT.as_secs());
    let body = tokio::time::timeout(ANSWER_LIMIT, exchange).await.map_err(late)?;
    canary::read(&body.map_err(|error| format!("its canary was not answered: {error}"))?)
}

pub(super) fn setting(name: &str) -> String {
    format!("canary {name}")
}

/// The arguments for a single rank: without those of groups, and with little memory for caches.
fn arguments_alone(arguments: &[String]) -> Vec<String> {
    let mut kept: Vec<String> = Vec::new();
    let mut rest = arguments.iter();
    while let Some(argument) = rest.next() {
        let name = argument.split('=').next().unwrap_or_default();
        if !OF_GROUPS.contains(&name) {
            kept.push(argument.clone());
        } else if !argument.contains('=') {
            rest.next();
        }
    }
    for (name, value) in [("--context", CONTEXT), ("--max-batch", "1")] {
        if !kept.iter().any(|argument| argument.split('=').next() == Some(name)) {
            kept.extend([name.to_owned(), value.to_owned()]);
        }
    }
    kept
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_rank_alone_gets_no_options_of_groups() {
        let alone = |words: &str| {
            let words: Vec<String> = words.split(' ').map(str::to_owned).collect();
            arguments_alone(&words).join(" ")
        };
        assert_eq!(alone("--split 3,1 --kv int8"), "--kv int8 --context 256 --max-batch 1");
        assert_eq!(alone("--parallel=pipeline --context 4096"), "--context 4096 --max-batch 1");
        assert_eq!(alone("--stages 2 --context 4096"), "--context 4096 --max-batch 1");
        assert_eq!(alone("--max-batch=4 --experts whole"), "--max-batch=4 --context 256");
        assert_eq!(alone("--draft org/small --max-batch 2"), "--max-batch 2 --context 256");
    }
}
