//! Moments: of the calendar, which are stored, and the pair of clocks for counting limits.

use std::fmt;
use std::str::FromStr;
use std::sync::OnceLock;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// Milliseconds of a day.
pub const DAY_MS: u64 = 24 * 3600 * 1000;
/// Milliseconds of an hour.
pub const HOUR_MS: u64 = 3600 * 1000;

/// A moment in UTC, in milliseconds since 1970. Its text is RFC 3339.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Time(pub u64);

impl Time {
    /// The day since 1970.
    pub fn day(self) -> u64 {
        self.0 / DAY_MS
    }

    /// The months since year 0 of the calendar.
    pub fn month(self) -> u64 {
        let date = self.timestamp().to_zoned(jiff::tz::TimeZone::UTC).date();
        u64::try_from(i64::from(date.year()) * 12 + i64::from(date.month()) - 1).unwrap_or(0)
    }

    /// The first moment of this moment's month.
    pub fn month_begin(self) -> Self {
        let zoned = self.timestamp().to_zoned(jiff::tz::TimeZone::UTC);
        let first = zoned.first_of_month().and_then(|first| first.start_of_day());
        first.map_or(Self(0), |first| Self::of(first.timestamp()))
    }

    /// The first moment of the next month.
    pub fn next_month(self) -> Self {
        // No month has more than 31 days.
        Self(self.month_begin().0 + 32 * DAY_MS).month_begin()
    }

    /// A date, a time, or an age before `now`: `7d`, `24h`, `30m`, `90s` or `2w`.
    pub fn ago(text: &str, now: Self) -> Option<Self> {
        if let Ok(time) = text.parse() {
            return Some(time);
        }
        let unit_ms = match text.chars().last()? {
            's' => 1000,
            'm' => 60_000,
            'h' => HOUR_MS,
            'd' => DAY_MS,
            'w' => 7 * DAY_MS,
            _ => return None,
        };
        let digits = &text[..text.len() - 1];
        let is_number = !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit());
        let age_ms = digits.parse::<u64>().ok().filter(|_| is_number)?.checked_mul(unit_ms)?;
        Some(Self(now.0.saturating_sub(age_ms)))
    }

    /// The date, `2026-11-23`.
    pub fn date(self) -> String {
        self.to_string().chars().take(10).collect()
    }

    fn timestamp(self) -> jiff::Timestamp {
        i64::try_from(self.0)
            .ok()
            .and_then(|ms| jiff::Timestamp::from_millisecond(ms).ok())
            .unwrap_or(jiff::Timestamp::MAX)
    }

    fn of(timestamp: jiff::Timestamp) -> Self {
        Self(u64::try_from(timestamp.as_millisecond()).unwrap_or(0))
    }
}

impl fmt::Display for Time {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{:.3}", self.timestamp())
    }
}

/// A text is no moment.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("\"{0}\" is neither a date like 2026-11-23 nor a time like 2026-11-23T08:30:00Z")]
pub struct BadTime(String);

impl FromStr for Time {
    type Err = BadTime;

    /// Reads RFC 3339, or a date, which is its first moment in UTC.
    fn from_str(text: &str) -> Result<Self, BadTime> {
        let bad = || BadTime(text.chars().take(60).collect());
        if let Ok(timestamp) = text.parse::<jiff::Timestamp>() {
            return Ok(Self::of(timestamp));
        }
        let date = text.parse::<jiff::civil::Date>().map_err(|_| bad())?;
        let zoned = date.to_zoned(jiff::tz::TimeZone::UTC).map_err(|_| bad())?;
        Ok(Self::of(zoned.timestamp()))
    }
}

impl Serialize for Time {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Time {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        text.parse().map_err(serde::de::Error::custom)
    }
}

/// One moment on two clocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Now {
    /// Milliseconds on a clock that never jumps, for windows of a minute.
    pub steady_ms: u64,
    /// The calendar's clock, for days, months and expiry.
    pub time: Time,
}

impl Now {
    /// Reads both clocks.
    pub fn read() -> Self {
        static BEGAN: OnceLock<Instant> = OnceLock::new();
        let steady = BEGAN.get_or_init(Instant::now).elapsed().as_millis();
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_millis();
        let ms = |value: u128| u64::try_from(value).unwrap_or(u64::MAX);
        Self { steady_ms: ms(steady), time: Time(ms(since)) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_and_times_are_read_and_written() {
        let time: Time = "2026-11-23T08:30:00Z".parse().unwrap();
        assert_eq!(time.to_string(), "2026-11-23T08:30:00.000Z");
        assert_eq!("2026-11-23".parse(), Ok(Time(time.day() * DAY_MS)));
        assert_eq!("2026-11-23T09:30:00+01:00".parse(), Ok(time));
        assert_eq!(time.month_begin().to_string(), "2026-11-01T00:00:00.000Z");
        assert_eq!(time.next_month().to_string(), "2026-12-01T00:00:00.000Z");
        assert_eq!("2026-12-31".parse::<Time>().unwrap().next_month().date(), "2027-01-01");
        assert_eq!(time.next_month().month(), time.month() + 1);
        for bad in ["", "yesterday", "2026-13-01", "2026-11-23 25:00"] {
            assert!(bad.parse::<Time>().is_err(), "{bad}");
        }
        let ago = |text| Time::ago(text, time).map(|time| time.to_string());
        assert_eq!(ago("7d").as_deref(), Some("2026-11-16T08:30:00.000Z"));
        assert_eq!(ago("24h"), ago("1d"));
        assert_eq!(ago("2w"), ago("14d"));
        assert_eq!(ago("90m").as_deref(), Some("2026-11-23T07:00:00.000Z"));
        assert_eq!(ago("5s").as_deref(), Some("2026-11-23T08:29:55.000Z"));
        assert_eq!(ago("2026-11-01").as_deref(), Some("2026-11-01T00:00:00.000Z"));
        assert_eq!(ago("999999d").as_deref(), Some("1970-01-01T00:00:00.000Z"));
        for bad in ["", "7", "d", "-1d", "+1d", "1.5h", "7 d", "7é", "99999999999999999999d", "7y"] {
            assert_eq!(ago(bad), None, "{bad}");
        }
        // A moment beyond the calendar must not panic.
        assert!(Time(u64::MAX).to_string().starts_with("9999-"));
        assert!(Time(u64::MAX).month_begin() <= Time(u64::MAX));
    }
}
