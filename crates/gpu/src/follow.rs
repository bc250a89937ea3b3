//! Decode steps that the device computes before the host asks for them.
//!
//! A step of generated tokens whose largest logits are read is often followed by the same
//! dispatches with these tokens, one position further. So the next step is submitted behind a step
//! while that one is computed: a kernel puts the columns of the largest logits where the embedding
//! looks for tokens. What the host asks for afterwards is compared, table by table and dispatch by
//! dispatch. If all is as foreseen, only the results are waited for. If not, what was asked for so
//! far is recorded again. That is right because only steps are followed that compute anew all that
//! they change, the tokens' keys and values included.

use std::ops::Range;

use wgpu::SubmissionIndex;

use crate::ahead::{Binding, Dispatch, is_same};
use crate::kernel::Kernel;
use crate::without::{Way, without};

/// Steps in a row that must have been foreseen before one is followed: at first, and at most, after
/// steps that were followed in vain.
const FEWEST_FORESEEN: usize = 3;
const MOST_FORESEEN: usize = 96;

/// Tables and dispatches of a step.
#[derive(Debug, Clone, Default)]
pub(crate) struct Script {
    pub tables: Vec<Vec<u32>>,
    pub dispatches: Vec<Dispatch>,
}

/// What the step after the current one will be.
#[derive(Debug, Clone)]
pub(crate) struct Next {
    /// Its first table.
    pub table: Vec<u32>,
    /// Where the words of the current step's tokens are among its tables.
    pub tokens: usize,
}

/// A step that the device was given before the host asked for it.
pub(crate) struct Given {
    /// Its tables. That of the tokens, the `tokens`-th, is told later.
    pub tables: Vec<Vec<u32>>,
    pub tokens: usize,
    /// The words that are read of it: a buffer's id, and the words.
    pub read: (u64, Range<usize>),
    pub staging: wgpu::Buffer,
    pub submission: Option<SubmissionIndex>,
}

/// The current step, and the one that the device was given.
pub(crate) struct Follow {
    /// The current step; `None` if it cannot be repeated.
    now: Option<Script>,
    /// Dispatches of the step before.
    before: Vec<Dispatch>,
    given: Option<Given>,
    /// Tables and dispatches of the current step that were as foreseen, if it is the given one.
    compared: Option<[usize; 2]>,
    /// The current step was as foreseen in all.
    is_repeated: bool,
    /// The first table of the step after the current one.
    foreseen: Option<Vec<u32>>,
    /// Steps in a row whose first table was foreseen.
    in_a_row: usize,
    /// As many are needed to follow.
    needed: usize,
}

impl Default for Follow {
    fn default() -> Self {
        Self {
            now: None,
            before: Vec::new(),
            given: None,
            compared: None,
            is_repeated: false,
            foreseen: None,
            in_a_row: 0,
            needed: FEWEST_FORESEEN,
        }
    }
}

impl Follow {
    /// Begins a step: of generated tokens only, or of others too.
    pub fn begin(&mut self, generates: bool) {
        if self.given.is_some() {
            self.compared = Some([0, 0]);
            return;
        }
        self.before = self.now.take().map_or(Vec::new(), |script| script.dispatches);
        self.is_repeated = false;
        self.now = generates.then(Script::default);
    }

    /// Whether the step after the current one was given, or is the current one.
    pub fn has_given(&self) -> bool {
        self.given.is_some()
    }

    pub fn is_comparing(&self) -> bool {
        self.compared.is_some()
    }

    /// Where a table of a given step is, if it is as foreseen.
    pub fn table(&mut self, words: &[u32]) -> Option<usize> {
        let ([tables, _], given) = (self.compared.as_mut()?, self.given.as_ref()?);
        if given.tables.get(*tables)? != words {
            return None;
        }
        self.in_a_row += usize::from(*tables == 0);
        *tables += 1;
        Some(given.tables[..*tables - 1].iter().map(Vec::len).sum())
    }

    /// Notes a table that was added behind `first` words.
    pub fn note_table(&mut self, words: &[u32], first: usize) {
        let Some(script) = &mut self.now else { return };
        if script.tables.is_empty() {
            self.in_a_row = match self.foreseen.take() {
                Some(foreseen) if foreseen == words => self.in_a_row + 1,
                Some(_) => 0,
                // Nothing could be said of it, as a sequence needed a block.
                None => self.in_a_row,
            };
        }
        match script.tables.iter().map(Vec::len).sum::<usize>() == first {
            true => script.tables.push(words.to_vec()),
            false => self.now = None,
        }
    }

    /// Whether a dispatch is the next one of a given step.
    pub fn dispatch(&mut self, binding: &Binding, arguments: &[u32], groups: [u32; 3]) -> bool {
        let (Some([_, dispatches]), Some(script)) = (&mut self.compared, &self.now) else { return false };
        let next = script.dispatches.get(*dispatches);
        let is_next = next.is_some_and(|next| {
            next.binding == *binding && next.arguments == arguments && next.groups == groups
        });
        *dispatches += usize::from(is_next);
        is_next
    }

    /// Notes a dispatch that is recorded.
    pub fn note(&mut self, dispatch: impl FnOnce() -> Dispatch) {
        if let Some(script) = &mut self.now {
            script.dispatches.push(dispatch());
        }
    }

    /// The current step does something that is not noted.
    pub fn spoil(&mut self) {
        debug_assert!(self.given.is_none(), "a given step is taken back first");
        self.now = None;
    }

    /// Takes the given step back. Returns what the current step has asked for so far, which must
    /// be recorded again: the device has computed something else since.
    pub fn take_back(&mut self) -> Option<Script> {
        let given = self.given.take()?;
        self.in_a_row = 0;
        self.needed = (2 * self.needed).min(MOST_FORESEEN);
        self.before.clear();
        let all = self.now.take()?;
        let Some([tables, dispatches]) = self.compared.take() else { return Some(all) };
        let again = Script {
            tables: given.tables[..tables].to_vec(),
            dispatches: all.dispatches[..dispatches].to_vec(),
        };
        self.now = Some(again.clone());
        Some(again)
    }

    /// Takes a given step whose tables and dispatches all were as foreseen, and whose results are
    /// these words.
    pub fn finish(&mut self, read: &(u64, Range<usize>)) -> Option<Given> {
        let (compared, given, script) = (self.compared?, self.given.as_ref()?, self.now.as_mut()?);
        if compared != [given.tables.len(), script.dispatches.len()] || given.read != *read {
            return None;
        }
        self.compared = None;
        self.is_repeated = true;
        self.needed = FEWEST_FORESEEN;
        let given = self.given.take()?;
        script.tables.clone_from(&given.tables);
        Some(given)
    }

    /// The tables of the step after the current one, which is to be given to the device with the
    /// dispatches of the current one; and which of them has the tokens.
    pub fn wanted(&mut self, next: Next) -> Option<(Vec<Vec<u32>>, usize)> {
        if without(Way::Ahead) {
            return None;
        }
        self.foreseen = Some(next.table.clone());
        let script = self.now.as_ref().filter(|_| self.given.is_none() && self.in_a_row >= self.needed)?;
        let repeats = || {
            script.dispatches.len() == self.before.len()
                && script.dispatches.iter().zip(&self.before).all(is_same)
        };
        if !self.is_repeated && !repeats() {
            return None;
        }
        let mut first = 0;
        let tokens = script.tables.iter().position(|table| {
            let at = first;
            first += table.len();
            at == next.tokens
        })?;
        let mut tables = script.tables.clone();
        let has_room = tokens > 0 && tables[0].len() == next.table.len();
        let can_repeat = |dispatch: &Dispatch| dispatch.binding.0.can_repeat();
        if !has_room || !script.dispatches.iter().all(can_repeat) {
            return None;
        }
        tables[0] = next.table;
        Some((tables, tokens))
    }

    /// The current step's dispatches.
    pub fn dispatches(&self) -> &[Dispatch] {
        self.now.as_ref().map_or(&[], |script| &script.dispatches)
    }

    /// The device was given the next step.
    pub fn give(&mut self, given: Given) {
        self.given = Some(given);
    }

    /// Tells the tokens of the step that was given: what the device has found.
    pub fn tell(&mut self, tokens: impl Iterator<Item = u32>) {
        if let Some(given) = &mut self.given {
            given.tables[given.tokens] = tokens.collect();
        }
    }
}

impl Kernel {
    /// False if the kernel reads what it changes, and no other kernel of a step makes it anew.
    fn can_repeat(&self) -> bool {
        !matches!(self, Self::ShortConv | Self::DeltaRule | Self::Exchange(_) | Self::Relay(_))
    }
}
