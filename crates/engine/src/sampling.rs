//! How a request's tokens are chosen.

/// How a token is chosen from the logits. Applied in this order: penalties and bias, temperature,
/// top-k, top-p, min-p.
#[derive(Debug, Clone, PartialEq)]
pub struct Sampling {
    /// 0 is greedy; above 0, logits are divided by it.
    pub temperature: f32,
    /// Keep the smallest set of tokens whose probabilities sum to at least this. 1 keeps all.
    pub top_p: f32,
    /// Keep the `top_k` most probable tokens. 0 keeps all.
    pub top_k: usize,
    /// Keep tokens with at least this fraction of the highest probability. 0 keeps all.
    pub min_p: f32,
    /// Divide positive logits (multiply negative ones) of tokens in the prompt or answer. 1 is off.
    pub repetition_penalty: f32,
    /// Subtracted once from the logits of tokens in the answer. 0 is off.
    pub presence_penalty: f32,
    /// Subtracted from a token's logit for each time that the token is in the answer. 0 is off.
    pub frequency_penalty: f32,
    /// Added to the logits of these tokens.
    pub logit_bias: Vec<(u32, f32)>,
    /// The same seed and request give the same text, whatever else is running. `None` chooses a
    /// seed.
    pub seed: Option<u64>,
}

impl Default for Sampling {
    fn default() -> Self {
        Self {
            temperature: 0.0,
            top_p: 1.0,
            top_k: 0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            logit_bias: Vec::new(),
            seed: None,
        }
    }
}
