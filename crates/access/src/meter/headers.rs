//! OpenAI's headers with the remaining part of the limits.

use super::Standing;
use crate::limits::LimitKind;

/// Response headers that pages of other origins may read.
pub const EXPOSED_HEADERS: [&str; 7] = [
    "retry-after",
    "x-ratelimit-limit-requests",
    "x-ratelimit-limit-tokens",
    "x-ratelimit-remaining-requests",
    "x-ratelimit-remaining-tokens",
    "x-ratelimit-reset-requests",
    "x-ratelimit-reset-tokens",
];

/// Names and values of the headers `x-ratelimit-…` for these limits. Of several limits of the same
/// kind, the one with the smallest rest is used.
pub fn rate_headers(standings: &[Standing]) -> Vec<(&'static str, String)> {
    let kinds = [
        (
            LimitKind::RequestsPerMinute,
            ["x-ratelimit-limit-requests", "x-ratelimit-remaining-requests", "x-ratelimit-reset-requests"],
        ),
        (
            LimitKind::TokensPerMinute,
            ["x-ratelimit-limit-tokens", "x-ratelimit-remaining-tokens", "x-ratelimit-reset-tokens"],
        ),
    ];
    let mut headers = Vec::new();
    for (limit, names) in kinds {
        let of_kind = standings.iter().filter(|standing| standing.limit == limit);
        let Some(least) = of_kind.min_by(|a, b| a.left.total_cmp(&b.left)) else { continue };
        let values = [
            (least.allowed as u64).to_string(),
            (least.left as u64).to_string(),
            format!("{}s", least.resets_s.unwrap_or(0.0)),
        ];
        headers.extend(names.into_iter().zip(values));
    }
    headers
}
