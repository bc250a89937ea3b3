//! URLs: origin, redirect target, escaping.

use ureq::http::Uri;

/// Scheme, and host with port, in lower case. The token is sent to the hub's own origin only.
pub(crate) fn origin(url: &str) -> Option<(String, String)> {
    let uri: Uri = url.parse().ok()?;
    let scheme = uri.scheme_str()?.to_ascii_lowercase();
    Some((scheme, uri.authority()?.as_str().to_ascii_lowercase()))
}

/// The absolute target of a redirect; `None` unless it is HTTP or HTTPS.
pub(crate) fn resolve(base: &str, location: &str) -> Option<String> {
    if location.starts_with("http://") || location.starts_with("https://") {
        return Some(location.to_owned());
    }
    let (scheme, authority) = origin(base)?;
    if let Some(rest) = location.strip_prefix("//") {
        return Some(format!("{scheme}://{rest}"));
    }
    location.starts_with('/').then(|| format!("{scheme}://{authority}{location}"))
}

/// Percent-encodes a URL path. Keep slashes in a file's path; encode them in a revision's name.
pub(crate) fn escape(text: &str, keep_slashes: bool) -> String {
    let mut out = String::with_capacity(text.len());
    for byte in text.bytes() {
        let plain = byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.' | b'~');
        if plain || (keep_slashes && byte == b'/') {
            out.push(char::from(byte));
        } else {
            out += &format!("%{byte:02X}");
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn redirects_are_resolved_against_the_origin() {
        let base = "https://Hub.example:8443/a/b";
        assert_eq!(resolve(base, "/c?d").as_deref(), Some("https://hub.example:8443/c?d"));
        assert_eq!(resolve(base, "//cdn.example/x").as_deref(), Some("https://cdn.example/x"));
        assert_eq!(resolve(base, "http://x/y").as_deref(), Some("http://x/y"));
        assert_eq!(resolve(base, "file:///etc/passwd"), None);
        assert_ne!(origin("https://hub.example/a"), origin("http://hub.example/a"));
        assert_ne!(origin("https://hub.example/a"), origin("https://hub.example.evil/a"));
    }

    #[test]
    fn names_are_percent_encoded() {
        assert_eq!(escape("a b/ü#?.json", true), "a%20b/%C3%BC%23%3F.json");
        assert_eq!(escape("refs/pr/1", false), "refs%2Fpr%2F1");
    }
}
