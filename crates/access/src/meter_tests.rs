use proptest::prelude::*;

use super::*;

fn at(ms: u64) -> Now {
    // 2026-11-23T00:00:00Z.
    Now { steady_ms: ms, time: Time(1_795_392_000_000 + ms) }
}

fn key(name: &str, limits: Limits) -> Limited {
    Limited { scope: Scope::Key(name.into()), label: name.into(), limits }
}

fn ask(prompt_tokens: u64, answer_tokens: u64) -> Ask {
    Ask { prompt_tokens, answer_tokens: Some(answer_tokens), answers: 1, token_nanos: (0.0, 0.0) }
}

fn used(prompt_tokens: u64, answer_tokens: u64) -> Used {
    Used { prompt_tokens, answer_tokens, nanos: 0 }
}

#[test]
fn a_refusal_names_the_limit_and_when_to_come_again() {
    let mut meter = Meter::default();
    let team = Limited {
        scope: Scope::Team("lab".into()),
        label: "lab".into(),
        limits: Limits { requests_per_minute: Some(2), ..Limits::default() },
    };
    let limited = [key("ci", Limits::default()), team];
    for ms in [0, 10_000] {
        let reserved = meter.admit(&limited, &ask(10, 10), at(ms)).unwrap();
        meter.settle(reserved, &used(10, 5), at(ms + 100));
    }
    let refusal = meter.admit(&limited, &ask(10, 10), at(20_000)).unwrap_err();
    assert_eq!((refusal.scope, refusal.limit), (ScopeKind::Team, LimitKind::RequestsPerMinute));
    // The first one stops counting 60.25 s after its slice began.
    assert_eq!(refusal.retry_after_ms, Some(40_250));
    let text = refusal.to_string();
    assert!(text.contains("limit of 2 requests a minute of team \"lab\"") && text.contains("41 s"), "{text}");
    assert!(meter.check(&limited, at(60_249)).is_err());
    let reserved = meter.admit(&limited, &ask(10, 10), at(60_250)).unwrap();
    meter.settle(reserved, &used(10, 5), at(61_000));
}

#[test]
fn parallel_requests_are_free_again_when_they_end() {
    let mut meter = Meter::default();
    let limited = [key("ci", Limits { parallel_requests: Some(1), ..Limits::default() })];
    let first = meter.admit(&limited, &ask(1, 1), at(0)).unwrap();
    assert_eq!(meter.admit(&limited, &ask(1, 1), at(1)).unwrap_err().limit, LimitKind::ParallelRequests);
    meter.settle(first, &used(1, 1), at(2));
    let second = meter.admit(&limited, &ask(1, 1), at(3)).unwrap();
    meter.settle(second, &used(1, 1), at(4));
}

#[test]
fn a_request_above_its_limit_is_told_to_ask_for_less() {
    let mut meter = Meter::default();
    let limited = [key("ci", Limits { tokens_per_minute: Some(100), ..Limits::default() })];
    let refusal = meter.admit(&limited, &ask(60, 41), at(0)).unwrap_err();
    assert_eq!(refusal.retry_after_ms, None);
    assert!(refusal.to_string().ends_with("lower max_tokens"), "{refusal}");
    assert!(meter.admit(&limited, &ask(60, 40), at(0)).is_ok());
}

#[test]
fn a_small_budget_is_shown_with_all_its_digits() {
    let mut meter = Meter::default();
    let limits = Limits { cost_per_month: Some(0.00002), ..Limits::default() };
    let refused = meter.admit(&[key("ci", limits)], &Ask { token_nanos: (0.0, 1500.0), ..ask(1, 20) }, at(0));
    let refusal = refused.unwrap_err().to_string();
    assert!(refusal.contains("the limit of 0.00002 ") && refusal.contains("(0.00003)"), "{refusal}");
}

#[test]
fn a_refusal_says_what_is_left_of_all_limits() {
    let mut meter = Meter::default();
    let limits = Limits { requests_per_minute: Some(1), tokens_per_minute: Some(100), ..Limits::default() };
    let limited = [key("ci", limits)];
    let _held = meter.admit(&limited, &ask(10, 10), at(0)).unwrap();
    let refusal = meter.admit(&limited, &ask(10, 10), at(0)).unwrap_err();
    let headers = rate_headers(&refusal.standings);
    let value = |name: &str| headers.iter().find(|(known, _)| *known == name).unwrap().1.as_str();
    assert_eq!((value("x-ratelimit-limit-requests"), value("x-ratelimit-remaining-requests")), ("1", "0"));
    assert_eq!((value("x-ratelimit-limit-tokens"), value("x-ratelimit-remaining-tokens")), ("100", "80"));
    assert!(value("x-ratelimit-reset-tokens").ends_with('s') && headers.len() == 6, "{headers:?}");
}

#[test]
fn days_months_and_budgets_begin_anew() {
    let mut meter = Meter::default();
    let limits = Limits { tokens_per_day: Some(100), cost_per_month: Some(1.0), ..Limits::default() };
    let limited = [key("ci", limits)];
    meter.resume(Scope::Key("ci".into()), 90, (90, 999_999_000), at(0));
    let refusal = meter.admit(&limited, &ask(5, 6), at(0)).unwrap_err();
    assert_eq!((refusal.limit, refusal.retry_after_ms), (LimitKind::TokensPerDay, Some(DAY_MS)));
    // 500 nanos of budget are left after this one, then nothing.
    let costly = Ask { token_nanos: (50.0, 50.0), ..ask(5, 5) };
    let reserved = meter.admit(&limited, &costly, at(0)).unwrap();
    meter.settle(reserved, &Used { nanos: 1000, ..used(5, 5) }, at(0));
    let next_day = at(DAY_MS);
    let refusal = meter.admit(&limited, &ask(5, 6), next_day).unwrap_err();
    assert_eq!(refusal.limit, LimitKind::CostPerMonth);
    assert!(refusal.to_string().contains("1.00 in use, this request needs 0.00"), "{refusal}");
    let december = at(8 * DAY_MS);
    let reserved = meter.admit(&limited, &costly, december).unwrap();
    assert_eq!(meter.standings(&limited, december)[0].used, 10.0);
    meter.settle(reserved, &used(5, 5), december);
}

/// For 5 minutes, clients retry at once: five times the limit is admitted.
#[test]
fn saturated_limits_are_exact() {
    let limits = Limits { requests_per_minute: Some(60), tokens_per_minute: Some(4000), ..Limits::default() };
    for (answer, most) in [(20, 60), (180, 20)] {
        let (mut meter, limited) = (Meter::default(), [key("ci", limits)]);
        let (mut admitted, mut running) = (0, Vec::new());
        for ms in (0..300_000).step_by(50) {
            let now = at(ms);
            let (ended, still): (Vec<_>, Vec<_>) = running.into_iter().partition(|(end, _)| *end <= ms);
            running = still;
            for (_, reserved) in ended {
                meter.settle(reserved, &used(20, answer), now);
            }
            while let Ok(reserved) = meter.admit(&limited, &ask(20, answer), now) {
                admitted += 1;
                running.push((ms + 900, reserved));
            }
        }
        let exact = most * 5;
        assert!((admitted as f64 / exact as f64 - 1.0).abs() <= 0.02, "{admitted} of {exact}");
        running.into_iter().for_each(|(_, reserved)| meter.settle(reserved, &used(20, answer), at(300_000)));
    }
}

proptest! {
    /// With any requests, no 60 s contain more requests or tokens than the limit, and at the end
    /// nothing is counted any more.
    #[test]
    fn no_minute_holds_more_than_the_limit(
        steps in prop::collection::vec((0u64..5000, 1u64..40, 0u64..40, 0u64..3000), 1..150),
    ) {
        let limits = Limits { requests_per_minute: Some(20), tokens_per_minute: Some(500), ..Limits::default() };
        let (mut meter, limited, mut now) = (Meter::default(), [key("a", limits)], 0);
        let mut admitted: Vec<(u64, u64)> = Vec::new();
        for (pause, prompt, answer, takes) in steps {
            now += pause;
            if let Ok(reserved) = meter.admit(&limited, &ask(prompt, answer), at(now)) {
                admitted.push((now, prompt + answer));
                now += takes;
                meter.settle(reserved, &used(prompt, answer), at(now));
            }
            let recent = admitted.iter().filter(|(began, _)| began + 60_000 > now);
            let (count, tokens) = recent.fold((0, 0), |(count, sum), (_, tokens)| (count + 1, sum + tokens));
            prop_assert!(count <= 20 && tokens <= 500, "{count} requests, {tokens} tokens");
        }
        let later = meter.standings(&limited, at(now + 61_000));
        prop_assert!(later.iter().all(|standing| standing.used == 0.0));
    }
}
