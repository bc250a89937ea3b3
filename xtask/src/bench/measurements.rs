//! The models, threads and sizes to measure.

use super::Args;
use super::report::Model;

/// The measurements and their duration.
pub struct Measurements {
    /// Shape and bits; the last one is also measured in batches and on several ranks.
    pub models: Vec<Model>,
    pub threads: Vec<usize>,
    pub rounds: usize,
    pub decode_tokens: usize,
    pub prompt_tokens: usize,
    pub batches: &'static str,
    pub message_bytes: &'static [u64],
    pub message_ms: u64,
}

impl Measurements {
    pub fn new(args: &Args, cores: usize) -> Self {
        let model = |shape: &str, bits| Model { shape: shape.into(), bits };
        let mut threads = vec![1];
        if args.quick {
            return Self {
                models: vec![model("qwen3-tiny", 4)],
                threads,
                rounds: 1,
                decode_tokens: 8,
                prompt_tokens: 32,
                batches: "1,2",
                message_bytes: &[8, 65536],
                message_ms: 5,
            };
        }
        if cores > 1 {
            threads.push(cores.min(8));
        }
        Self {
            models: vec![
                model("qwen3-0.6b", 4),
                model("qwen3-0.6b", 8),
                model("llama-1b", 8),
                model("llama-1b", 4),
            ],
            threads,
            rounds: args.rounds.into(),
            decode_tokens: 48,
            prompt_tokens: 512,
            batches: "1,2,4,8",
            message_bytes: &[8, 1024, 8192, 65536, 1 << 20, 16 << 20],
            message_ms: 100,
        }
    }

    /// Decoding reads the weights at any number of bits; prompts are measured at 4 only.
    pub fn prefill_models(&self) -> impl Iterator<Item = &Model> {
        self.models.iter().filter(|model| model.bits == 4)
    }

    pub fn ranks_model(&self) -> &Model {
        &self.models[self.models.len() - 1]
    }
}
