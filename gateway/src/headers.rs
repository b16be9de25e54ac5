//! The header fields that are forwarded, and how they are changed.

use axum::http::header::{self, Entry, HeaderMap, HeaderName, HeaderValue};
use axum::http::{StatusCode, Version};

/// Hop-by-hop fields, in addition to those that `Connection` names (RFC 9110, 7.6.1).
///
/// `Trailer` is not one of them: trailers may be forwarded only with it.
static HOP_BY_HOP: [HeaderName; 6] = [
    header::CONNECTION,
    HeaderName::from_static("keep-alive"),
    HeaderName::from_static("proxy-connection"),
    header::TE,
    header::TRANSFER_ENCODING,
    header::UPGRADE,
];

/// Fields that `Connection` cannot remove, in addition to those that rules read: a client must not be able
/// to remove its authentication, or what proxies say about it.
static END_TO_END: [HeaderName; 13] = [
    header::AUTHORIZATION,
    header::PROXY_AUTHORIZATION,
    header::COOKIE,
    header::SET_COOKIE,
    header::HOST,
    header::CONTENT_LENGTH,
    header::CONTENT_TYPE,
    header::CONTENT_ENCODING,
    header::VIA,
    header::FORWARDED,
    HeaderName::from_static("x-forwarded-for"),
    HeaderName::from_static("x-forwarded-host"),
    HeaderName::from_static("x-forwarded-proto"),
];

/// Fields of a request. For HTTP/1 hyper has the same bound. That of HTTP/2 is one of bytes, and a field that repeats
/// another is a byte on the wire and a hundred in memory.
const FIELDS: usize = 100;

/// Members of `Connection` that are read. A request with more is rejected.
const MEMBERS: usize = 100;

/// Removes hop-by-hop fields; `read` are the fields that rules read.
pub(crate) fn end_to_end(mut headers: HeaderMap, read: &[HeaderName]) -> HeaderMap {
    let named: Vec<_> = tokens(&headers, &header::CONNECTION)
        .take(MEMBERS)
        .filter_map(|name| HeaderName::from_bytes(name).ok())
        .filter(|name| !END_TO_END.contains(name) && !read.contains(name))
        .collect();
    for name in named.iter().chain(&HOP_BY_HOP) {
        headers.remove(name);
    }
    headers
}

/// Removes fields whose names CGI, WSGI and similar interfaces take for that of a field that rules read or that proxies
/// set: there `X_Tenant` is `X-Tenant`.
pub(crate) fn strip_lookalikes(headers: &mut HeaderMap, read: &[HeaderName]) {
    let standard = || HOP_BY_HOP.iter().chain(&END_TO_END);
    let lookalikes: Vec<_> = headers
        .keys()
        .filter(|name| standard().chain(read).any(|real| is_lookalike(name, real)))
        // A rule that reads `content_length` does not remove the length.
        .filter(|name| !standard().any(|real| real == *name))
        .cloned()
        .collect();
    for name in lookalikes {
        headers.remove(name);
    }
}

/// Whether two names differ, but only in characters that are neither letters nor digits.
pub(crate) fn is_lookalike(name: &HeaderName, real: &HeaderName) -> bool {
    let (one, other) = (name.as_str().as_bytes(), real.as_str().as_bytes());
    let is_same =
        |(a, b): (&u8, &u8)| a == b || !(a.is_ascii_alphanumeric() || b.is_ascii_alphanumeric());
    name != real && one.len() == other.len() && one.iter().zip(other).all(is_same)
}

/// Removes trailers that may not be any (RFC 9110, 6.5.1), or that an upstream that merges them with the header would
/// take for what rules read or proxies set.
pub(crate) fn strip_trailers(trailers: &mut HeaderMap, read: &[HeaderName]) {
    strip_lookalikes(trailers, read);
    for name in HOP_BY_HOP.iter().chain(&END_TO_END).chain(read) {
        trailers.remove(name);
    }
}

/// Whether the sender waits for 100 (Continue) before it sends the body.
pub(crate) fn expects_continue(headers: &HeaderMap) -> bool {
    tokens(headers, &header::EXPECT).any(|what| what.eq_ignore_ascii_case(b"100-continue"))
}

/// Whether the sender accepts trailers.
pub(crate) fn takes_trailers(headers: &HeaderMap) -> bool {
    tokens(headers, &header::TE).any(|te| te.eq_ignore_ascii_case(b"trailers"))
}

/// The protocol that an HTTP/1.1 message asks to upgrade to. HTTP/2 is excluded, because requests inside that
/// tunnel would bypass the rules, and so is everything that is not the name of a protocol.
pub(crate) fn upgrade(headers: &HeaderMap) -> Option<HeaderValue> {
    let mut options = tokens(headers, &header::CONNECTION);
    if !options.any(|option| option.eq_ignore_ascii_case(b"upgrade")) {
        return None;
    }
    let mut protocols = tokens(headers, &header::UPGRADE);
    let is_refused = |protocol: &[u8]| {
        let protocol = protocol.to_ascii_lowercase();
        protocol.starts_with(b"h2")
            || protocol.starts_with(b"http/")
            || !protocol.iter().all(u8::is_ascii_graphic)
    };
    if protocols.any(is_refused) {
        return None;
    }
    headers.get(header::UPGRADE).cloned()
}

/// Joins several `Cookie` fields into one (RFC 9113, 8.2.3).
pub(crate) fn join_cookies(headers: &mut HeaderMap) {
    let Entry::Occupied(entry) = headers.entry(header::COOKIE) else { return };
    if entry.iter().nth(1).is_none() {
        return;
    }
    let crumbs: Vec<_> = entry.iter().map(HeaderValue::as_bytes).collect();
    if let Ok(cookies) = HeaderValue::from_bytes(&crumbs.join(&b"; "[..])) {
        headers.insert(header::COOKIE, cookies);
    }
}

/// Appends to `Via` the version of a request, and the name of this gateway.
pub(crate) fn add_via(headers: &mut HeaderMap, version: Version, name: &str) {
    let version = match version {
        Version::HTTP_09 => "0.9",
        Version::HTTP_10 => "1.0",
        Version::HTTP_2 => "2.0",
        Version::HTTP_3 => "3.0",
        _ => "1.1",
    };
    if let Ok(via) = HeaderValue::try_from(format!("{version} {name}")) {
        headers.append(header::VIA, via);
    }
}

/// Whether there are several fields of this name.
pub(crate) fn has_several(headers: &HeaderMap, name: &HeaderName) -> bool {
    headers.get_all(name).iter().nth(1).is_some()
}

/// The error for fields that two servers could interpret differently, or that cost too much to interpret.
pub(crate) fn ambiguous(headers: &HeaderMap) -> Option<(StatusCode, &'static str)> {
    let has = |name| headers.contains_key(name);
    if headers.len() > FIELDS {
        let what = "more than 100 header fields";
        return Some((StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE, what));
    }
    if has_several(headers, &header::CONTENT_LENGTH) {
        return Some((StatusCode::BAD_REQUEST, "more than one Content-Length"));
    }
    if has(header::CONTENT_LENGTH) && has(header::TRANSFER_ENCODING) {
        return Some((StatusCode::BAD_REQUEST, "both Content-Length and Transfer-Encoding"));
    }
    if tokens(headers, &header::CONNECTION).nth(MEMBERS).is_some() {
        return Some((StatusCode::BAD_REQUEST, "Connection has more than 100 members"));
    }
    if !is_chunked_alone(headers) {
        let what = "Transfer-Encoding: only chunked is supported, once";
        return Some((StatusCode::NOT_IMPLEMENTED, what));
    }
    None
}

/// Whether `Transfer-Encoding`, if there is one, says `chunked` and nothing else.
pub(crate) fn is_chunked_alone(headers: &HeaderMap) -> bool {
    let mut codings = tokens(headers, &header::TRANSFER_ENCODING);
    let is_chunked = codings.next().is_none_or(|coding| coding.eq_ignore_ascii_case(b"chunked"));
    is_chunked && codings.next().is_none()
}

/// Whether a response has two lengths.
pub(crate) fn has_two_lengths(headers: &HeaderMap) -> bool {
    headers.contains_key(header::TRANSFER_ENCODING) && headers.contains_key(header::CONTENT_LENGTH)
}

/// The members of a list. A byte beyond ASCII hides no other member.
fn tokens<'a>(headers: &'a HeaderMap, name: &HeaderName) -> impl Iterator<Item = &'a [u8]> {
    let lines = headers.get_all(name).into_iter().map(HeaderValue::as_bytes);
    lines.flat_map(|line| line.split(|byte| *byte == b',')).map(<[u8]>::trim_ascii)
}
