//! Redaction: replaces parts of a text before it is written.

use regex::{Captures, Regex};
use serde::{Deserialize, Serialize};

/// Maximum number of patterns of a policy, and the maximum length of one.
const MOST_PATTERNS: usize = 32;
const LONGEST_PATTERN: usize = 500;
/// Maximum memory of a compiled pattern.
const PATTERN_BYTES: usize = 1 << 20;

/// A kind of text that is replaced.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Redaction {
    /// E-mail addresses.
    Email,
    /// Numbers of payment cards: 13 to 19 digits with Luhn's check digit.
    Card,
    /// Bearer tokens, keys of well-known services and of this server, JSON web tokens.
    Token,
    /// International bank account numbers with their check digits.
    Iban,
}

impl Redaction {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Email, Self::Card, Self::Token, Self::Iban];

    /// Its name in a policy.
    pub fn name(self) -> &'static str {
        match self {
            Self::Email => "email",
            Self::Card => "card",
            Self::Token => "token",
            Self::Iban => "iban",
        }
    }

    fn pattern(self) -> &'static str {
        match self {
            Self::Email => r"(?i)[a-z0-9._%+-]+@[a-z0-9-]+(?:\.[a-z0-9-]+)*\.[a-z]{2,}",
            Self::Card => r"\b\d(?:[ -]?\d){12,18}\b",
            Self::Token => {
                r"(?ix) \b bearer [\ \t]+ [a-z0-9._~+/-]{8,} =*
                | \b (?: sk | pk | rk | th | hf | gh[opsu] | github_pat | glpat | xox[abprs] ) [-_] [a-z0-9_-]{16,}
                | \b akia [0-9a-z]{16} \b
                | \b eyj [a-z0-9_-]{8,} \. [a-z0-9_-]{8,} \. [a-z0-9_-]*"
            }
            Self::Iban => r"\b[A-Z]{2}\d{2}(?: ?[A-Z0-9]{4}){2,7}(?: ?[A-Z0-9]{1,3})?\b",
        }
    }

    /// Whether a match is valid: check digits distinguish it from other numbers.
    fn is_one(self, text: &str) -> bool {
        match self {
            Self::Email | Self::Token => true,
            Self::Card => has_luhn_digit(text),
            Self::Iban => has_iban_digits(text),
        }
    }
}

/// Why a pattern is refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BadPattern {
    /// It is not a regular expression, or needs too much memory.
    #[error("the pattern \"{pattern}\" cannot be used: {why}")]
    Regex {
        /// Its beginning.
        pattern: String,
        /// What is wrong.
        why: String,
    },
    /// Too many.
    #[error("{0} patterns, but {MOST_PATTERNS} are the most")]
    Many(usize),
}

/// Replaces the kinds and patterns of a policy.
#[derive(Debug)]
pub(super) struct Redactor(Vec<(Option<Redaction>, Regex)>);

impl Redactor {
    pub fn new(kinds: &[Redaction], patterns: &[String]) -> Result<Self, BadPattern> {
        if patterns.len() > MOST_PATTERNS {
            return Err(BadPattern::Many(patterns.len()));
        }
        let compile = |pattern: &str| {
            let shown = || pattern.chars().take(60).collect::<String>();
            let bad = |why: String| BadPattern::Regex { pattern: shown(), why };
            if pattern.len() > LONGEST_PATTERN {
                return Err(bad(format!("it has {} bytes, {LONGEST_PATTERN} are the most", pattern.len())));
            }
            let compiled = regex::RegexBuilder::new(pattern).size_limit(PATTERN_BYTES).build();
            let compiled = compiled.map_err(|error| bad(error.to_string().replace('\n', " ")))?;
            if compiled.is_match("") {
                return Err(bad("it matches the empty text".to_owned()));
            }
            Ok(compiled)
        };
        let mut all = Vec::new();
        // The user's patterns come first, then tokens: a token that contains an address is one
        // token.
        for pattern in patterns {
            all.push((None, compile(pattern)?));
        }
        for kind in [Redaction::Token, Redaction::Email, Redaction::Iban, Redaction::Card] {
            if kinds.contains(&kind) {
                all.push((Some(kind), compile(kind.pattern())?));
            }
        }
        Ok(Self(all))
    }

    /// The redacted text, and the number of replacements.
    pub fn clean(&self, text: &str) -> (String, u64) {
        let (mut text, mut count) = (text.to_owned(), 0);
        for (kind, regex) in &self.0 {
            let mut replaced = 0;
            let clean = regex.replace_all(&text, |found: &Captures<'_>| {
                let whole = &found[0];
                match kind {
                    Some(kind) if !kind.is_one(whole) => whole.to_owned(),
                    kind => {
                        replaced += 1;
                        format!("[{}]", kind.map_or("redacted", Redaction::name))
                    }
                }
            });
            if replaced > 0 {
                text = clean.into_owned();
                count += replaced;
            }
        }
        (text, count)
    }
}

/// ISO/IEC 7812-1, annex B.
fn has_luhn_digit(text: &str) -> bool {
    let digits = text.chars().rev().filter_map(|digit| digit.to_digit(10));
    let sum: u32 = digits
        .enumerate()
        .map(|(place, digit)| match (place % 2, digit * 2) {
            (0, _) => digit,
            (_, double) if double > 9 => double - 9,
            (_, double) => double,
        })
        .sum();
    sum.is_multiple_of(10)
}

/// ISO 13616-1: the number modulo 97 is 1.
fn has_iban_digits(text: &str) -> bool {
    let letters: Vec<char> = text.chars().filter(|letter| *letter != ' ').collect();
    let moved = letters.iter().skip(4).chain(letters.iter().take(4));
    let rest = moved.filter_map(|letter| letter.to_digit(36)).fold(0u64, |rest, digit| {
        let shift = if digit > 9 { 100 } else { 10 };
        (rest * shift + u64::from(digit)) % 97
    });
    rest == 1
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn clean(text: &str) -> String {
        Redactor::new(&Redaction::ALL, &[]).unwrap().clean(text).0
    }

    #[test]
    fn addresses_cards_tokens_and_accounts_are_replaced() {
        for (text, expected) in [
            ("write to Ann.Lee+x@mail.example.co.uk, please", "write to [email], please"),
            // The test number of a card company, with its check digit and with a wrong one.
            ("pay with 4111 1111 1111 1111.", "pay with [card]."),
            ("pay with 4111-1111-1111-1112.", "pay with 4111-1111-1111-1112."),
            ("Authorization: Bearer abcDEF123.456-789==", "Authorization: [token]"),
            ("key th-abcdefgh-0123456789abcdefABCDEF", "key [token]"),
            ("sk-proj-0123456789abcdef and AKIAIOSFODNN7EXAMPLE", "[token] and [token]"),
            ("eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.c2lnbmF0dXJl", "[token]"),
            // The example of the standard's registry.
            ("to GB82 WEST 1234 5698 7654 32 today", "to [iban] today"),
            ("to GB83 WEST 1234 5698 7654 32 today", "to GB83 WEST 1234 5698 7654 32 today"),
            ("order 12345, ticket 2026-11-25", "order 12345, ticket 2026-11-25"),
            ("a bearer of bad news", "a bearer of bad news"),
        ] {
            assert_eq!(clean(text), expected);
        }
    }

    #[test]
    fn patterns_of_the_policy_are_replaced_and_checked() {
        let patterns = [r"\bP-\d{4}\b".to_owned()];
        let redactor = Redactor::new(&[Redaction::Email], &patterns).unwrap();
        assert_eq!(
            redactor.clean("P-1234 of a@b.de, 4111111111111111"),
            ("[redacted] of [email], 4111111111111111".into(), 2)
        );
        for bad in ["(", "a*", "(?:a{1000}){1000}", &"a".repeat(501)] {
            assert!(matches!(Redactor::new(&[], &[bad.to_owned()]), Err(BadPattern::Regex { .. })), "{bad}");
        }
        assert_eq!(Redactor::new(&[], &vec!["a".to_owned(); 33]).unwrap_err(), BadPattern::Many(33));
    }

    proptest! {
        #[test]
        fn any_text_can_be_cleaned_and_stays_clean(text in "\\PC{0,200}") {
            let once = clean(&text);
            prop_assert_eq!(clean(&once), once);
        }
    }
}
