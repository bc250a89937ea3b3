//! From a JSON body to checked options and messages.

pub(crate) mod fields;
pub(crate) mod json;
pub(crate) mod messages;
pub(crate) mod options;
pub(crate) mod path;
pub(crate) mod prompts;
pub(crate) mod tools;
