//! Bodies in OpenAI's form.

pub(crate) mod envelope;
pub(crate) mod logprobs;
