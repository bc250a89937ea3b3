//! Which versions of the program work together.

/// Maximum length of a version.
const LONGEST_BYTES: usize = 64;

/// This program's version.
pub fn own() -> &'static str {
    env!("CARGO_PKG_VERSION")
}

/// Major and minor number of a version.
pub fn series(version: &str) -> Option<(u64, u64)> {
    let mut numbers = version.get(..version.len().min(LONGEST_BYTES))?.split('.');
    let mut number = || numbers.next()?.parse().ok();
    Some((number()?, number()?))
}

/// Whether nodes of two versions form one cluster: their major numbers are equal, and their minor
/// numbers differ by at most one. Nodes without a version precede the first version that reports
/// one, and work with it.
pub fn work_together(one: &str, other: &str) -> bool {
    if one.is_empty() || other.is_empty() {
        return true;
    }
    match (series(one), series(other)) {
        (Some((major, minor)), Some((other_major, other_minor))) => {
            major == other_major && minor.abs_diff(other_minor) <= 1
        }
        _ => false,
    }
}

/// Why a node of another version is refused, for people.
pub fn refusal(theirs: &str, ours: &str) -> String {
    let theirs: String = theirs.chars().filter(|letter| !letter.is_control()).take(LONGEST_BYTES).collect();
    format!(
        "version {theirs} and version {ours} do not work together: nodes of a cluster may differ by one minor version; \
         update the older one"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbouring_minor_versions_work_together() {
        for (one, other, work) in [
            ("0.3.0", "0.3.9", true),
            ("0.3.0", "0.4.1", true),
            ("0.4.0", "0.3.0-rc.1", true),
            ("0.3.0", "0.5.0", false),
            ("1.0.0", "0.1.0", false),
            ("1.0.0", "2.0.0", false),
            ("", "0.1.0", true),
            ("0.1.0", "x", false),
            ("0.1.0", "99999999999999999999.1", false),
        ] {
            assert_eq!((work_together(one, other), work_together(other, one)), (work, work), "{one} {other}");
        }
        assert!(refusal("0.9.0\u{1b}[2J", "0.1.0").starts_with("version 0.9.0[2J and"));
        assert!(series(&"é".repeat(50)).is_none());
    }
}
