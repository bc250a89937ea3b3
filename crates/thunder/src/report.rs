//! Errors as one line for people.

/// An error and its causes, each once: many errors name their cause in their own text.
pub fn line(error: &anyhow::Error) -> String {
    let mut text = String::new();
    for cause in error.chain().map(ToString::to_string) {
        if text.is_empty() {
            text = cause;
        } else if !text.contains(&cause) {
            text = format!("{text}: {cause}");
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use std::io::{Error, ErrorKind};

    use anyhow::Context;

    use super::*;

    #[test]
    fn a_cause_that_its_error_names_is_not_repeated() {
        let source = || Error::new(ErrorKind::AddrInUse, "address in use");
        let named = thunder_model::ModelError::Io { path: "/a".into(), source: source() };
        assert_eq!(line(&named.into()), "/a: address in use");
        let outer = Err::<(), _>(source()).context("cannot listen").context("no server").unwrap_err();
        assert_eq!(line(&outer), "no server: cannot listen: address in use");
    }
}
