//! The host of a request: `Host` and `:authority` (RFC 9112, 3.2; RFC 9113, 8.3.1).

use axum::http::Version;
use axum::http::header::{self, HeaderMap};
use axum::http::uri::{Authority, Uri};

/// The authority of a request, in lower case and without an empty port; `None` for one of HTTP/1.0 without any.
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

/// Without user information, not empty, and in its normal form (RFC 3986, 6.2.2.1 and 6.2.3): one host has one spelling.
fn checked(authority: Authority) -> Option<Authority> {
    let text = authority.as_str();
    let port = text.rsplit_once(':').filter(|(_, port)| !port.ends_with(']'));
    let is_port = port.is_none_or(|(_, port)| port.is_empty() || port.parse::<u16>().is_ok());
    if authority.host().is_empty() || text.contains('@') || !is_port {
        return None;
    }
    let is_normal = !text.ends_with(':') && !text.bytes().any(|byte| byte.is_ascii_uppercase());
    if is_normal {
        return Some(authority);
    }
    text.strip_suffix(':').unwrap_or(text).to_ascii_lowercase().parse().ok()
}
