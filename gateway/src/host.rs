//! The host of a request: `Host` and `:authority` (RFC 9112, 3.2; RFC 9113, 8.3.1).

use std::fmt::Write as _;
use std::net::Ipv6Addr;

use axum::http::Version;
use axum::http::header::{self, HeaderMap};
use axum::http::uri::{Authority, Uri};

/// The authority of a request, in its normal form; `None` for one of HTTP/1.0 without any.
///
/// # Errors
///
/// If there is none, more than one, or one that is not an authority.
pub(crate) fn authority(
    uri: &Uri,
    headers: &HeaderMap,
    version: Version,
) -> Result<Option<Authority>, &'static str> {
    let mut hosts = headers.get_all(header::HOST).iter();
    let host = hosts.next();
    if hosts.next().is_some() {
        return Err("more than one Host");
    }
    let host = host.map(|host| checked(host.to_str().ok()?.parse().ok()?));
    let host = match host {
        Some(None) => return Err("Host: not a host, or a host and a port"),
        Some(Some(host)) => Some(host),
        None => None,
    };
    let target = match uri.authority().cloned().map(checked) {
        Some(None) => return Err("the target's authority is not a host, or a host and a port"),
        Some(Some(target)) => Some(target),
        None => None,
    };
    match (version, target, host) {
        (Version::HTTP_2, Some(target), Some(host)) if target != host => {
            Err("Host and :authority differ")
        }
        (Version::HTTP_2, None, None) => Err("neither Host nor :authority"),
        // In absolute form the target takes precedence, but a Host is still required.
        (Version::HTTP_11, _, None) => Err("no Host"),
        (_, target, host) => Ok(target.or(host)),
    }
}

/// A host in its normal form, as rules see it: without a port, which clients can make up.
pub(crate) fn is_name(text: &str) -> bool {
    text.parse().ok().and_then(checked).is_some_and(|authority| authority.host() == text)
}

/// Without user information, and in its normal form (RFC 3986, 6.2.2.1 and 6.2.3): one host has one spelling. The dot at
/// the end of a name is left out, too.
fn checked(authority: Authority) -> Option<Authority> {
    let text = authority.as_str();
    let host = authority.host();
    let port = match text.strip_prefix(host)? {
        "" | ":" => None,
        port => Some(port.strip_prefix(':').filter(|port| is_digits(port))?.parse::<u16>().ok()?),
    };
    let mut normal = match host.strip_prefix('[').and_then(|host| host.strip_suffix(']')) {
        Some(address) => format!("[{}]", address.parse::<Ipv6Addr>().ok()?),
        None => host.strip_suffix('.').unwrap_or(host).to_ascii_lowercase(),
    };
    if normal.split('.').any(str::is_empty) {
        return None;
    }
    if let Some(port) = port {
        let _ = write!(normal, ":{port}");
    }
    if normal == text { Some(authority) } else { normal.parse().ok() }
}

fn is_digits(text: &str) -> bool {
    text.bytes().all(|byte| byte.is_ascii_digit())
}
