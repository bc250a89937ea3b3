//! Long lists as JSON lines or CSV, sent page by page, so that their length costs no memory.

use std::convert::Infallible;

use axum::body::{Body, Bytes};
use axum::http::{HeaderValue, header};
use axum::response::Response;
use futures_util::stream;
use thunder_access::AccessError;

use super::Query;
use crate::error::ApiError;

/// Number of rows to read at a time.
const PAGE: usize = 500;

/// How a list is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Format {
    Json,
    Lines,
    Csv,
}

impl Format {
    /// The parameter `format`.
    pub fn take(query: &mut Query) -> Result<Self, ApiError> {
        match query.text("format").as_deref() {
            None | Some("json") => Ok(Self::Json),
            Some("jsonl") => Ok(Self::Lines),
            Some("csv") => Ok(Self::Csv),
            Some(other) => {
                let other: String = other.chars().take(40).collect();
                let message = format!("`format` is \"{other}\", but must be json, jsonl or csv");
                Err(ApiError::field("format", message))
            }
        }
    }

    fn content_type(self) -> HeaderValue {
        HeaderValue::from_static(match self {
            Self::Json => "application/json",
            Self::Lines => "application/x-ndjson",
            Self::Csv => "text/csv; charset=utf-8",
        })
    }
}

/// A row of a list.
pub(crate) trait Row: Send + 'static {
    /// Rows before this one have larger numbers.
    fn number(&self) -> u64;
    /// The row as JSON.
    fn line(&self) -> String;
    /// The row's columns.
    fn cells(&self) -> Vec<String>;
}

/// A line of CSV (RFC 4180). A cell that a spreadsheet would take for a formula gets an apostrophe.
pub(crate) fn csv(cells: &[String]) -> String {
    let quoted: Vec<String> = cells
        .iter()
        .map(|cell| {
            let is_number = cell.parse::<f64>().is_ok();
            let is_formula = !is_number && cell.starts_with(['=', '+', '-', '@', '\t', '\r']);
            let cell = if is_formula { format!("'{cell}") } else { cell.clone() };
            let needs_quotes = cell.contains([',', '"', '\n', '\r']);
            if needs_quotes { format!("\"{}\"", cell.replace('"', "\"\"")) } else { cell }
        })
        .collect();
    format!("{}\r\n", quoted.join(","))
}

/// A text of these rows.
pub(crate) fn rows<R: Row>(format: Format, rows: &[R]) -> String {
    rows.iter()
        .map(|row| match format {
            Format::Csv => csv(&row.cells()),
            _ => format!("{}\n", row.line()),
        })
        .collect()
}

/// The head of a list.
pub(crate) fn heading(format: Format, columns: &[&str]) -> String {
    let names: Vec<String> = columns.iter().map(|name| (*name).to_owned()).collect();
    if format == Format::Csv { csv(&names) } else { String::new() }
}

/// A response of this type.
pub(crate) fn response(format: Format, body: Body) -> Response {
    let mut response = Response::new(body);
    response.headers_mut().insert(header::CONTENT_TYPE, format.content_type());
    response
}

/// All rows from number `before` on downward. `page` reads rows below a number.
pub(crate) fn export<R: Row>(
    format: Format,
    columns: &'static [&'static str],
    before: Option<u64>,
    page: impl Fn(Option<u64>, usize) -> Result<Vec<R>, AccessError> + Send + Sync + Clone + 'static,
) -> Response {
    let begin = Some((before, true));
    let pieces = stream::unfold(begin, move |state| {
        let page = page.clone();
        async move {
            let (before, is_first) = state?;
            let read = tokio::task::spawn_blocking(move || page(before, PAGE)).await;
            let head = if is_first { heading(format, columns) } else { String::new() };
            let Ok(Ok(read)) = read else {
                // A list cannot report an error in its middle, so the connection is aborted.
                tracing::error!("a list breaks off: the store failed");
                return Some((Err(std::io::Error::other("the store failed")), None));
            };
            let next =
                if read.len() == PAGE { read.last().map(|row| (Some(row.number()), false)) } else { None };
            Some((Ok::<Bytes, std::io::Error>((head + &rows(format, &read)).into()), next))
        }
    });
    response(format, Body::from_stream(pieces))
}

/// Whether a list may lack the records of servers that do not answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Partial(bool);

impl Partial {
    /// The parameter `partial`.
    pub fn take(query: &mut Query) -> Result<Self, ApiError> {
        Ok(Self(query.parse::<bool>("partial", "true or false")?.unwrap_or(false)))
    }

    /// The rows, if none are missing or some may be missing. Otherwise an error, because an
    /// incomplete list looks complete.
    ///
    /// # Errors
    /// When servers are missing.
    pub fn accept<R>(self, rows: Vec<R>, missing: &[String]) -> Result<Vec<R>, AccessError> {
        if self.0 || missing.is_empty() { Ok(rows) } else { Err(AccessError::Missing(missing.join("; "))) }
    }
}

/// A list that is already complete.
pub(crate) fn whole(format: Format, text: String) -> Response {
    let once = stream::once(async { Ok::<_, Infallible>(Bytes::from(text)) });
    response(format, Body::from_stream(once))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cells_are_quoted_and_never_formulas() {
        let cells = ["a,b", "say \"hi\"", "two\nlines", "=1+1", "-0.5", "@x", "plain", ""].map(str::to_owned);
        assert_eq!(csv(&cells), "\"a,b\",\"say \"\"hi\"\"\",\"two\nlines\",'=1+1,-0.5,'@x,plain,\r\n");
    }
}
