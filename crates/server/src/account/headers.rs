//! Headers that say how a request is counted, and headers of responses with the remaining limits.

use axum::http::{HeaderMap, HeaderName, HeaderValue};
use thunder_access::{Claimant, Standing, rate_headers};

use crate::app::App;
use crate::generate::relay;

/// Header with a request's caller as JSON, from a node of a cluster.
const CLAIMANT: &str = "x-thunder-claimant";

/// Whether a node of a cluster wants the ranks' work.
pub(super) fn tells_work(app: &App, headers: &HeaderMap) -> bool {
    app.config.relay && headers.contains_key(relay::TELLS_WORK)
}

/// The caller that a node of a cluster names. Only nodes can reach a server that relays.
pub(super) fn claimant(app: &App, headers: &HeaderMap) -> Option<Claimant> {
    app.config.gate.as_ref().filter(|_| app.config.relay)?;
    let claimant: Claimant = serde_json::from_slice(headers.get(CLAIMANT)?.as_bytes()).ok()?;
    (claimant.weight.is_finite() && claimant.weight > 0.0).then_some(claimant)
}

/// OpenAI's headers of these limits.
pub(crate) fn of_limits(standings: &[Standing]) -> HeaderMap {
    let headers = rate_headers(standings).into_iter();
    headers
        .filter_map(|(name, value)| {
            Some((HeaderName::from_static(name), HeaderValue::from_str(&value).ok()?))
        })
        .collect()
}
