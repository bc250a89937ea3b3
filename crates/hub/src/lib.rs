//! Finds a model by path or name, in the local Hugging Face cache or by downloading it.
