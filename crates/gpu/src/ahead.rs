//! The beginning of a decode step, recorded while the device computes the previous step.
//!
//! Successive decode steps often have the same dispatches and differ only in their tables. If a
//! step repeated the previous one, its first dispatches are recorded once more before its results
//! are waited for. The dispatches of the next step are compared with these one by one and held back
//! meanwhile. If all are equal, the recorded commands are submitted; otherwise the dispatches that
//! were held back are recorded as usual.

use wgpu::{BindGroup, CommandBuffer};

use crate::kernel::Kernel;

/// Number of dispatches that are recorded ahead. While the device computes them, the host records
/// twice as many.
pub(crate) const AHEAD: usize = 32;

/// A kernel and the buffers that it is bound to.
pub(crate) type Binding = (Kernel, [u64; 12]);

/// Everything that defines a dispatch.
#[derive(Debug, Clone)]
pub(crate) struct Dispatch {
    pub binding: Binding,
    pub group: BindGroup,
    pub arguments: Vec<u32>,
    pub groups: [u32; 3],
}

/// The beginnings of the current and of the previous step.
#[derive(Default)]
pub(crate) struct Ahead {
    /// The step's first dispatches, without those held back.
    now: Vec<Dispatch>,
    before: Vec<Dispatch>,
    /// How many dispatches of `before` the step has repeated so far.
    held_back: usize,
    /// True while the step's dispatches still belong to its beginning.
    begins: bool,
    /// The step's beginning equals that of the previous step.
    repeats: bool,
    /// Commands recorded ahead for the next step; after the next step has begun, those of `before`.
    commands: Option<CommandBuffer>,
}

impl Ahead {
    /// Begins a step. `may_repeat`: the previous step decodes too, and neither is measured.
    pub fn begin(&mut self, may_repeat: bool) {
        self.before = std::mem::take(&mut self.now);
        self.held_back = 0;
        (self.begins, self.repeats) = (may_repeat, false);
        if !may_repeat {
            self.commands = None;
        }
    }

    /// True if a dispatch equals the next one that was recorded ahead.
    pub fn matches(&self, binding: &Binding, arguments: &[u32], groups: [u32; 3]) -> bool {
        let before = self.before.get(self.held_back).filter(|_| self.begins && self.commands.is_some());
        before.is_some_and(|before| {
            before.binding == *binding && before.arguments == arguments && before.groups == groups
        })
    }

    /// Holds back a dispatch that matches. After the last one, returns the recorded commands.
    pub fn hold_back(&mut self) -> Option<CommandBuffer> {
        self.held_back += 1;
        if self.held_back < self.before.len() {
            return None;
        }
        (self.begins, self.repeats) = (false, true);
        self.now = std::mem::take(&mut self.before);
        self.commands.take()
    }

    /// True if [`Self::note`] needs the next dispatch, which does not match.
    pub fn begins(&self) -> bool {
        self.begins
    }

    /// Takes the dispatches that were held back, because something else follows. The caller records
    /// them.
    pub fn release(&mut self) -> Vec<Dispatch> {
        if self.commands.take().is_none() {
            return Vec::new();
        }
        // Nothing was noted while dispatches were held back.
        self.now.extend_from_slice(&self.before[..self.held_back]);
        self.now.clone()
    }

    /// Notes a dispatch that is recorded.
    pub fn note(&mut self, dispatch: Dispatch) {
        self.now.push(dispatch);
        if self.now.len() == AHEAD {
            self.begins = false;
            // An exchange gets its number when it is recorded, and these commands may be dropped.
            let is_exchange = |dispatch: &Dispatch| dispatch.binding.0.exchanges();
            self.repeats = self.before.len() == AHEAD
                && self.now.iter().zip(&self.before).all(is_same)
                && !self.now.iter().any(is_exchange);
        }
    }

    /// Ends the step's beginning, which was too short. Returns the dispatches that were held back.
    pub fn end(&mut self) -> Vec<Dispatch> {
        if !self.begins {
            return Vec::new();
        }
        let held_back = self.release();
        self.begins = false;
        self.now.clear();
        held_back
    }

    /// The dispatches to record ahead: the step's beginning, if it repeated that of the previous
    /// step.
    pub fn wanted(&self) -> Option<&[Dispatch]> {
        (self.repeats && self.commands.is_none()).then_some(&self.now)
    }

    /// Stores the recorded commands for the next step.
    pub fn keep(&mut self, commands: CommandBuffer) {
        self.commands = Some(commands);
    }
}

pub(crate) fn is_same((now, before): (&Dispatch, &Dispatch)) -> bool {
    now.binding == before.binding && now.arguments == before.arguments && now.groups == before.groups
}
