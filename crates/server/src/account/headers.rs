//! Headers of requests that say how they are counted, and of responses that say what is left.

use axum::http::{HeaderMap, HeaderName, HeaderValue};
use thunder_access::{Claimant, LimitKind, Standing};

use crate::app::App;
use crate::generate::relay;

/// Header in which a node of a cluster names a request's caller, as JSON.
const CLAIMANT: &str = "x-thunder-claimant";

/// Whether a node of a cluster wants to know what the ranks do.
pub(super) fn tells_work(app: &App, headers: &HeaderMap) -> bool {
    app.config.relay && headers.contains_key(relay::TELLS_WORK)
}

/// Whom a node of a cluster names as a request's caller. Only nodes reach a server that relays.
pub(super) fn claimant(app: &App, headers: &HeaderMap) -> Option<Claimant> {
    app.config.gate.as_ref().filter(|_| app.config.relay)?;
    let claimant: Claimant = serde_json::from_slice(headers.get(CLAIMANT)?.as_bytes()).ok()?;
    (claimant.weight.is_finite() && claimant.weight > 0.0).then_some(claimant)
}

/// OpenAI's headers of these limits.
pub(super) fn of_limits(standings: &[Standing]) -> HeaderMap {
    let mut headers = HeaderMap::new();
    for (what, limit) in [("requests", LimitKind::RequestsPerMinute), ("tokens", LimitKind::TokensPerMinute)]
    {
        let of_kind = standings.iter().filter(|standing| standing.limit == limit);
        let Some(least) = of_kind.min_by(|a, b| a.left.total_cmp(&b.left)) else { continue };
        let reset = format!("{}s", least.resets_s.unwrap_or(0.0));
        for (name, value) in [
            ("limit", (least.allowed as u64).to_string()),
            ("remaining", (least.left as u64).to_string()),
            ("reset", reset),
        ] {
            let name = HeaderName::try_from(format!("x-ratelimit-{name}-{what}"));
            if let (Ok(name), Ok(value)) = (name, HeaderValue::try_from(value)) {
                headers.insert(name, value);
            }
        }
    }
    headers
}
