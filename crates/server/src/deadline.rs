//! Deadlines of requests: the server's limit for all, or an earlier one of the client.

use std::future::pending;
use std::time::Duration;

use axum::http::HeaderMap;
use tokio::time::Instant;

use crate::error::ApiError;

/// Header with the seconds that a client gives its request.
pub(crate) const HEADER: &str = "x-request-timeout";
/// The longest time that a client may set: a day.
const MOST_SECONDS: f64 = 86_400.0;

/// The time by which a request must be answered, wherever it is waiting or being computed.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Deadline(Option<(Instant, Duration)>);

impl Deadline {
    /// The deadline of a request that arrives now with these headers.
    ///
    /// # Errors
    /// When the header is no number of seconds.
    pub fn of(headers: &HeaderMap, limit: Option<Duration>) -> Result<Self, ApiError> {
        let asked = headers.get(HEADER).map(|value| {
            let seconds = value.to_str().ok().and_then(|text| text.trim().parse::<f64>().ok());
            let seconds = seconds.filter(|seconds| *seconds > 0.0 && *seconds <= MOST_SECONDS);
            seconds.map(Duration::from_secs_f64).ok_or_else(|| {
                let message = format!(
                    "the header {HEADER} is {value:?}, but must be seconds above 0, at most {MOST_SECONDS}"
                );
                ApiError::invalid(message).code("invalid_header")
            })
        });
        let allowed = [asked.transpose()?, limit].into_iter().flatten().min();
        Ok(Self(allowed.map(|allowed| (Instant::now() + allowed, allowed))))
    }

    /// Waits until the deadline; forever if there is none.
    pub async fn passed(self) -> ApiError {
        let Some((at, allowed)) = self.0 else { return pending().await };
        tokio::time::sleep_until(at).await;
        ApiError::late(format!(
            "the answer was not complete within {allowed:?}, the limit of the server (--request-timeout) or of the \
             header {HEADER}: ask for fewer tokens, or allow more time"
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn the_earlier_of_two_limits_counts() {
        let of = |asked: Option<&str>, limit: Option<u64>| {
            let mut headers = HeaderMap::new();
            if let Some(asked) = asked {
                headers.insert(HEADER, asked.parse().expect("a value"));
            }
            Deadline::of(&headers, limit.map(Duration::from_secs))
        };
        for (asked, limit, seconds) in
            [(Some("1.5"), None, 1.5), (Some("9"), Some(3), 3.0), (None, Some(2), 2.0)]
        {
            let began = Instant::now();
            let error = of(asked, limit).expect("a deadline").passed().await;
            assert_eq!(
                (error.status.as_u16(), began.elapsed().as_secs_f64()),
                (504, seconds),
                "{asked:?} {limit:?}"
            );
        }
        let none = of(None, None).expect("none").passed();
        assert!(tokio::time::timeout(Duration::from_secs(1 << 20), none).await.is_err());
        for wrong in ["0", "-1", "NaN", "inf", "1e9", "soon", ""] {
            assert!(of(Some(wrong), None).is_err(), "{wrong}");
        }
    }
}
