//! Logging to standard error, filtered by `RUST_LOG`, with the rank before each line.

use std::fmt;

use tracing::{Event, Subscriber};
use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::fmt::format::{Format, Writer};
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields};
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::registry::LookupSpan;
use tracing_subscriber::util::SubscriberInitExt;

const VARIABLE: &str = "RUST_LOG";

/// Starts logging at the levels that `RUST_LOG` names (`debug`, `thunder=debug`,
/// `thunder_server=info`); warnings by default.
pub fn start() {
    let asked = std::env::var(VARIABLE).unwrap_or_default();
    let filter = asked.parse::<Targets>().unwrap_or_else(|error| {
        // The variable may be meant for another program, so this one runs all the same.
        eprintln!(
            "warning: {VARIABLE}={asked}: {error}: only warnings are logged; it takes a level (error, warn, info, debug, \
             trace) or CRATE=LEVEL,…"
        );
        Targets::new()
    });
    // Nothing was asked for, or only levels of single crates.
    let filter =
        if filter.default_level().is_none() { filter.with_default(LevelFilter::WARN) } else { filter };
    let rank =
        std::env::var("THUNDER_RANK").or_else(|_| std::env::var("MLX_RANK")).unwrap_or_else(|_| "0".into());
    let lines = tracing_subscriber::fmt::layer()
        .with_writer(std::io::stderr)
        .event_format(WithRank { rank, format: Format::default().with_ansi(false) });
    tracing_subscriber::registry().with(filter).with(lines).init();
}

/// The default line format, after the rank.
struct WithRank {
    rank: String,
    format: Format,
}

impl<S, N> FormatEvent<S, N> for WithRank
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(
        &self,
        context: &FmtContext<'_, S, N>,
        mut writer: Writer<'_>,
        event: &Event<'_>,
    ) -> fmt::Result {
        write!(writer, "rank {} ", self.rank)?;
        self.format.format_event(context, writer, event)
    }
}
