//! The choice of a layout, and why.

use serde::Serialize;

use super::{Goal, Layout};

/// A layout with more machines must be better by this factor, because predictions are inexact and
/// machines fail.
const WORTH_A_MACHINE: f64 = 1.1;

/// The choice.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Pick {
    /// Index of the layout.
    pub index: usize,
    /// Why this one.
    pub why: String,
    /// Printed if one machine alone would be faster.
    pub slower: Option<String>,
}

/// Chooses the layout: the best one, or one with fewer machines that is nearly as good.
pub fn pick(layouts: &[Layout], goal: Goal) -> Option<Pick> {
    // The first of equal layouts, so that plans can be repeated.
    let fitting = || layouts.iter().enumerate().filter(|(_, layout)| layout.fits());
    let (_, best) = fitting().min_by(|(_, a), (_, b)| b.score(goal).total_cmp(&a.score(goal)))?;
    // Each additional machine must pay.
    let (index, chosen) = fitting().min_by(|(_, a), (_, b)| {
        let value = |layout: &Layout| {
            layout.score(goal) / WORTH_A_MACHINE.powi(layout.machines().saturating_sub(1).min(3) as i32)
        };
        value(b).total_cmp(&value(a)).then(a.machines().cmp(&b.machines()))
    })?;
    let figure = |layout: &Layout| match goal {
        Goal::Latency => format!("{:.2} s for an answer", layout.answer_s),
        Goal::Throughput => format!("{:.0} tokens/s of 16 answers at a time", layout.batch_tokens_s),
        Goal::Context => format!("requests of {} tokens", layout.longest_tokens),
    };
    let why = if chosen.name == best.name {
        let why = format!("{}: the best for {}, {}", chosen.name, goal.name(), figure(chosen));
        let several = fitting().map(|(_, layout)| layout);
        let mut several = several.filter(|layout| layout.machines() > 1 && layout.groups.len() == 1);
        match several.next().filter(|_| chosen.machines() == 1) {
            Some(next) => {
                format!("{why}; more machines gain nothing: {} would give {}", next.name, figure(next))
            }
            None => why,
        }
    } else {
        format!(
            "{}: {}; {} would give {}, which is not worth its machines",
            chosen.name,
            figure(chosen),
            best.name,
            figure(best)
        )
    };
    let alone = fitting().filter(|(_, layout)| layout.machines() == 1);
    let alone = alone.min_by(|(_, a), (_, b)| b.decode_tokens_s.total_cmp(&a.decode_tokens_s));
    let slower = alone.filter(|(_, alone)| alone.decode_tokens_s > chosen.decode_tokens_s * 1.001).map(
        |(_, alone)| {
            format!(
                "a single answer is slower than with {}: {:.1} tokens/s in place of {:.1}",
                alone.name, chosen.decode_tokens_s, alone.decode_tokens_s
            )
        },
    );
    Some(Pick { index, why, slower })
}
