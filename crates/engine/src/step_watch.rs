//! Times of single steps, for measuring a model (`thunder bench report`).

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

use crate::scheduler::StepLoad;

/// Maximum steps that are kept until they are taken; later ones are not recorded.
const MOST_STEPS: usize = 1 << 17;

/// A step as rank 0 saw it. Times are seconds on the engine's own clock.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StepTime {
    /// The work in the step.
    pub load: StepLoad,
    /// When it was issued.
    pub began_s: f64,
    /// When its tokens were chosen.
    pub ended_s: f64,
}

/// Where the engine loop records its steps while they are watched; otherwise, a step only costs one
/// read of a flag.
#[derive(Debug, Default)]
pub struct StepWatch {
    is_watched: AtomicBool,
    steps: Mutex<Vec<StepTime>>,
}

impl StepWatch {
    /// Starts watching. Returns the steps recorded since the last call, in the order of their ends.
    pub fn take(&self) -> Vec<StepTime> {
        self.is_watched.store(true, Ordering::Relaxed);
        std::mem::take(&mut *self.steps.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Stops watching, and clears the records.
    pub fn end(&self) {
        self.is_watched.store(false, Ordering::Relaxed);
        *self.steps.lock().unwrap_or_else(PoisonError::into_inner) = Vec::new();
    }

    /// Records a step, if steps are watched.
    pub(crate) fn note(&self, step: StepTime) {
        if self.is_watched.load(Ordering::Relaxed) {
            let mut steps = self.steps.lock().unwrap_or_else(PoisonError::into_inner);
            if steps.len() < MOST_STEPS {
                steps.push(step);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_are_noted_only_while_somebody_watches() {
        let watch = StepWatch::default();
        let step = |began_s| StepTime { load: StepLoad::default(), began_s, ended_s: began_s + 0.01 };
        watch.note(step(0.0));
        assert!(watch.take().is_empty());
        watch.note(step(1.0));
        watch.note(step(2.0));
        assert_eq!(watch.take(), [step(1.0), step(2.0)]);
        watch.note(step(3.0));
        watch.end();
        watch.note(step(4.0));
        assert!(watch.take().is_empty());
    }
}
