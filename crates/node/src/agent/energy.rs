//! Energy per token of this machine: the joules that the program around the agent measures, divided
//! by the tokens of the groups that have a rank here.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use serde_json::{Value, json};
use thunder_dashboard::Answer;

use super::Agent;
use crate::document::Stamp;

/// Interval at which the heads' counts are read. Tokens that a group computes after the last
/// reading are not counted.
const LOOK_EVERY: Duration = Duration::from_secs(20);

/// Tokens of the groups that have or had a rank here.
#[derive(Debug, Default)]
pub(super) struct TokensHere(Mutex<Counted>);

#[derive(Debug, Default)]
struct Counted {
    /// The last count of each group's head. A group that is formed again starts at zero.
    last: HashMap<String, (Stamp, u64)>,
    total: u64,
}

impl TokensHere {
    /// Records the count of a group's head.
    fn note(&self, group: &str, formed: Stamp, tokens: u64) {
        let mut counted = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let before = counted.last.insert(group.to_owned(), (formed, tokens));
        let known = before.filter(|(stamp, _)| *stamp == formed).map_or(0, |(_, known)| known);
        counted.total += tokens.saturating_sub(known);
    }

    fn total(&self) -> u64 {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).total
    }
}

impl Agent {
    /// Regularly counts the tokens of the groups with a rank here.
    pub(super) async fn keep_tokens_counted(self) {
        loop {
            tokio::time::sleep(LOOK_EVERY).await;
            self.count_tokens().await;
        }
    }

    async fn count_tokens(&self) {
        let here: Vec<(String, Stamp)> = {
            let state = self.lock();
            let document = state.membership.document();
            let placed = document.models().filter_map(|(group, _)| {
                let (formed, placement) = document.placement(group)?;
                placement.nodes.contains(&self.0.id).then(|| (group.to_owned(), formed))
            });
            placed.collect()
        };
        for (group, formed) in here {
            let asked =
                tokio::time::timeout(super::admin::HEAD_LIMIT, self.ask_model(&group, "/admin/models"));
            let Ok(Some(told)) = asked.await else { continue };
            let load = &told["models"][0]["load"];
            if let (Some(read), Some(given)) =
                (load["prompt_tokens"].as_u64(), load["generated_tokens"].as_u64())
            {
                self.0.tokens_here.note(&group, formed, read + given);
            }
        }
    }

    /// The energy of this machine, in total and per token.
    pub(super) async fn energy(&self) -> Answer {
        self.count_tokens().await;
        let mut answer = self.extended("GET", "/admin/energy", Vec::new()).await;
        if answer.status == 200 {
            of_tokens(&mut answer.body, self.0.tokens_here.total());
        }
        answer
    }
}

/// Adds the number of tokens to the machine's energy.
fn of_tokens(energy: &mut Value, tokens: u64) {
    let each = energy["joules"].as_f64().filter(|_| tokens > 0).map(|joules| joules / tokens as f64);
    energy["tokens"] = tokens.into();
    energy["joules_per_token"] = json!(each);
    let missing = energy["missing"].as_array_mut();
    if let Some(missing) = missing {
        if tokens == 0 {
            missing.push("joules a token: no model with a rank on this node has computed any yet".into());
        }
        let why = "joules a request and a user: nodes share the work of a request; add the nodes' joules a \
                   token, and take the tokens from `thunder usage`";
        missing.push(why.into());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::id::NodeId;

    #[test]
    fn groups_that_are_formed_again_count_anew_and_nothing_twice() {
        let tokens = TokensHere::default();
        let stamp = |counter| Stamp { counter, author: NodeId([1; 32]) };
        for (group, formed, count, total) in
            [("a", 1, 10, 10), ("a", 1, 15, 15), ("b", 1, 100, 115), ("a", 2, 3, 118), ("a", 2, 3, 118)]
        {
            tokens.note(group, stamp(formed), count);
            assert_eq!(tokens.total(), total, "{group} {formed} {count}");
        }
    }

    #[test]
    fn joules_are_divided_by_the_tokens_or_it_is_said_why_not() {
        let drawn = || json!({ "joules": 50.0, "missing": [] });
        let (mut some, mut none) = (drawn(), drawn());
        of_tokens(&mut some, 100);
        of_tokens(&mut none, 0);
        assert_eq!((&some["joules_per_token"], &none["joules_per_token"]), (&json!(0.5), &Value::Null));
        assert!(none["missing"][0].as_str().is_some_and(|why| why.contains("a token")), "{none}");
        assert!(some["missing"][0].as_str().is_some_and(|why| why.contains("a request")), "{some}");
    }
}
