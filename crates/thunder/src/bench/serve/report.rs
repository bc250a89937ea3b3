//! Percentiles as tables, JSON and a plot.

use std::time::Duration;

use serde_json::{Value, json};

use super::load::{Measured, Pace};
use super::stream::{Answer, Target};
use crate::{plot, table};

/// The percentiles that are reported.
const SHARES: [(&str, f64); 3] = [("p50", 0.5), ("p90", 0.9), ("p99", 0.99)];

/// The value that this share of the values does not exceed, by the nearest rank; 0 without values.
fn percentile(sorted: &[Duration], share: f64) -> Duration {
    let rank = (share * sorted.len() as f64).ceil() as usize;
    sorted.get(rank.saturating_sub(1).min(sorted.len().saturating_sub(1))).copied().unwrap_or_default()
}

fn sorted(values: impl Iterator<Item = Duration>) -> Vec<Duration> {
    let mut values: Vec<Duration> = values.collect();
    values.sort_unstable();
    values
}

fn first_tokens(result: &Measured) -> Vec<Duration> {
    sorted(result.answers.iter().map(|answer| answer.time_to_first))
}

fn between_tokens(result: &Measured) -> Vec<Duration> {
    sorted(result.answers.iter().flat_map(|answer| answer.between.iter().copied()))
}

fn total(result: &Measured, of: impl Fn(&Answer) -> u64) -> u64 {
    result.answers.iter().map(of).sum()
}

fn per_second(result: &Measured, count: u64) -> f64 {
    count as f64 / result.wall.as_secs_f64().max(1e-9)
}

fn ms(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

/// Prints a table of the loads, and the errors.
pub fn print(results: &[Measured]) {
    let mut table = table::new(&[
        "load",
        "answers",
        "errors",
        "tok/s",
        "req/s",
        "first p50",
        "p90",
        "p99 ms",
        "between p50",
        "p90",
        "p99 ms",
    ]);
    for result in results {
        let (first, between) = (first_tokens(result), between_tokens(result));
        let mut row = vec![
            result.pace.to_string(),
            result.completed().to_string(),
            result.failed().to_string(),
            format!("{:.1}", per_second(result, total(result, |answer| answer.tokens))),
            format!("{:.2}", per_second(result, result.completed() as u64)),
        ];
        for values in [&first, &between] {
            row.extend(SHARES.iter().map(|(_, share)| format!("{:.1}", ms(percentile(values, *share)))));
        }
        table.add_row(row);
    }
    println!("{table}");
    for result in results {
        for (error, count) in &result.errors {
            println!("{}: {count} times: {error}", result.pace);
        }
    }
}

/// The results as one JSON object. Times are in milliseconds.
pub fn json(target: &Target, results: &[Measured]) -> Value {
    let percentiles = |values: &[Duration]| {
        let mut object: serde_json::Map<String, Value> = SHARES
            .iter()
            .map(|(name, share)| ((*name).to_owned(), ms(percentile(values, *share)).into()))
            .collect();
        object.insert("max".into(), ms(values.last().copied().unwrap_or_default()).into());
        Value::Object(object)
    };
    let rows: Vec<Value> = results
        .iter()
        .map(|result| {
            let (clients, rate) = match result.pace {
                Pace::Clients(clients) => (json!(clients), Value::Null),
                Pace::PerSecond(rate) => (Value::Null, json!(rate)),
            };
            let tokens = total(result, |answer| answer.tokens);
            json!({
                "clients": clients, "rate_per_s": rate, "answers": result.completed(), "errors": result.errors,
                "wall_s": result.wall.as_secs_f64(), "tokens": tokens,
                "prompt_tokens": total(result, |answer| answer.prompt_tokens),
                "cached_tokens": total(result, |answer| answer.cached_tokens),
                "tokens_per_s": per_second(result, tokens),
                "requests_per_s": per_second(result, result.completed() as u64),
                "time_to_first_token_ms": percentiles(&first_tokens(result)),
                "between_tokens_ms": percentiles(&between_tokens(result)),
                "request_ms": percentiles(&sorted(result.answers.iter().map(|answer| answer.total))),
            })
        })
        .collect();
    json!({"model": target.model, "most_tokens": target.most_tokens, "rows": rows})
}

/// Throughput and the median times over the load.
pub fn plot(results: &[Measured]) -> String {
    let series = |name: &str, value: &dyn Fn(&Measured) -> f64| plot::Series {
        name: name.to_owned(),
        points: results
            .iter()
            .map(|result| (result.pace.amount(), value(result)))
            .filter(|(_, value)| *value > 0.0)
            .collect(),
    };
    let all = [
        series("tokens per second", &|result| per_second(result, total(result, |answer| answer.tokens))),
        series("ms to the first token, p50", &|result| ms(percentile(&first_tokens(result), 0.5))),
        series("ms between tokens, p50", &|result| ms(percentile(&between_tokens(result), 0.5))),
    ];
    plot::logarithmic(&all, |load| load.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_values_that_were_measured() {
        let values: Vec<Duration> = (1..=100).map(Duration::from_millis).collect();
        let at = |share| percentile(&values, share).as_millis();
        assert_eq!([at(0.5), at(0.9), at(0.99), at(1.0)], [50, 90, 99, 100]);
        assert_eq!(percentile(&values[..1], 0.99).as_millis(), 1);
        assert_eq!(percentile(&[], 0.5), Duration::ZERO);
    }
}
