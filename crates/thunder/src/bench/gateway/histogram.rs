//! A histogram in the text of `/metrics`.

use anyhow::Context;

/// Counts up to each upper bound.
#[derive(Debug, Clone, PartialEq)]
pub struct Histogram {
    /// Upper bound in seconds, and how many values do not exceed it.
    buckets: Vec<(f64, u64)>,
    sum: f64,
}

impl Histogram {
    /// Reads the histogram with this name, and with this label `part` if there is one.
    ///
    /// # Errors
    /// When the text does not have it.
    pub fn read(text: &str, name: &str, part: Option<&str>) -> anyhow::Result<Self> {
        let label = part.map(|part| format!("part=\"{part}\""));
        let (mut buckets, mut sum) = (Vec::new(), None);
        for line in text.lines() {
            let Some((metric, value)) = line.rsplit_once(' ') else { continue };
            let Some(rest) = metric.strip_prefix(name) else { continue };
            if label.as_ref().is_some_and(|label| !rest.contains(label.as_str())) {
                continue;
            }
            if rest.starts_with("_sum") {
                sum = value.parse().ok();
            } else if rest.starts_with("_bucket") {
                let bound = rest.split("le=\"").nth(1).and_then(|after| after.split('"').next());
                let bound = bound.and_then(|bound| match bound {
                    "+Inf" => Some(f64::INFINITY),
                    bound => bound.parse().ok(),
                });
                buckets.push((bound, value.parse::<u64>().ok()));
            }
        }
        let missing = || format!("/metrics has no histogram {name}");
        let buckets = buckets.into_iter().map(|(bound, count)| Some((bound?, count?)));
        let buckets: Option<Vec<(f64, u64)>> = buckets.collect();
        let buckets = buckets.filter(|buckets| !buckets.is_empty()).with_context(missing)?;
        Ok(Self { buckets, sum: sum.with_context(missing)? })
    }

    /// Values.
    pub fn count(&self) -> u64 {
        self.buckets.last().map_or(0, |(_, count)| *count)
    }

    /// Their mean.
    pub fn mean(&self) -> f64 {
        self.sum / self.count().max(1) as f64
    }

    /// The value that a share of all does not exceed: interpolated between two bounds, as in
    /// Prometheus; above the last bound, that bound.
    pub fn quantile(&self, share: f64) -> f64 {
        let wanted = share * self.count() as f64;
        let (mut low, mut before) = (0.0, 0);
        for &(bound, count) in &self.buckets {
            if count as f64 >= wanted && count > before {
                let part = (wanted - before as f64) / (count - before) as f64;
                return if bound.is_finite() { low + (bound - low) * part } else { low };
            }
            (low, before) = (if bound.is_finite() { bound } else { low }, count);
        }
        low
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "\
# TYPE thunder:own_seconds histogram
thunder:own_seconds_sum{model_name=\"a b\"} 0.5
thunder:own_seconds_count{model_name=\"a b\"} 10
thunder:own_seconds_bucket{le=\"0.1\",model_name=\"a b\"} 4
thunder:own_seconds_bucket{le=\"0.2\",model_name=\"a b\"} 8
thunder:own_seconds_bucket{le=\"+Inf\",model_name=\"a b\"} 10
thunder:part_seconds_sum{model_name=\"m\",part=\"admit\"} 0
thunder:part_seconds_bucket{le=\"+Inf\",model_name=\"m\",part=\"admit\"} 3
thunder:part_seconds_sum{model_name=\"m\",part=\"record\"} 1
thunder:part_seconds_bucket{le=\"+Inf\",model_name=\"m\",part=\"record\"} 7
";

    #[test]
    fn quantiles_are_read_from_buckets() {
        let own = Histogram::read(TEXT, "thunder:own_seconds", None).expect("it is there");
        assert_eq!((own.count(), own.mean()), (10, 0.05));
        for (share, value) in [(0.2, 0.05), (0.4, 0.1), (0.6, 0.15), (0.99, 0.2)] {
            assert!((own.quantile(share) - value).abs() < 1e-9, "{share}: {}", own.quantile(share));
        }
        let part = |part| Histogram::read(TEXT, "thunder:part_seconds", Some(part));
        assert_eq!(
            (part("admit").expect("there").count(), part("record").expect("there").mean()),
            (3, 1.0 / 7.0)
        );
        assert!(part("prepare").is_err() && Histogram::read("", "x", None).is_err());
    }
}
