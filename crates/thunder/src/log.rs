//! Logging to standard error, filtered by `RUST_LOG`: lines for people, each beginning with the
//! rank, or a JSON object in each line (`THUNDER_LOG_FORMAT=json`). Messages of commands to people
//! also go through here, so that with JSON every line is JSON.

use std::fmt;
use std::str::FromStr;
use std::sync::LazyLock;

use serde_json::{Map, Value};
use thunder_access::Now;
use tracing::field::{Field, Visit};
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::fmt::format::{Format, Writer};
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields};
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::registry::LookupSpan;
use tracing_subscriber::util::SubscriberInitExt;

use crate::report;

const VARIABLE: &str = "RUST_LOG";
const FORMAT_VARIABLE: &str = "THUNDER_LOG_FORMAT";

/// The rank of this process.
static RANK: LazyLock<String> = LazyLock::new(|| {
    std::env::var("THUNDER_RANK").or_else(|_| std::env::var("MLX_RANK")).unwrap_or_else(|_| "0".into())
});
static FORMAT: LazyLock<String> = LazyLock::new(|| std::env::var(FORMAT_VARIABLE).unwrap_or_default());

/// Whether standard error gets JSON only.
pub fn is_json() -> bool {
    *FORMAT == "json"
}

/// Prints a message for people.
pub fn say(text: impl fmt::Display) {
    tell(Level::INFO, "", text);
}

/// Warns people.
pub fn warn(text: impl fmt::Display) {
    tell(Level::WARN, "warning: ", text);
}

/// Prints the reason why the command fails.
pub fn fail(error: &anyhow::Error) {
    tell(Level::ERROR, "error: ", report::line(error));
}

/// Reports a fault of the program; `text` is Rust's message of the panic.
pub fn tell_panic(text: impl fmt::Display) {
    tell(Level::ERROR, "", text);
}

fn tell(level: Level, before: &str, text: impl fmt::Display) {
    if is_json() {
        let mut line = begun(level, &RANK, "thunder");
        line.insert("message".into(), text.to_string().into());
        eprintln!("{}", Value::Object(line));
    } else {
        eprintln!("{before}{text}");
    }
}

/// The beginning of each JSON line.
fn begun(level: Level, rank: &str, target: &str) -> Map<String, Value> {
    let fields = [
        ("time", Now::read().time.to_string()),
        ("level", level.to_string()),
        ("rank", rank.to_owned()),
        ("target", target.to_owned()),
    ];
    fields.into_iter().map(|(name, value)| (name.to_owned(), value.into())).collect()
}

/// Starts logging at the levels that `RUST_LOG` names (`debug`, `thunder=debug`,
/// `thunder_server=info`); warnings by default. Lines of a process that `is_rank` begin with its
/// rank.
pub fn start(is_rank: bool) {
    let asked = std::env::var(VARIABLE).unwrap_or_default();
    let filter = filter(&asked).unwrap_or_else(|error| {
        // The variable may be meant for another program, so this one still runs.
        warn(format_args!(
            "{VARIABLE}={asked}: {error}: only warnings are logged; it takes a level (error, warn, info, debug, \
             trace) or CRATE=LEVEL,…"
        ));
        Targets::new().with_default(LevelFilter::WARN)
    });
    let rank = RANK.clone();
    if !["", "text", "json"].contains(&FORMAT.as_str()) {
        warn(format_args!("{FORMAT_VARIABLE}={}: it takes text or json; the log is text", *FORMAT));
    }
    let lines = tracing_subscriber::fmt::layer().with_writer(std::io::stderr);
    let log = tracing_subscriber::registry().with(filter);
    if is_json() {
        log.with(lines.event_format(Json { rank })).init();
    } else {
        let before = if is_rank { format!("rank {rank} ") } else { String::new() };
        log.with(lines.event_format(WithRank { before, format: Format::default().with_ansi(false) })).init();
    }
}

/// The requested levels; warnings for the crates that are not named.
fn filter(asked: &str) -> Result<Targets, <Targets as FromStr>::Err> {
    // An empty text would be read as the level `error`.
    let filter = if asked.trim().is_empty() { Targets::new() } else { asked.parse()? };
    if filter.default_level().is_some() {
        return Ok(filter);
    }
    // It warns about memory shared by host and device, which GPU ranks use intentionally.
    Ok(filter.with_default(LevelFilter::WARN).with_target("wgpu_core::instance", LevelFilter::ERROR))
}

/// A JSON object in each line: time, level, rank, target, message, and the event's fields.
struct Json {
    rank: String,
}

impl<S, N> FormatEvent<S, N> for Json
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(
        &self,
        _context: &FmtContext<'_, S, N>,
        mut writer: Writer<'_>,
        event: &Event<'_>,
    ) -> fmt::Result {
        let mut line = begun(*event.metadata().level(), &self.rank, event.metadata().target());
        event.record(&mut Fields(&mut line));
        writeln!(writer, "{}", Value::Object(line))
    }
}

/// Collects an event's fields.
struct Fields<'a>(&'a mut Map<String, Value>);

impl Visit for Fields<'_> {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.0.insert(field.name().to_owned(), format!("{value:?}").into());
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.0.insert(field.name().to_owned(), value.into());
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        self.0.insert(field.name().to_owned(), value.into());
    }

    fn record_i64(&mut self, field: &Field, value: i64) {
        self.0.insert(field.name().to_owned(), value.into());
    }

    fn record_f64(&mut self, field: &Field, value: f64) {
        self.0.insert(field.name().to_owned(), value.into());
    }

    fn record_bool(&mut self, field: &Field, value: bool) {
        self.0.insert(field.name().to_owned(), value.into());
    }
}

/// The default line format, after the rank.
struct WithRank {
    before: String,
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
        writer.write_str(&self.before)?;
        self.format.format_event(context, writer, event)
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::sync::{Arc, Mutex};

    use super::*;

    #[derive(Clone, Default)]
    struct Sink(Arc<Mutex<Vec<u8>>>);

    impl Write for Sink {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0.lock().unwrap().write(bytes)
        }

        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn a_json_line_has_the_events_fields() {
        let sink = Sink::default();
        let writer = sink.clone();
        let lines = tracing_subscriber::fmt::layer()
            .with_writer(move || writer.clone())
            .event_format(Json { rank: "3".into() });
        let log = tracing_subscriber::registry().with(lines);
        tracing::subscriber::with_default(log, || {
            tracing::warn!(count = 7u64, path = "/v1/\"x\"\n", ms = 0.5, "it\nhappened");
        });
        let text = String::from_utf8(sink.0.lock().unwrap().clone()).unwrap();
        assert_eq!(text.lines().count(), 1, "{text}");
        let line: Value = serde_json::from_str(&text).unwrap();
        assert_eq!((&line["level"], &line["rank"], &line["count"]), (&"WARN".into(), &"3".into(), &7.into()));
        assert_eq!((&line["message"], &line["path"]), (&"it\nhappened".into(), &"/v1/\"x\"\n".into()));
        assert!(line["time"].as_str().unwrap().ends_with('Z'));
    }
}
