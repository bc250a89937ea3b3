//! Decode steps that the device computes before the host requests them.
//!
//! After a step that has only generated tokens and whose largest logits are read, the next step
//! usually has the same dispatches with these tokens, one position further. It is therefore
//! submitted while the device still computes the current step. A kernel writes the columns of the
//! largest logits to the place where the embedding reads its tokens. The host's later request is
//! compared, table by table and dispatch by dispatch. If everything is as predicted, the host only
//! waits for the results; otherwise the commands of the request are recorded again. This is correct
//! because only those steps are computed ahead that compute everything they change anew, including
//! the tokens' keys and values.
//!
//! Ranks that exchange sums within their steps compute steps ahead only together. They share each
//! row's largest logit within the step, so that all devices find the same tokens, and vote before
//! they submit the next step. If one rank records a step again, all do, because its exchanges have
//! other numbers then.

use std::ops::Range;

use crate::ahead::{Binding, Dispatch, is_same};
use crate::device::read::Results;
use crate::kernel::Kernel;

/// Number of consecutive steps that must have been predicted before one is computed ahead: at
/// first, and the maximum after steps that were computed in vain.
const FEWEST_FORESEEN: usize = 3;
const MOST_FORESEEN: usize = 96;

/// Tables and dispatches of a step.
#[derive(Debug, Clone, Default)]
pub(crate) struct Script {
    pub tables: Vec<Vec<u32>>,
    pub dispatches: Vec<Dispatch>,
}

/// The step after the current one.
#[derive(Debug, Clone)]
pub(crate) struct Next {
    /// Its first table.
    pub table: Vec<u32>,
    /// Where the tokens are among the current step's tables.
    pub tokens: usize,
    /// Pairs of a column and a number for each row of the current step's results, of which the
    /// largest number's column is the token.
    pub parts: usize,
    /// Columns are stored as f32, because they were summed over ranks.
    pub are_floats: bool,
    /// Its last table, if that differs from the current step's.
    pub last: Option<Vec<u32>>,
}

/// A step that the device can get ahead.
pub(crate) struct Wanted {
    pub tables: Vec<Vec<u32>>,
    /// The number of the table that has the tokens.
    pub tokens: usize,
    /// As in [`Next`].
    pub parts: usize,
    pub are_floats: bool,
}

/// What a rank can do, or all ranks of a group that exchange sums within their steps: one cannot
/// compute a step ahead without the others.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Vote {
    /// The device need not compute the current step again.
    pub keeps: bool,
    /// Each row's largest number can be shared with the other ranks.
    pub shares: bool,
    /// The device can get the next step.
    pub gives: bool,
}

impl Vote {
    pub fn bits(self) -> u32 {
        u32::from(self.keeps) | u32::from(self.shares) << 1 | u32::from(self.gives) << 2
    }

    pub fn of(bits: u32) -> Self {
        let [keeps, shares, gives] = [1, 2, 4].map(|bit| bits & bit != 0);
        Self { keeps, shares, gives }
    }
}

/// A step that the device got before the host requested it.
pub(crate) struct Given {
    /// Its tables. Table number `tokens` is filled in later.
    pub tables: Vec<Vec<u32>>,
    pub tokens: usize,
    /// The words that are read as its result: a buffer's id, and the range.
    pub read: (u64, Range<usize>),
    pub results: Results,
}

/// The current step, and the step that the device got ahead.
pub(crate) struct Follow {
    /// The current step; `None` if it cannot be repeated.
    now: Option<Script>,
    /// Dispatches of the step before.
    before: Vec<Dispatch>,
    given: Option<Given>,
    /// Number of tables and dispatches of the current step that were as predicted, if the device
    /// got it ahead.
    compared: Option<[usize; 2]>,
    /// Everything in the current step was as predicted.
    is_repeated: bool,
    /// The device had computed something else than the current step.
    was_in_vain: bool,
    /// The first table of the step after the current one.
    foreseen: Option<Vec<u32>>,
    /// Number of consecutive steps whose first table was predicted.
    in_a_row: usize,
    /// Required number of such steps.
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
            was_in_vain: false,
            foreseen: None,
            in_a_row: 0,
            needed: FEWEST_FORESEEN,
        }
    }
}

impl Follow {
    /// Begins a step. `generates`: it has generated tokens only.
    pub fn begin(&mut self, generates: bool) {
        self.was_in_vain = false;
        if self.given.is_some() {
            self.compared = Some([0, 0]);
            return;
        }
        self.before = self.now.take().map_or(Vec::new(), |script| script.dispatches);
        self.is_repeated = false;
        self.now = generates.then(Script::default);
    }

    /// Whether the device got the next step, or the current one, ahead.
    pub fn has_given(&self) -> bool {
        self.given.is_some()
    }

    pub fn is_comparing(&self) -> bool {
        self.compared.is_some()
    }

    /// Where a table of a step computed ahead is, if it is as predicted.
    pub fn table(&mut self, words: &[u32]) -> Option<usize> {
        let ([tables, _], given) = (self.compared.as_mut()?, self.given.as_ref()?);
        if given.tables.get(*tables)? != words {
            return None;
        }
        self.in_a_row += usize::from(*tables == 0);
        *tables += 1;
        Some(given.tables[..*tables - 1].iter().map(Vec::len).sum())
    }

    /// Records a table that was added at word `first`.
    pub fn note_table(&mut self, words: &[u32], first: usize) {
        let Some(script) = &mut self.now else { return };
        if script.tables.is_empty() {
            self.in_a_row = match self.foreseen.take() {
                Some(foreseen) if foreseen == words => self.in_a_row + 1,
                Some(_) => 0,
                // There was no prediction, because a sequence needed a block.
                None => self.in_a_row,
            };
        }
        match script.tables.iter().map(Vec::len).sum::<usize>() == first {
            true => script.tables.push(words.to_vec()),
            false => self.now = None,
        }
    }

    /// Whether a dispatch is the next one of a step computed ahead.
    pub fn dispatch(&mut self, binding: &Binding, arguments: &[u32], groups: [u32; 3]) -> bool {
        let (Some([_, dispatches]), Some(script)) = (&mut self.compared, &self.now) else { return false };
        let next = script.dispatches.get(*dispatches);
        let is_next = next.is_some_and(|next| {
            next.binding == *binding && next.arguments == arguments && next.groups == groups
        });
        *dispatches += usize::from(is_next);
        is_next
    }

    /// Records a dispatch.
    pub fn note(&mut self, dispatch: impl FnOnce() -> Dispatch) {
        if let Some(script) = &mut self.now {
            script.dispatches.push(dispatch());
        }
    }

    /// The current step does something that cannot be repeated.
    pub fn spoil(&mut self) {
        debug_assert!(self.given.is_none(), "a given step is taken back first");
        self.now = None;
    }

    /// Cancels the step computed ahead. Returns what the current step has requested so far. It must
    /// be recorded again, because the device has computed something else since.
    pub fn take_back(&mut self) -> Option<Script> {
        let given = self.given.take()?;
        self.was_in_vain = true;
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

    /// Takes a step computed ahead if all its tables and dispatches were as predicted and its
    /// results are these words.
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

    /// Whether the device had computed something else than the current step.
    pub fn was_in_vain(&self) -> bool {
        self.was_in_vain
    }

    /// What the current step has requested, if it must be recorded again although all was as
    /// predicted, because another rank does so.
    pub fn again(&mut self) -> Option<Script> {
        (self.is_repeated, self.in_a_row) = (false, 0);
        self.now.clone()
    }

    /// The next step, which is submitted with the current step's dispatches.
    pub fn wanted(&mut self, next: Next) -> Option<Wanted> {
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
        if let (Some(table), Some(last)) = (next.last, tables.last_mut()) {
            *last = table;
        }
        Some(Wanted { tables, tokens, parts: next.parts, are_floats: next.are_floats })
    }

    /// The current step's dispatches.
    pub fn dispatches(&self) -> &[Dispatch] {
        self.now.as_ref().map_or(&[], |script| &script.dispatches)
    }

    /// Notes that the device got the next step.
    pub fn give(&mut self, given: Given) {
        self.given = Some(given);
    }

    /// Fills in the tokens of the step computed ahead, as the device has found them.
    pub fn tell(&mut self, tokens: impl Iterator<Item = u32>) {
        if let Some(given) = &mut self.given {
            given.tables[given.tokens] = tokens.collect();
        }
    }
}

impl Kernel {
    /// True if the kernel is part of an exchange with other ranks, which has another number each
    /// time.
    pub fn exchanges(&self) -> bool {
        matches!(self, Self::Relay(_) | Self::Exchange(_) | Self::Coherent(_))
    }

    /// False if the kernel reads what it changes and no other kernel of a step computes that anew,
    /// or has a table that differs from step to step. Recurrences are repeated only in steps that
    /// write states elsewhere than they read them.
    fn can_repeat(&self) -> bool {
        if let Self::Change(change) = self {
            return change.can_repeat();
        }
        !matches!(
            self,
            Self::KeepDrafts
                | Self::RouteAssigned
                | Self::Edit
                | Self::Compress(_)
                | Self::AddPieces(_)
                | Self::HostRows { .. }
        )
    }
}
