//! What the operator wants: members, models, placements, settings.
//!
//! Every node holds the whole document, and any node may change it. Two versions merge to one that
//! contains both sides' changes. Merging is commutative, associative and idempotent, so all nodes
//! end with the same document, in whatever order they receive each other's versions.
//!
//! - An entry is a register: the later write wins. "Later" is a counter that a writer sets above
//!   all counters that it has seen (Lamport's clock), not a time of day. If counters are equal, the
//!   writers' keys decide, then the values.
//! - Removing a member cannot be undone: its key stays removed in every merge. The same machine may
//!   join again with a new key.

mod unknown;

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

use crate::id::NodeId;
pub use unknown::Unknown;

/// Maximum members of a cluster, without removed ones.
pub const MOST_MEMBERS: usize = 64;
/// Maximum entries of one kind, including deleted ones, which must be remembered.
const MOST_ENTRIES: usize = 1024;
/// Maximum entries of keys, including ended ones, and of limits of teams and models.
const MOST_ACCESS_ENTRIES: usize = 4096;
/// Maximum length of a key or limit; a key that names 100 models is shorter.
const LONGEST_ACCESS_BYTES: usize = 64 << 10;
/// Longest name, address, or setting, in bytes.
const LONGEST_TEXT_BYTES: usize = 4096;
/// Maximum size of the document as JSON. If two halves of a cluster each fill it, the merged
/// document still fits in a message.
const LARGEST_BYTES: usize = 1 << 20;
/// Maximum addresses of a member.
pub const MOST_ADDRESSES: usize = 32;
/// Maximum additional arguments of a model.
const MOST_ARGUMENTS: usize = 64;
/// Maximum planned layouts of a model.
pub const MOST_LAYOUTS: usize = 16;

/// When an entry was written, in the document's own order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Stamp {
    /// One more than the largest counter that the writer had seen.
    pub counter: u64,
    /// The writer.
    pub author: NodeId,
}

/// A value with the time of its write. Registers are ordered by time, then by value.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Register<T> {
    /// When it was written.
    pub stamp: Stamp,
    /// `None`: the entry was deleted.
    pub value: Option<T>,
}

/// A member.
#[derive(Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Member {
    /// Name for people; two members may have the same.
    pub name: String,
    /// `HOST:PORT` at which it was last reachable.
    pub addresses: Vec<String>,
    /// True while it gets no new work.
    pub drained: bool,
    /// Fields of a newer version.
    #[serde(flatten)]
    pub unknown: Unknown,
}

/// A member's entry.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemberEntry {
    /// Its description.
    pub member: Register<Member>,
    /// True once the member was removed, permanently.
    pub removed: bool,
}

/// A model that the cluster should serve.
#[derive(Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct ModelWish {
    /// The model argument of `thunder serve`: `builtin`, a folder, a file or a name.
    pub model: String,
    /// Nodes that may run it; empty: any.
    pub nodes: Vec<NodeId>,
    /// Number of nodes that run it together; `None`: all that may run it.
    pub count: Option<u32>,
    /// Additional arguments of `thunder serve`.
    pub arguments: Vec<String>,
    /// Shares of the model; a node without an entry has 1. Empty: `thunder serve` decides.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub weights: BTreeMap<NodeId, u32>,
    /// Planned layouts, best first. The first one whose nodes are all up is used; if there is none,
    /// the model runs as without layouts.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub layouts: Vec<PlannedLayout>,
    /// The model that this group is an additional replica of. Replicas run on different nodes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub replica_of: Option<String>,
    /// Seconds without a request after which it is unloaded until the next request.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub idle_unload_s: Option<u64>,
    /// What happens to its group when a node is lost.
    #[serde(default, skip_serializing_if = "OnLoss::is_replace")]
    pub on_loss: OnLoss,
    /// Fields of a newer version.
    #[serde(flatten)]
    pub unknown: Unknown,
}

/// What happens to a model's group when one of its nodes is lost.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum OnLoss {
    /// A new group is formed on the remaining nodes.
    #[default]
    Replace,
    /// The model waits until the node is back, or is removed from the cluster.
    Wait,
}

impl OnLoss {
    /// Whether it is the default policy, which is not serialized.
    pub fn is_replace(&self) -> bool {
        *self == Self::Replace
    }
}

/// A planned group of ranks.
#[derive(Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct PlannedLayout {
    /// Its nodes in rank order.
    pub nodes: Vec<NodeId>,
    /// Their shares of the model in rank order.
    pub weights: Vec<u32>,
    /// Arguments of `thunder serve` that it needs.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub arguments: Vec<String>,
}

/// Where a model runs.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Placement {
    /// The nodes in rank order; the first is the head, which starts the others.
    pub nodes: Vec<NodeId>,
    /// Counts the groups that were formed for the same wish. Each new number is a new group.
    pub generation: u64,
    /// True, with no nodes: the model was idle, and is loaded again on the next request.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub asleep: bool,
    /// More or better nodes on which the model ran until one of them was lost or drained, in rank
    /// order. It returns to them when all are back.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub before: Vec<NodeId>,
    /// Fields of a newer version.
    #[serde(flatten)]
    pub unknown: Unknown,
}

impl Placement {
    /// A group on these nodes.
    pub fn on(nodes: Vec<NodeId>, generation: u64) -> Self {
        Self { nodes, generation, asleep: false, before: Vec::new(), unknown: Unknown::default() }
    }

    /// No group: the model sleeps, or is still to be placed.
    pub fn without_nodes(generation: u64, asleep: bool) -> Self {
        Self { asleep, ..Self::on(Vec::new(), generation) }
    }
}

/// A short hash, by which nodes see that their documents differ.
pub type Digest = String;

/// Why a change is refused. The document is unchanged.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DocumentError {
    /// There are too many entries of a kind.
    #[error("the cluster holds {limit} {what} already, the most that is allowed")]
    TooMany {
        /// Kind of the entries.
        what: &'static str,
        /// The limit.
        limit: usize,
    },
    /// A text is too long.
    #[error("a {what} of {length} bytes is longer than the {limit} that are allowed")]
    TooLong {
        /// What the text is.
        what: &'static str,
        /// Its bytes.
        length: usize,
        /// The limit.
        limit: usize,
    },
    /// The whole document is too large.
    #[error(
        "the cluster's models and settings take {bytes} bytes, more than the {LARGEST_BYTES} that are allowed"
    )]
    TooLarge {
        /// Its bytes.
        bytes: usize,
    },
    /// The key was removed before.
    #[error(
        "node {0:?} was removed from this cluster, which is for good: run `thunder cluster leave` on it, then approve it anew"
    )]
    Removed(NodeId),
    /// No such member.
    #[error("node {0:?} is no member of this cluster")]
    NoMember(NodeId),
}

/// What the operator wants. See the module's documentation.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Document {
    members: BTreeMap<NodeId, MemberEntry>,
    models: BTreeMap<String, Register<ModelWish>>,
    placements: BTreeMap<String, Register<Placement>>,
    settings: BTreeMap<String, Register<String>>,
    /// Keys and limits of the API, and the policy of kept prompts: see `agent/keys.rs`.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    access: BTreeMap<String, Register<String>>,
}

impl Document {
    /// The members that are not removed.
    pub fn members(&self) -> impl Iterator<Item = (NodeId, &Member)> {
        let present = self.members.iter().filter(|(_, entry)| !entry.removed);
        present.filter_map(|(id, entry)| Some((*id, entry.member.value.as_ref()?)))
    }

    /// The keys of the members that are not removed.
    pub fn member_ids(&self) -> BTreeSet<NodeId> {
        self.members().map(|(id, _)| id).collect()
    }

    /// A member that is not removed.
    pub fn member(&self, id: &NodeId) -> Option<&Member> {
        self.members.get(id).filter(|entry| !entry.removed)?.member.value.as_ref()
    }

    /// Whether a key was removed.
    pub fn is_removed(&self, id: &NodeId) -> bool {
        self.members.get(id).is_some_and(|entry| entry.removed)
    }

    /// The models to serve, by name.
    pub fn models(&self) -> impl Iterator<Item = (&str, &Register<ModelWish>)> {
        let present = self.models.iter().filter(|(_, register)| register.value.is_some());
        present.map(|(name, register)| (name.as_str(), register))
    }

    /// The groups that serve a model: its own, and those of its additional replicas.
    pub fn groups_of<'a>(
        &'a self,
        name: &'a str,
    ) -> impl Iterator<Item = (&'a str, &'a Register<ModelWish>)> {
        self.models().filter(move |(group, wish)| {
            let of = wish.value.as_ref().and_then(|wish| wish.replica_of.as_deref());
            of.unwrap_or(group) == name
        })
    }

    /// A model to serve.
    pub fn model(&self, name: &str) -> Option<&ModelWish> {
        self.models.get(name)?.value.as_ref()
    }

    /// Where a model runs, with the stamp that names the group.
    pub fn placement(&self, name: &str) -> Option<(Stamp, &Placement)> {
        let register = self.placements.get(name)?;
        Some((register.stamp, register.value.as_ref()?))
    }

    /// A setting.
    pub fn setting(&self, name: &str) -> Option<&str> {
        self.settings.get(name)?.value.as_deref()
    }

    /// All entries of the API's keys and limits.
    pub fn access(&self) -> &BTreeMap<String, Register<String>> {
        &self.access
    }

    /// A short hash of the content, equal for equal documents.
    pub fn digest(&self) -> Digest {
        // Maps are sorted and all keys are text, so equal documents have equal bytes.
        let bytes = serde_json::to_vec(self).unwrap_or_default();
        Sha256::digest(&bytes)[..16].iter().map(|byte| format!("{byte:02x}")).collect()
    }

    /// Refuses a document that has grown beyond its limit.
    ///
    /// # Errors
    /// If it is too large, and larger than `before`.
    pub fn check_size(&self, before: &Self) -> Result<(), DocumentError> {
        let bytes = |document| serde_json::to_vec(document).map_or(0, |json| json.len());
        let now = bytes(self);
        if now > LARGEST_BYTES && now > bytes(before) {
            return Err(DocumentError::TooLarge { bytes: now });
        }
        Ok(())
    }

    /// Adopts everything that is later in `other`. Returns true if this changed anything.
    pub fn merge(&mut self, other: &Self) -> bool {
        let mut changed = false;
        for (id, theirs) in &other.members {
            match self.members.get_mut(id) {
                None => {
                    self.members.insert(*id, theirs.clone());
                    changed = true;
                }
                Some(ours) => {
                    if theirs.member > ours.member {
                        ours.member = theirs.member.clone();
                        changed = true;
                    }
                    changed |= theirs.removed && !ours.removed;
                    ours.removed |= theirs.removed;
                }
            }
        }
        merge_registers(&mut self.models, &other.models)
            | merge_registers(&mut self.placements, &other.placements)
            | merge_registers(&mut self.settings, &other.settings)
            | merge_registers(&mut self.access, &other.access)
            | changed
    }

    /// Whether it contains everything that `other` contains.
    pub fn includes(&self, other: &Self) -> bool {
        !self.clone().merge(other)
    }

    /// The stamp of a new write by `author`: later than all stamps in the document.
    fn next_stamp(&self, author: NodeId) -> Stamp {
        let members = self.members.values().map(|entry| entry.member.stamp.counter);
        let latest = members
            .chain(self.models.values().map(|register| register.stamp.counter))
            .chain(self.placements.values().map(|register| register.stamp.counter))
            .chain(self.settings.values().map(|register| register.stamp.counter))
            .chain(self.access.values().map(|register| register.stamp.counter))
            .max();
        Stamp { counter: latest.unwrap_or(0).saturating_add(1), author }
    }
}

/// Changes, each made by the node `author`.
impl Document {
    /// Adds a member or changes its description.
    ///
    /// # Errors
    /// When its key was removed before, the cluster is full, or a text is too long.
    pub fn set_member(&mut self, author: NodeId, id: NodeId, member: Member) -> Result<(), DocumentError> {
        if self.is_removed(&id) {
            return Err(DocumentError::Removed(id));
        }
        let is_new = !self.members.contains_key(&id);
        if is_new && self.members().count() >= MOST_MEMBERS {
            return Err(DocumentError::TooMany { what: "members", limit: MOST_MEMBERS });
        }
        if is_new && self.members.len() >= MOST_ENTRIES {
            return Err(DocumentError::TooMany { what: "members, with removed ones", limit: MOST_ENTRIES });
        }
        if member.addresses.len() > MOST_ADDRESSES {
            return Err(DocumentError::TooMany { what: "addresses of a node", limit: MOST_ADDRESSES });
        }
        check_text("name", &member.name)?;
        member.addresses.iter().try_for_each(|address| check_text("address", address))?;
        let member = Register { stamp: self.next_stamp(author), value: Some(member) };
        self.members.insert(id, MemberEntry { member, removed: false });
        Ok(())
    }

    /// Removes a member for good.
    ///
    /// # Errors
    /// When there is no such member.
    pub fn remove_member(&mut self, id: &NodeId) -> Result<(), DocumentError> {
        let entry = self.members.get_mut(id).filter(|entry| !entry.removed);
        entry.ok_or(DocumentError::NoMember(*id))?.removed = true;
        Ok(())
    }

    /// Sets or, with `None`, deletes a model.
    ///
    /// # Errors
    /// When there are too many, or a text is too long.
    pub fn set_model(
        &mut self,
        author: NodeId,
        name: &str,
        wish: Option<ModelWish>,
    ) -> Result<(), DocumentError> {
        if let Some(wish) = &wish {
            check_text("model's name", &wish.model)?;
            if wish.arguments.len() > MOST_ARGUMENTS
                || wish.nodes.len() > MOST_MEMBERS
                || wish.weights.len() > MOST_MEMBERS
            {
                return Err(DocumentError::TooMany { what: "arguments of a model", limit: MOST_ARGUMENTS });
            }
            if wish.layouts.len() > MOST_LAYOUTS || wish.layouts.iter().any(|layout| !layout.is_bounded()) {
                return Err(DocumentError::TooMany { what: "layouts of a model", limit: MOST_LAYOUTS });
            }
            let of_layouts = wish.layouts.iter().flat_map(|layout| &layout.arguments);
            let mut arguments = wish.arguments.iter().chain(of_layouts);
            arguments.try_for_each(|argument| check_text("argument", argument))?;
        }
        let stamp = self.next_stamp(author);
        set(&mut self.models, ("models", MOST_ENTRIES), name, Register { stamp, value: wish })
    }

    /// Sets or, with `None`, deletes where a model runs.
    ///
    /// # Errors
    /// When there are too many.
    pub fn set_placement(
        &mut self,
        author: NodeId,
        name: &str,
        placement: Option<Placement>,
    ) -> Result<(), DocumentError> {
        let stamp = self.next_stamp(author);
        set(&mut self.placements, ("placements", MOST_ENTRIES), name, Register { stamp, value: placement })
    }

    /// Sets or, with `None`, deletes a setting.
    ///
    /// # Errors
    /// When there are too many, or a text is too long.
    pub fn set_setting(
        &mut self,
        author: NodeId,
        name: &str,
        value: Option<String>,
    ) -> Result<(), DocumentError> {
        check_text("setting", value.as_deref().unwrap_or_default())?;
        let stamp = self.next_stamp(author);
        set(&mut self.settings, ("settings", MOST_ENTRIES), name, Register { stamp, value })
    }

    /// Sets or, with `None`, deletes an entry of the API's keys and limits.
    ///
    /// # Errors
    /// When there are too many, or a text is too long.
    pub fn set_access(
        &mut self,
        author: NodeId,
        name: &str,
        value: Option<String>,
    ) -> Result<(), DocumentError> {
        let length = value.as_ref().map_or(0, String::len);
        if length > LONGEST_ACCESS_BYTES {
            return Err(DocumentError::TooLong {
                what: "key, limit or policy",
                length,
                limit: LONGEST_ACCESS_BYTES,
            });
        }
        let stamp = self.next_stamp(author);
        set(&mut self.access, ("keys and limits", MOST_ACCESS_ENTRIES), name, Register { stamp, value })
    }
}

impl PlannedLayout {
    fn is_bounded(&self) -> bool {
        self.nodes.len() <= MOST_MEMBERS
            && self.weights.len() <= self.nodes.len()
            && self.arguments.len() <= MOST_ARGUMENTS
    }
}

fn set<T>(
    entries: &mut BTreeMap<String, Register<T>>,
    (what, limit): (&'static str, usize),
    name: &str,
    register: Register<T>,
) -> Result<(), DocumentError> {
    check_text("name", name)?;
    if !entries.contains_key(name) && entries.len() >= limit {
        return Err(DocumentError::TooMany { what, limit });
    }
    entries.insert(name.to_owned(), register);
    Ok(())
}

fn check_text(what: &'static str, text: &str) -> Result<(), DocumentError> {
    let length = text.len();
    let limit = LONGEST_TEXT_BYTES;
    if length > limit { Err(DocumentError::TooLong { what, length, limit }) } else { Ok(()) }
}

fn merge_registers<T: Ord + Clone>(
    ours: &mut BTreeMap<String, Register<T>>,
    theirs: &BTreeMap<String, Register<T>>,
) -> bool {
    let mut changed = false;
    for (name, register) in theirs {
        if ours.get(name).is_none_or(|known| register > known) {
            ours.insert(name.clone(), register.clone());
            changed = true;
        }
    }
    changed
}

#[cfg(test)]
#[path = "document_tests.rs"]
mod tests;
