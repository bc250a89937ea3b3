//! The options for API keys, shared by `thunder serve` and `thunder up`.

use clap::Args;

#[derive(Args)]
pub struct KeyArgs {
    /// Key that clients must send as `Authorization: Bearer KEY` or `x-api-key`; may be repeated
    ///
    /// Use THUNDER_API_KEY to keep the key out of the process list.
    #[arg(
        long = "api-key",
        value_name = "KEY",
        env = "THUNDER_API_KEY",
        value_delimiter = ',',
        hide_env_values = true
    )]
    pub api_keys: Vec<String>,
}
