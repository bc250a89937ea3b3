//! Where a step's numbers stop being finite, by which damaged weights are found.

use std::fmt;

use thunder_compute::{Backend, ComputeError};

use super::Pass;

/// A part of a model, in the order in which parts are computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Place(u32);

impl Place {
    /// The table of the tokens' vectors.
    pub const EMBEDDING: Self = Self(0);
    /// The part after the last layer.
    pub const HEAD: Self = Self(u32::MAX);

    pub(super) fn mixer(layer: usize) -> Self {
        Self(1 + 2 * layer as u32)
    }

    pub(super) fn feed_forward(layer: usize) -> Self {
        Self(2 + 2 * layer as u32)
    }

    /// The place as a word of a message.
    pub fn word(self) -> u32 {
        self.0
    }

    /// Reads [`Self::word`].
    pub fn from_word(word: u32) -> Self {
        Self(word)
    }
}

impl fmt::Display for Place {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::EMBEDDING => formatter.write_str("the embedding"),
            Self::HEAD => formatter.write_str("the last norm or the output matrix"),
            Self(word) => {
                let part = if word % 2 == 1 { "attention" } else { "feed-forward" };
                write!(formatter, "the {part} of layer {}, counted from 0", (word - 1) / 2)
            }
        }
    }
}

/// Checks the residual stream, or all of several, after each part of a pass.
pub(super) struct Watch {
    numbers: Vec<f32>,
    found: Option<Place>,
}

impl Watch {
    pub(super) fn new() -> Self {
        Self { numbers: Vec::new(), found: None }
    }

    /// The first part that gave a number that is not finite.
    pub(super) fn first(&self) -> Place {
        self.found.unwrap_or(Place::HEAD)
    }

    /// Checks what `place` has added. All ranks wait for the same sums, even after a finding.
    pub(super) fn look<B: Backend>(
        &mut self,
        place: Place,
        pass: &mut Pass<'_, B>,
    ) -> Result<(), ComputeError> {
        let Pass { backend, step, residual, streams, .. } = pass;
        backend.settle(residual)?;
        if self.found.is_none() {
            // If there are several streams, the residual stream contains only the part's result.
            let (_, width) = backend.extent(streams);
            let left = if width > backend.extent(residual).1 { streams } else { residual };
            self.numbers.resize(step.rows() * width, 0.0);
            backend.read(left, 0..step.rows(), &mut self.numbers)?;
            self.found = self.numbers.iter().any(|number| !number.is_finite()).then_some(place);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_are_in_the_order_of_computing_and_have_names() {
        let places = [
            Place::EMBEDDING,
            Place::mixer(0),
            Place::feed_forward(0),
            Place::mixer(1),
            Place::feed_forward(61),
            Place::HEAD,
        ];
        assert!(places.is_sorted());
        assert!(places.iter().all(|place| Place::from_word(place.word()) == *place));
        assert_eq!(places[3].to_string(), "the attention of layer 1, counted from 0");
        assert_eq!(places[4].to_string(), "the feed-forward of layer 61, counted from 0");
    }
}
