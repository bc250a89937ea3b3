//! What `RUST_LOG` asks for, on standard error, each line with its rank.

use std::fmt;

use tracing::{Event, Subscriber};
use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::fmt::format::{Format, Writer};
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields};
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::registry::LookupSpan;
use tracing_subscriber::util::SubscriberInitExt;

const VARIABLE: &str = "RUST_LOG";

/// Begins to log: what `RUST_LOG` names (`debug`, `thunder=debug`, `thunder_server=info`), else warnings.
pub fn start() {
    let asked = std::env::var(VARIABLE).unwrap_or_default();
    let filter = asked.parse::<Targets>().unwrap_or_else(|error| {
        // Meant for another program, maybe: no reason not to run.
        eprintln!(
            "warning: {VARIABLE}={asked}: {error}: only warnings are logged; it takes a level (error, warn, info, debug, \
             trace) or CRATE=LEVEL,…"
        );
        Targets::new()
    });
    // Nothing asked for, or nothing but single crates.
    let filter =
        if filter.default_level().is_none() { filter.with_default(LevelFilter::WARN) } else { filter };
    let rank =
        std::env::var("THUNDER_RANK").or_else(|_| std::env::var("MLX_RANK")).unwrap_or_else(|_| "0".into());
    let lines = tracing_subscriber::fmt::layer()
        .with_writer(std::io::stderr)
        .event_format(WithRank { rank, format: Format::default().with_ansi(false) });
    tracing_subscriber::registry().with(filter).with(lines).init();
}

/// The usual line behind the rank that wrote it.
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
