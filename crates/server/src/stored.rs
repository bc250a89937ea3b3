//! Responses that later ones may continue, kept in memory.

use std::collections::{HashMap, VecDeque};
use std::sync::{Mutex, PoisonError};

use serde_json::Value;
use thunder_model::chat::Message;

/// The responses of a server. The oldest are deleted if there are too many.
#[derive(Debug)]
pub(crate) struct StoredResponses {
    kept: Mutex<Kept>,
}

#[derive(Debug, Default)]
struct Kept {
    /// Maximum bytes of all responses and their conversations together.
    most_bytes: usize,
    responses: HashMap<String, Stored>,
    /// Ids, the oldest first.
    order: VecDeque<String>,
    bytes: usize,
}

#[derive(Debug)]
struct Stored {
    /// Key that may read it; `None` if its request had no key of the store.
    owner: Option<String>,
    /// JSON as text, because a parsed list of numbers needs many times as much memory.
    body: String,
    conversation: Vec<Message>,
    bytes: usize,
}

impl StoredResponses {
    pub fn new(most_bytes: usize) -> Self {
        Self { kept: Mutex::new(Kept { most_bytes, ..Kept::default() }) }
    }

    /// Changes the limit, and deletes the oldest responses beyond it.
    pub fn limit(&self, most_bytes: usize) {
        let mut kept = self.lock();
        kept.most_bytes = most_bytes;
        kept.forget_oldest();
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Kept> {
        // The map is consistent between two statements, so a panic elsewhere cannot have damaged
        // it.
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Keeps a response, and deletes the oldest ones beyond the limit.
    pub fn keep(&self, id: String, owner: Option<String>, body: &Value, conversation: Vec<Message>) {
        let body = body.to_string();
        let bytes = body.len() + conversation.iter().map(message_bytes).sum::<usize>();
        let mut kept = self.lock();
        if bytes > kept.most_bytes {
            return;
        }
        kept.bytes += bytes;
        kept.order.push_back(id.clone());
        kept.responses.insert(id, Stored { owner, body, conversation, bytes });
        kept.forget_oldest();
    }

    /// The conversation up to the end of a response.
    pub fn conversation(&self, id: &str, owner: Option<&str>) -> Option<Vec<Message>> {
        self.lock().of(id, owner).map(|stored| stored.conversation.clone())
    }

    /// A response's body, as JSON text.
    pub fn body(&self, id: &str, owner: Option<&str>) -> Option<String> {
        self.lock().of(id, owner).map(|stored| stored.body.clone())
    }

    /// Deletes a response; false if there is none.
    pub fn forget(&self, id: &str, owner: Option<&str>) -> bool {
        let mut kept = self.lock();
        kept.of(id, owner).is_some() && kept.forget(id)
    }
}

impl Kept {
    /// A response, if it belongs to this key.
    fn of(&self, id: &str, owner: Option<&str>) -> Option<&Stored> {
        self.responses.get(id).filter(|stored| stored.owner.as_deref() == owner)
    }

    /// Deletes the oldest responses beyond the limit.
    fn forget_oldest(&mut self) {
        while self.bytes > self.most_bytes {
            let Some(oldest) = self.order.front().cloned() else { return };
            self.forget(&oldest);
        }
    }

    fn forget(&mut self, id: &str) -> bool {
        let Some(stored) = self.responses.remove(id) else { return false };
        self.bytes -= stored.bytes;
        self.order.retain(|other| other != id);
        true
    }
}

/// Maximum bytes of memory for a byte of a value's text: a list of single digits.
const VALUE_BYTES: usize = 40;

/// Approximate memory of a message, in bytes.
fn message_bytes(message: &Message) -> usize {
    let calls: usize = message
        .calls
        .iter()
        .map(|call| {
            let arguments = serde_json::to_string(&call.arguments).map_or(0, |text| text.len());
            call.id.len() + call.name.len() + VALUE_BYTES * arguments
        })
        .sum();
    size_of::<Message>() + message.content.len() + message.reasoning.as_ref().map_or(0, String::len) + calls
}

#[cfg(test)]
mod tests {
    use serde_json::json;
    use thunder_model::chat::Role;

    use super::*;

    #[test]
    fn the_oldest_responses_are_forgotten_at_the_limit() {
        let stored = StoredResponses::new(10_000);
        for id in 0..20 {
            let said = vec![Message::new(Role::User, "x".repeat(1500))];
            stored.keep(id.to_string(), None, &json!({"id": id}), said);
            assert!(stored.lock().bytes <= 10_000);
            assert!(stored.conversation(&id.to_string(), None).is_some(), "the newest is kept");
        }
        assert!(stored.body("0", None).is_none());
        stored.keep("large".into(), None, &json!({}), vec![Message::new(Role::User, "x".repeat(20_000))]);
        assert!(stored.body("large", None).is_none(), "it is larger than the limit");
        assert!(stored.body("19", Some("k_other")).is_none() && !stored.forget("19", Some("k_other")));
        assert!(stored.forget("19", None) && !stored.forget("19", None));
        stored.limit(5000);
        let kept = stored.lock();
        assert!(kept.bytes <= 5000 && kept.responses.contains_key("18"), "the oldest go first");
        assert_eq!(kept.order.len(), kept.responses.len());
        assert_eq!(kept.bytes, kept.responses.values().map(|stored| stored.bytes).sum::<usize>());
    }
}
