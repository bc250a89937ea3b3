//! Addresses to which secrets may be sent, and the encoding of text in them.

use std::fmt::Write as _;
use std::net::IpAddr;

use crate::error::SignInError;

/// Checks that data sent to an address cannot be read on the way: HTTPS, or this machine.
pub(crate) fn check(what: &'static str, address: &str) -> Result<(), SignInError> {
    let wrong = || SignInError::Address { what, address: address.chars().take(100).collect() };
    let is_text = address.bytes().all(|byte| byte.is_ascii_graphic()) && !address.contains(['#', '\\']);
    let host = |rest: &str| {
        let authority = rest.split(['/', '?']).next().unwrap_or_default();
        // A user name in the address could hide the host.
        (is_host_and_port(authority) && !authority.contains('@')).then(|| authority.to_owned())
    };
    if let Some(rest) = address.strip_prefix("https://") {
        return host(rest).filter(|_| is_text).map(drop).ok_or_else(wrong);
    }
    let authority = address.strip_prefix("http://").and_then(host).filter(|_| is_text).ok_or_else(wrong)?;
    if is_loopback(&authority) { Ok(()) } else { Err(wrong()) }
}

/// Whether a text is `HOST` or `HOST:PORT`.
fn is_host_and_port(authority: &str) -> bool {
    let (host, port) = match authority.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
        Some((host, rest)) => (host, rest),
        None => authority.split_at(authority.find(':').unwrap_or(authority.len())),
    };
    let is_port = |port: &str| port.parse::<u16>().is_ok_and(|port| port > 0);
    !host.is_empty() && (port.is_empty() || port.strip_prefix(':').is_some_and(is_port))
}

/// Whether `HOST` or `HOST:PORT` is this machine.
fn is_loopback(authority: &str) -> bool {
    let host = match authority.strip_prefix('[') {
        Some(rest) => rest.split(']').next().unwrap_or_default(),
        None => authority.split(':').next().unwrap_or_default(),
    };
    host == "localhost" || host.parse::<IpAddr>().is_ok_and(|ip| ip.is_loopback())
}

/// Encodes text as a value of a query or a form.
pub(crate) fn encode(text: &str) -> String {
    let mut encoded = String::with_capacity(text.len());
    for byte in text.bytes() {
        if byte.is_ascii_alphanumeric() || b"-._~".contains(&byte) {
            encoded.push(char::from(byte));
        } else {
            // Writing to a string cannot fail.
            let _ = write!(encoded, "%{byte:02X}");
        }
    }
    encoded
}

/// A query or a form of these fields.
pub(crate) fn fields(pairs: &[(&str, &str)]) -> String {
    let pairs: Vec<String> = pairs.iter().map(|(name, value)| format!("{name}={}", encode(value))).collect();
    pairs.join("&")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn secrets_go_to_https_or_to_this_machine_only() {
        for good in [
            "https://login.example.org",
            "https://a.example/x?y=1",
            "http://localhost:9000/a",
            "http://127.0.0.1:1/",
            "http://[::1]:1/",
        ] {
            assert_eq!(check("the issuer", good), Ok(()), "{good}");
        }
        for bad in [
            "",
            "login.example.org",
            "http://login.example.org",
            "http://127.0.0.1.example.org/",
            "http://localhost@evil.example/",
            "https://",
            "https:///path",
            "https://:443/",
            "https://a.example:/",
            "https://a.example:99999/",
            "https://a.example:port",
            "https://[::1]443/",
            "https://a@b/",
            "https://a b/",
            "https://a/#x",
            "javascript:alert(1)",
            "http://localhost\\@evil.example/",
        ] {
            assert!(check("the issuer", bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn values_are_encoded() {
        assert_eq!(fields(&[("a", "x y&z=ä"), ("b", "-._~")]), "a=x%20y%26z%3D%C3%A4&b=-._~");
    }
}
