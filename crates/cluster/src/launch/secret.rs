//! Random secrets, and hiding secrets in anything that is printed.

use serde::Serializer;

use super::LaunchError;

/// 256 random bits in hexadecimal.
pub(super) fn random_hex() -> Result<String, LaunchError> {
    let mut bytes = [0u8; 32];
    getrandom::fill(&mut bytes).map_err(|error| LaunchError::System {
        what: "get random bytes",
        why: std::io::Error::other(error),
    })?;
    Ok(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
}

/// The variables with the values of those that look like secrets replaced.
pub(super) fn masked(variables: &[(String, String)]) -> Vec<(String, String)> {
    const SECRET: [&str; 5] = ["SECRET", "TOKEN", "PASSWORD", "KEY", "CREDENTIAL"];
    let hide = |name: &str| SECRET.iter().any(|word| name.to_ascii_uppercase().contains(word));
    let value = |name: &str, value: &str| if hide(name) { "(hidden)".to_owned() } else { value.to_owned() };
    variables.iter().map(|(name, text)| (name.clone(), value(name, text))).collect()
}

/// [`masked`] for serde.
pub(super) fn serialize_masked<S: Serializer>(
    variables: &[(String, String)],
    serializer: S,
) -> Result<S::Ok, S::Error> {
    serializer.collect_map(masked(variables))
}
