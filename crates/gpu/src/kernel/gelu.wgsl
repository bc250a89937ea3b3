// x * Φ(x), by Abramowitz and Stegun, 7.1.26.
fn gelu_of(x: f32) -> f32 {
    let size = abs(x) * 0.70710678;
    let t = 1.0 / (1.0 + 0.3275911 * size);
    let sum = t * (0.2548296 + t * (-0.28449672 + t * (1.4214138 + t * (-1.4531521 + t * 1.0614054))));
    return max(x, 0.0) - 0.5 * abs(x) * sum * exp(-size * size);
}
