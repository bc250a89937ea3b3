//! What encoders need for each row: LayerNorm with a bias, and activations without a gate.

/// The activation of a feed-forward without a gate.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Curve {
    /// `max(x, 0)²`.
    #[default]
    SquaredRelu,
    /// `max(x, 0)`.
    Relu,
    /// `x * Φ(x)`, where Φ is the normal distribution's cumulative function.
    Gelu,
    /// GELU's approximation by tanh.
    GeluTanh,
    /// `x / (1 + e^-x)`.
    Silu,
    /// `tanh(x)`.
    Tanh,
}

/// Coefficients of `erf(x) = 1 - (a1 t + … + a5 t⁵) e^(-x²)` with `t = 1 / (1 + ERF_STEP x)` for x
/// from 0 on; its error is at most 1.5e-7 (Abramowitz and Stegun, 7.1.26).
pub(crate) const ERF: [f32; 5] = [0.254_829_6, -0.284_496_72, 1.421_413_8, -1.453_152_1, 1.061_405_4];
/// See [`ERF`].
pub(crate) const ERF_STEP: f32 = 0.327_591_1;

impl Curve {
    /// The function by its definition.
    pub fn of(self, x: f32) -> f32 {
        match self {
            Self::SquaredRelu => x.max(0.0).powi(2),
            Self::Relu => x.max(0.0),
            Self::Gelu => {
                let size = x.abs() * std::f32::consts::FRAC_1_SQRT_2;
                let t = 1.0 / (1.0 + ERF_STEP * size);
                let sum = ERF.iter().rev().fold(0.0, |sum, factor| (sum + factor) * t);
                // The part of `x` that is subtracted, on both sides of zero.
                x.max(0.0) - 0.5 * x.abs() * sum * (-size * size).exp()
            }
            Self::GeluTanh => super::Activation::Gelu.of(x, 1.0),
            Self::Silu => x / (1.0 + (-x).exp()),
            Self::Tanh => x.tanh(),
        }
    }
}

/// LayerNorm of a vector: `(x - mean(x)) / sqrt(mean((x - mean(x))²) + eps) * weight + bias`.
#[derive(Debug, Clone, PartialEq)]
pub struct LayerNorm {
    /// One per column.
    pub weight: Vec<f32>,
    /// One per column.
    pub bias: Vec<f32>,
    /// Added to the mean of squares.
    pub eps: f32,
}

impl LayerNorm {
    /// Norms a row in place, by the definition.
    pub fn apply(&self, row: &mut [f32]) {
        let width = row.len() as f32;
        let mean = row.iter().sum::<f32>() / width;
        let squares: f32 = row.iter().map(|x| (x - mean).powi(2)).sum();
        let inverse = 1.0 / (squares / width + self.eps).sqrt();
        for ((x, weight), bias) in row.iter_mut().zip(&self.weight).zip(&self.bias) {
            *x = (*x - mean) * inverse * weight + bias;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn curves_have_the_values_of_tables() {
        // Of Φ(1) and Φ(-2), Abramowitz and Stegun, table 26.1.
        for (x, expected) in [(0.0, 0.0), (1.0, 0.841_344_7), (-2.0, -2.0 * 0.022_750_13), (9.0, 9.0)] {
            assert!((Curve::Gelu.of(x) - expected).abs() < 1e-6, "{x}: {}", Curve::Gelu.of(x));
        }
        assert!((Curve::GeluTanh.of(1.0) - 0.841_192).abs() < 1e-6);
        assert_eq!([Curve::Relu.of(-3.0), Curve::SquaredRelu.of(3.0)], [0.0, 9.0]);
    }

    #[test]
    fn a_layer_norm_takes_the_mean_off_first() {
        let norm = LayerNorm { weight: vec![1.0, 2.0], bias: vec![0.0, 10.0], eps: 0.0 };
        let mut row = [3.0, 5.0];
        norm.apply(&mut row);
        assert_eq!(row, [-1.0, 12.0]);
    }
}
