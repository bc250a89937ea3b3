//! Bars on standard error; hidden if it is not a terminal, or has JSON only.

use indicatif::{ProgressBar, ProgressStyle};

use crate::log;

/// A bar of bytes. Its length is set later.
pub fn bytes(verb: &str) -> ProgressBar {
    bar(0, verb, "{prefix} {bar:40} {bytes}/{total_bytes} {bytes_per_sec} {eta}")
}

/// A bar of `count` measurements; its message names the running one.
pub fn measurements(count: usize) -> ProgressBar {
    bar(count as u64, "measuring", "{prefix} {bar:30} {pos}/{len} {msg} {eta} left")
}

/// A bar of a prompt's tokens.
pub fn prompt(tokens: usize) -> ProgressBar {
    bar(tokens as u64, "reading the prompt", "{prefix} {bar:30} {pos}/{len} tokens, {elapsed}")
}

fn bar(length: u64, verb: &str, template: &str) -> ProgressBar {
    if log::is_json() {
        return ProgressBar::hidden();
    }
    let style = ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar());
    ProgressBar::new(length).with_style(style).with_prefix(verb.to_owned())
}
