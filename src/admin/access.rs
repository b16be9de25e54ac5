//! Access to the page: allowed hosts, the token, and the header that changes need.

use std::net::IpAddr;
use std::sync::Arc;

use axum::extract::{Request, State};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use headers::authorization::{Authorization, Basic, Bearer};
use headers::{HeaderMap, HeaderMapExt};
use http::header::{
    CACHE_CONTROL, CONTENT_SECURITY_POLICY, HOST, REFERRER_POLICY, WWW_AUTHENTICATE,
    X_CONTENT_TYPE_OPTIONS, X_FRAME_OPTIONS,
};
use http::uri::Authority;
use http::{HeaderName, HeaderValue, StatusCode};
use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;

use super::problem::Problem;
use crate::error::ConfigError;

/// The header that every request that changes something must have.
const MARK: HeaderName = HeaderName::from_static("x-semaphore-admin");

/// Lets a browser load the page's own script and style and send requests to the page, and nothing else.
const POLICY: HeaderValue = HeaderValue::from_static(
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; base-uri 'none'; \
     form-action 'none'; frame-ancestors 'none'",
);

/// How a browser or a program is told to send the token.
const CHALLENGES: [HeaderValue; 2] = [
    HeaderValue::from_static("Basic realm=\"semaphores\", charset=\"UTF-8\""),
    HeaderValue::from_static("Bearer realm=\"semaphores\""),
];

#[derive(Debug, Default)]
pub(super) struct Access {
    pub(super) hosts: Hosts,
    pub(super) token: Option<Token>,
}

/// The hosts that a request may name, in addition to those of loopback. This prevents DNS rebinding: a site can point
/// its own name at this server, but its pages cannot send a `Host` that is not the site's own.
#[derive(Debug, Default)]
pub(super) struct Hosts {
    names: Vec<String>,
    addresses: Vec<IpAddr>,
    every_address: bool,
}

impl Hosts {
    pub(super) fn allow(&mut self, host: &str) -> Result<(), ConfigError> {
        let bare = host.trim_start_matches('[').trim_end_matches(']');
        if let Ok(address) = bare.parse() {
            self.allow_address(address);
            return Ok(());
        }
        let authority = host.parse::<Authority>().ok().filter(|parsed| parsed.host() == host);
        if authority.is_none() || host.starts_with('[') {
            return Err(ConfigError::new(format!(
                "host is {host:?}; expected a name or an IP address, without a port"
            )));
        }
        self.names.push(plain(host).to_ascii_lowercase());
        Ok(())
    }

    /// An unspecified address stands for every IP address. Names are not among them, so rebinding stays impossible.
    pub(super) fn allow_address(&mut self, address: IpAddr) {
        self.every_address |= address.is_unspecified();
        self.addresses.push(address.to_canonical());
    }

    fn allows(&self, host: &str) -> bool {
        let bare = host.trim_start_matches('[').trim_end_matches(']');
        if let Ok(address) = bare.parse::<IpAddr>() {
            let address = address.to_canonical();
            return self.every_address
                || address.is_loopback()
                || self.addresses.contains(&address);
        }
        let name = plain(host).to_ascii_lowercase();
        name == "localhost" || name.ends_with(".localhost") || self.names.contains(&name)
    }

    /// Checks every host that a request names, in its target and in its header.
    fn check(&self, request: &Request) -> Result<(), Problem> {
        let target = request.uri().authority().map(Authority::host).map(ToOwned::to_owned);
        let named = request.headers().get_all(HOST).iter().map(|value| {
            let authority = value.to_str().ok()?.parse::<Authority>().ok()?;
            Some(authority.host().to_owned())
        });
        let mut hosts = target.map(Some).into_iter().chain(named).peekable();
        let refused = match hosts.peek() {
            None => Some(None),
            Some(_) => hosts.find(|host| !host.as_deref().is_some_and(|host| self.allows(host))),
        };
        let Some(host) = refused else { return Ok(()) };
        let host =
            host.map_or_else(|| "missing or malformed".to_owned(), |host| format!("{host:?}"));
        // The response does not list the allowed names: a page of another site may read it.
        tracing::debug!(
            target: "tower_semaphore",
            host,
            names = ?self.names,
            addresses = ?self.addresses,
            "rejected a request to the operator's page: its host is not allowed"
        );
        let detail = format!(
            "host is {host}; expected localhost, a loopback address, or a host that this server is configured \
             to allow"
        );
        Err(Problem::new(StatusCode::FORBIDDEN, detail))
    }
}

/// Strips the dot that a fully qualified name may end with.
fn plain(host: &str) -> &str {
    host.strip_suffix('.').unwrap_or(host)
}

/// The token as a hash, so that a comparison does not reveal its length.
pub(super) struct Token([u8; 32]);

impl Token {
    const LENGTH: std::ops::RangeInclusive<usize> = 16..=256;

    pub(super) fn new(token: &str) -> Result<Self, ConfigError> {
        match Self::fault_of(token) {
            None => Ok(Self(Sha256::digest(token).into())),
            Some(fault) => Err(ConfigError::new(format!(
                "token {fault}; expected 16 to 256 of A-Z a-z 0-9 - . _ ~ + / ="
            ))),
        }
    }

    /// Returns what is wrong with a token. An invalid value may still be a secret, so that does not show it.
    fn fault_of(token: &str) -> Option<String> {
        // The characters of a bearer token (RFC 6750).
        let known = |c: u8| c.is_ascii_alphanumeric() || b"-._~+/=".contains(&c);
        let length = token.len();
        if let Some((at, byte)) = token.bytes().enumerate().find(|(_, byte)| !known(*byte)) {
            let what = match byte {
                _ if byte.is_ascii_whitespace() => "is white space",
                _ if !byte.is_ascii() => "is not ASCII",
                _ => "is none of these",
            };
            return Some(format!("cannot be used: byte {} of {length} {what}", at + 1));
        }
        match length {
            0 => Some("is empty".to_owned()),
            _ if length < *Self::LENGTH.start() => {
                Some(format!("is too short: it has {length} bytes"))
            }
            _ if length > *Self::LENGTH.end() => {
                Some(format!("is too long: it has {length} bytes"))
            }
            _ => None,
        }
    }

    fn check(&self, headers: &HeaderMap) -> Result<(), Problem> {
        let bearer = headers.typed_get::<Authorization<Bearer>>();
        let basic = headers.typed_get::<Authorization<Basic>>();
        let shown = bearer.as_ref().map(|it| it.token());
        let shown = shown.or_else(|| basic.as_ref().map(|it| it.password()));
        if shown.is_some_and(|shown| self.is(shown)) {
            return Ok(());
        }
        let detail = "token is missing or wrong; send it as `Authorization: Bearer TOKEN`, or as the password of any user";
        Err(Problem::new(StatusCode::UNAUTHORIZED, detail))
    }

    fn is(&self, shown: &str) -> bool {
        Sha256::digest(shown).as_slice().ct_eq(&self.0).into()
    }
}

impl std::fmt::Debug for Token {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Token").finish_non_exhaustive()
    }
}

/// Rejects requests that another site can make a browser send, and adds the security headers.
pub(super) async fn guard(
    State(access): State<Arc<Access>>,
    request: Request,
    next: Next,
) -> Response {
    let mut response = match access.check(&request) {
        Ok(()) => next.run(request).await,
        Err(problem) => problem.into_response(),
    };
    let is_unauthorized = response.status() == StatusCode::UNAUTHORIZED;
    let headers = response.headers_mut();
    if is_unauthorized {
        CHALLENGES.into_iter().for_each(|challenge| {
            headers.append(WWW_AUTHENTICATE, challenge);
        });
    }
    headers.insert(CONTENT_SECURITY_POLICY, POLICY);
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    headers.insert(X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    headers.insert(X_FRAME_OPTIONS, HeaderValue::from_static("DENY"));
    headers.insert(REFERRER_POLICY, HeaderValue::from_static("no-referrer"));
    response
}

impl Access {
    fn check(&self, request: &Request) -> Result<(), Problem> {
        self.hosts.check(request)?;
        if let Some(token) = &self.token {
            token.check(request.headers())?;
        }
        if request.method().is_safe() || request.headers().contains_key(&MARK) {
            return Ok(());
        }
        let detail = format!("a request that changes something needs the header {MARK}");
        Err(Problem::new(StatusCode::FORBIDDEN, detail))
    }
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;

    use super::{Hosts, Token};

    #[test]
    fn hosts_of_loopback_and_those_that_are_named_are_allowed() {
        let mut hosts = Hosts::default();
        for host in ["localhost", "LOCALHOST.", "a.localhost", "127.0.0.1", "127.9.9.9", "[::1]"] {
            assert!(hosts.allows(host), "{host}");
        }
        for host in ["", "localhost.evil.example", "evil.example", "10.0.0.1", "[::2]", "0.0.0.0"] {
            assert!(!hosts.allows(host), "{host}");
        }
        hosts.allow("Ops.Example").unwrap();
        hosts.allow("[fd00::1]").unwrap();
        hosts.allow_address(IpAddr::from([10, 0, 0, 1]));
        for host in ["ops.example", "OPS.example.", "[fd00::1]", "10.0.0.1", "[::ffff:10.0.0.1]"] {
            assert!(hosts.allows(host), "{host}");
        }
        assert!(!hosts.allows("x.ops.example") && !hosts.allows("10.0.0.2"));
        hosts.allow_address(IpAddr::from([0, 0, 0, 0]));
        assert!(hosts.allows("10.0.0.2") && !hosts.allows("evil.example"));
    }

    #[test]
    fn what_is_no_host_is_named() {
        for host in ["", "a b", "ops.example:80", "http://ops.example", "u@ops.example", "[x]"] {
            let error = Hosts::default().allow(host).unwrap_err().to_string();
            assert!(error.contains(&format!("{host:?}")) && error.contains("expected"), "{error}");
        }
    }

    #[test]
    fn a_token_is_not_shown() {
        let token = Token::new("0123456789abcdef").unwrap();
        assert_eq!(format!("{token:?}"), "Token { .. }");
        assert!(token.is("0123456789abcdef") && !token.is("0123456789abcdeg") && !token.is(""));
        for (wrong, what) in [
            ("", "is empty"),
            ("brief", "is too short: it has 5 bytes"),
            ("a line with its end\n", "byte 2 of 20 is white space"),
            ("0123456789abcdef\n", "byte 17 of 17 is white space"),
            ("0123456789\u{e4}bcdef", "byte 11 of 17 is not ASCII"),
            ("0123456789,bcdef", "byte 11 of 16 is none of these"),
            (&"x".repeat(257), "is too long: it has 257 bytes"),
        ] {
            let error = Token::new(wrong).unwrap_err().to_string();
            assert!(error.contains(what) && error.contains("expected 16 to 256"), "{error}");
            assert!(wrong.is_empty() || !error.contains(wrong.trim()), "{error}");
        }
    }
}
