//! The number of routed experts that a step reads.

/// The share of a layer's `experts` that none of `rows` tokens takes, on average: each token takes
/// `chosen` of them, independently of the others. 0 for a layer without experts.
///
/// ```
/// # use thunder_cost::idle_experts;
/// assert_eq!(idle_experts(128.0, 8.0, 0.0), 1.0);
/// assert_eq!(idle_experts(128.0, 8.0, 1.0), 15.0 / 16.0);
/// assert_eq!(idle_experts(4.0, 2.0, 3.0), 1.0 / 8.0);
/// assert_eq!(idle_experts(4.0, 4.0, 1.0), 0.0);
/// ```
pub fn idle_experts(experts: f64, chosen: f64, rows: f64) -> f64 {
    if experts <= 0.0 {
        return 0.0;
    }
    (1.0 - chosen / experts).clamp(0.0, 1.0).powf(rows)
}
