//! The beginning of a decode step, recorded while the device computes the step before it.
//!
//! What a decode step dispatches is often what the one before did: other numbers are in the tables.
//! So the first dispatches of a step that repeated the step before are recorded once more, before
//! its results are waited for. The next step's dispatches are compared with them one by one and
//! held back meanwhile. If all are the same, the commands are submitted; else those held back are
//! recorded as usual.

use wgpu::{BindGroup, CommandBuffer};

use crate::kernel::Kernel;

/// Dispatches that are recorded ahead: what a device computes while the host records twice as many.
pub(crate) const AHEAD: usize = 32;

/// A kernel and the buffers that it is bound to.
pub(crate) type Binding = (Kernel, [u64; 12]);

/// All that a dispatch is.
#[derive(Debug, Clone)]
pub(crate) struct Dispatch {
    pub binding: Binding,
    pub group: BindGroup,
    pub arguments: Vec<u32>,
    pub groups: [u32; 3],
}

/// The beginnings of the current step and of the one before.
#[derive(Default)]
pub(crate) struct Ahead {
    /// The step's first dispatches but for those held back.
    now: Vec<Dispatch>,
    before: Vec<Dispatch>,
    /// The first of `before`, which the step repeated.
    held_back: usize,
    /// The step's dispatches still belong to its beginning.
    begins: bool,
    /// The step's beginning is that of the step before.
    repeats: bool,
    /// Recorded ahead for the next step; from its beginning on what `before` holds.
    commands: Option<CommandBuffer>,
}

impl Ahead {
    /// Begins a step. `may_repeat`: the one before, as it decodes too and is not measured.
    pub fn begin(&mut self, may_repeat: bool) {
        self.before = std::mem::take(&mut self.now);
        self.held_back = 0;
        (self.begins, self.repeats) = (may_repeat, false);
        if !may_repeat {
            self.commands = None;
        }
    }

    /// Whether a dispatch is the next one of what was recorded ahead.
    pub fn matches(&self, binding: &Binding, arguments: &[u32], groups: [u32; 3]) -> bool {
        let before = self.before.get(self.held_back).filter(|_| self.begins && self.commands.is_some());
        before.is_some_and(|before| {
            before.binding == *binding && before.arguments == arguments && before.groups == groups
        })
    }

    /// Holds back a dispatch that matches. Returns the commands after the last one.
    pub fn hold_back(&mut self) -> Option<CommandBuffer> {
        self.held_back += 1;
        if self.held_back < self.before.len() {
            return None;
        }
        (self.begins, self.repeats) = (false, true);
        self.now = std::mem::take(&mut self.before);
        self.commands.take()
    }

    /// True if [`Self::note`] wants the next dispatch, which does not match.
    pub fn begins(&self) -> bool {
        self.begins
    }

    /// Takes the dispatches that were held back, as something else follows: they are to be
    /// recorded.
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
            self.repeats = self.before.len() == AHEAD && self.now.iter().zip(&self.before).all(is_same);
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

    /// What to record ahead: the step's beginning, if it repeated that of the step before.
    pub fn wanted(&self) -> Option<&[Dispatch]> {
        (self.repeats && self.commands.is_none()).then_some(&self.now)
    }

    /// Takes the commands of what was wanted, for the next step.
    pub fn keep(&mut self, commands: CommandBuffer) {
        self.commands = Some(commands);
    }
}

pub(crate) fn is_same((now, before): (&Dispatch, &Dispatch)) -> bool {
    now.binding == before.binding && now.arguments == before.arguments && now.groups == before.groups
}
