//! Headers of requests that say how they are counted, and of responses that say what is left.

use axum::http::{HeaderMap, HeaderName, HeaderValue};
use thunder_access::{Claimant, Standing, rate_headers};

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
pub(crate) fn of_limits(standings: &[Standing]) -> HeaderMap {
    let headers = rate_headers(standings).into_iter();
    headers
        .filter_map(|(name, value)| {
            Some((HeaderName::from_static(name), HeaderValue::from_str(&value).ok()?))
        })
        .collect()
}
