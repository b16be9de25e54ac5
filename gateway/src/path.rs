//! Paths in their normal form (RFC 3986, 6.2.2).
//!
//! Rules match the normal form, and the upstream receives it, so no spelling of a path gets around a
//! rule and still reaches the resource.

use std::borrow::Cow;

use axum::http::Uri;
use axum::http::uri::PathAndQuery;
use percent_encoding::{AsciiSet, CONTROLS, percent_encode_byte, utf8_percent_encode};

/// Characters that a path must encode (RFC 3986, 3.3), in addition to `%` and non-ASCII.
const ENCODED: &AsciiSet = &CONTROLS
    .add(b' ')
    .add(b'"')
    .add(b'#')
    .add(b'<')
    .add(b'>')
    .add(b'?')
    .add(b'[')
    .add(b'\\')
    .add(b']')
    .add(b'^')
    .add(b'`')
    .add(b'{')
    .add(b'|')
    .add(b'}');

/// A `%` in the path is not followed by two hex digits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BadPath;

/// Normalizes percent-encoding, and removes empty segments, `.` and `..`.
///
/// # Errors
///
/// If a `%` is not followed by two hex digits.
pub(crate) fn normalize(path: &str) -> Result<Cow<'_, str>, BadPath> {
    if is_normal(path) {
        return Ok(Cow::Borrowed(path));
    }
    let written = respell(path)?;
    let mut segments: Vec<&str> = Vec::new();
    let mut ends_open = true;
    for segment in written.split('/') {
        ends_open = matches!(segment, "" | "." | "..");
        match segment {
            "" | "." => {}
            ".." => drop(segments.pop()),
            segment => segments.push(segment),
        }
    }
    let mut normal = String::with_capacity(written.len() + 1);
    for segment in &segments {
        normal.push('/');
        normal.push_str(segment);
    }
    if ends_open {
        normal.push('/');
    }
    Ok(Cow::Owned(normal))
}

/// The same URI with another path.
pub(crate) fn with_path(uri: &Uri, path: &str) -> Option<Uri> {
    let path_and_query = match uri.query() {
        Some(query) => format!("{path}?{query}"),
        None => path.to_owned(),
    };
    let mut parts = uri.clone().into_parts();
    parts.path_and_query = Some(PathAndQuery::try_from(path_and_query).ok()?);
    Uri::from_parts(parts).ok()
}

/// Whether the path is normal already, as most are.
fn is_normal(path: &str) -> bool {
    let rest = path.strip_prefix('/');
    let plain = |byte: u8| byte.is_ascii_graphic() && byte != b'%';
    rest.is_some_and(|rest| {
        rest.bytes().all(plain) && utf8_percent_encode(rest, ENCODED).count() <= 1 && {
            let mut segments = rest.split('/').peekable();
            loop {
                match (segments.next(), segments.peek().is_some()) {
                    (Some("." | ".."), _) | (Some(""), true) => break false,
                    (Some(_), true) => {}
                    (Some(_) | None, false) | (None, true) => break true,
                }
            }
        }
    })
}

/// Decodes unreserved characters, and encodes all others that need it as upper-case `%XX`. An encoded
/// `/` stays encoded: it is part of a segment.
fn respell(path: &str) -> Result<String, BadPath> {
    let mut written = String::with_capacity(path.len() + 8);
    let mut rest = path;
    while let Some(at) = rest.find('%') {
        written.extend(utf8_percent_encode(&rest[..at], ENCODED));
        let digits = rest.get(at + 1..at + 3).ok_or(BadPath)?;
        if !digits.bytes().all(|digit| digit.is_ascii_hexdigit()) {
            return Err(BadPath);
        }
        let byte = u8::from_str_radix(digits, 16).map_err(|_| BadPath)?;
        if byte.is_ascii_alphanumeric() || b"-._~".contains(&byte) {
            written.push(char::from(byte));
        } else {
            written.push_str(percent_encode_byte(byte));
        }
        rest = &rest[at + 3..];
    }
    written.extend(utf8_percent_encode(rest, ENCODED));
    Ok(written)
}

#[cfg(test)]
mod tests {
    use super::{BadPath, normalize};

    #[test]
    fn one_resource_has_one_spelling() {
        for (path, normal) in [
            ("/", "/"),
            ("", "/"),
            ("/v1/chat", "/v1/chat"),
            ("/v1/chat/", "/v1/chat/"),
            ("/v1/%63hat", "/v1/chat"),
            ("//v1///chat", "/v1/chat"),
            ("/./v1/./chat/.", "/v1/chat/"),
            ("/x/../v1/y/../chat", "/v1/chat"),
            ("/x/%2e%2E/v1/chat/..", "/v1/"),
            ("/../../v1", "/v1"),
            ("/a%2fb", "/a%2Fb"),
            ("/a%2f..%2fb", "/a%2F..%2Fb"),
            ("/a\\b|c", "/a%5Cb%7Cc"),
            ("/ä", "/%C3%A4"),
            ("/a;b=1,c:d@e!$&'()*+=", "/a;b=1,c:d@e!$&'()*+="),
            ("/%7e%00", "/~%00"),
        ] {
            assert_eq!(normalize(path).as_deref(), Ok(normal), "{path}");
            assert_eq!(normalize(normal).as_deref(), Ok(normal), "{normal} again");
        }
        for path in ["/%", "/%6", "/%zz", "/%+1", "/a%2"] {
            assert_eq!(normalize(path), Err(BadPath), "{path}");
        }
    }
}
